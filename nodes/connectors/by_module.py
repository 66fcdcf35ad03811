"""Pieces that know of one module only, called once for each module that a list of episodes has agents of."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from rollflow.nodes.connectors.agents import Episodes, episode_key, is_keyed_by_episode, single_agent_episodes
from rollflow.nodes.connectors.common.agent_to_module_mapping import MEMORIZED
from rollflow.nodes.connectors.connector_v2 import Batch
from rollflow.stream.episode import SingleAgentEpisode
from rollflow.stream.errors import ConnectorError
from rollflow.stream.fragment_episodes import FragmentEpisodes
from rollflow.stream.live_episode import LaneEpisodes
from rollflow.stream.multi_agent_episode import DEFAULT_MODULE_ID, MultiAgentEpisode

OF_MODULES = "of_modules"
"""Where `shared_data` has what pieces that were called for one module put there: module id -> key -> value."""

_COLUMNAR = (LaneEpisodes, FragmentEpisodes)  # a tuple: this is asked at every vector step, and `|` takes longer

Call = TypeVar("Call", bound=Callable[..., Batch])


def module_by_module(call: Call) -> Call:
    """A piece's `__call__` that, for agents of modules, is called once for each module.

    It is given the module, `rl_module[module id]`, its agents' single-agent episodes, and its part of the batch:
    `batch[module id]` where that is by modules already, else the columns of its agents' items, which are put together
    again afterwards. What it puts into `shared_data` only calls for the same module see. An `rl_module` that is not by
    ids serves all agents. A piece with `as_learner_connector=False` is given the agents that stepped.

    Episodes that no module is named for, and columns that come with them, pass through as they are. Raises
    ConnectorError for a module that `rl_module` does not have, and for columns that can't be told apart by modules.
    """

    @functools.wraps(call)
    def called(self: Any, **kwargs: Any) -> Batch:
        episodes = kwargs["episodes"]
        if isinstance(episodes, _COLUMNAR) or not _have_modules(episodes):
            return call(self, **kwargs)
        return _for_each_module(call, self, **kwargs)

    return called  # type: ignore[return-value]


def _for_each_module(
    call: Any,
    piece: Any,
    *,
    rl_module: Any,
    batch: Batch,
    episodes: Episodes,
    shared_data: dict[str, Any] | None = None,
    **kwargs: Any,
) -> Batch:
    shared = {} if shared_data is None else shared_data
    memorized: Mapping[Any, list[tuple[Any, Any]]] = shared.get(MEMORIZED, {})
    mapped = {pair: module for module, pairs in memorized.items() for pair in pairs}
    groups: dict[Any, list[SingleAgentEpisode]] = {}
    for episode in single_agent_episodes(episodes, stepped_only=not getattr(piece, "as_learner_connector", True)):
        groups.setdefault(_module_id(episode_key(episode), mapped), []).append(episode)

    def called_for(module: Any, part: Batch, theirs: list[SingleAgentEpisode]) -> Batch:
        given = module_of(rl_module, module)
        try:
            return _with_own(shared, module, call, piece, rl_module=given, batch=part, episodes=theirs, **kwargs)
        except Exception as error:
            error.add_note(f"for module '{module}'")
            raise

    if batch and batch.keys() <= {*groups, *memorized}:
        for module, part in batch.items():
            batch[module] = called_for(module, part, _in_order(groups.get(module, []), memorized.get(module)))
        return batch
    parts = _parts(batch, list(groups), mapped)
    made = [called_for(module, parts[module], theirs) for module, theirs in groups.items()]
    return _joined(batch, made, [episode_key(each) for theirs in groups.values() for each in theirs])


def module_of(rl_module: Any, module_id: Any) -> Any:
    """The module of an id; one that is not by ids serves all. Raises ConnectorError for an id that is not there."""
    if rl_module is None or not hasattr(rl_module, "__getitem__"):
        return rl_module
    try:
        return rl_module[module_id]
    except KeyError:
        there = ", ".join(map(str, rl_module.keys())) if hasattr(rl_module, "keys") else "others"
        raise ConnectorError(f"agents are mapped to module '{module_id}', expected one of: {there}") from None


def _have_modules(episodes: Episodes) -> bool:
    return any(isinstance(episode, MultiAgentEpisode) or episode.module_id is not None for episode in episodes)


def _module_id(key: tuple[Any, ...], mapped: Mapping[tuple[Any, Any], Any]) -> Any:
    """The module of the items under a key."""
    episode_id, agent_id, module_id = (*key, None, None)[:3]
    module = mapped.get((episode_id, agent_id), module_id)
    return DEFAULT_MODULE_ID if module is None else module


def _with_own(shared: dict[str, Any], module: Any, call: Any, *args: Any, **kwargs: Any) -> Batch:
    """Call with `shared_data` in which the module's own comes before what all share; what is new in it becomes own."""
    theirs = {**shared, **shared.get(OF_MODULES, {}).get(module, {})}
    before = dict(theirs)
    made: Batch = call(*args, shared_data=theirs, **kwargs)
    new = {key: value for key, value in theirs.items() if key not in before or before[key] is not value}
    if new:
        shared.setdefault(OF_MODULES, {}).setdefault(module, {}).update(new)
    return made


def _in_order(episodes: list[SingleAgentEpisode], pairs: list[tuple[Any, Any]] | None) -> list[SingleAgentEpisode]:
    """Episodes in the order in which the module's batch has their items; those that it has none of are left out."""
    if pairs is None:
        return episodes
    places = {pair: place for place, pair in enumerate(pairs)}
    placed = [(places.get((*episode_key(episode), None)[:2], -1), episode) for episode in episodes]
    return [episode for place, episode in sorted(placed, key=lambda each: each[0]) if place >= 0]


def _parts(batch: Batch, modules: list[Any], mapped: Mapping[tuple[Any, Any], Any]) -> dict[Any, Batch]:
    """Module id -> its part of columns that are by agents."""
    parts: dict[Any, Batch] = {module: {} for module in modules}
    for column, data in batch.items():
        if len(modules) == 1:
            parts[modules[0]][column] = data
        elif is_keyed_by_episode(data):
            for key, items in data.items():
                parts.setdefault(_module_id(key, mapped), {}).setdefault(column, {})[key] = items
        elif modules and len(data):
            raise ConnectorError(
                f"column '{column}' is {type(data).__name__}, expected a dict from agents to lists of items: it is to "
                f"be told apart by modules ({', '.join(map(str, modules))})"
            )
    return parts


def _joined(batch: Batch, parts: list[Batch], keys: list[tuple[Any, ...]]) -> Batch:
    """The batch with the columns that were made of its parts, all with the agents in one order."""
    if len(parts) == 1:
        batch.update(parts[0])
        return batch
    made: dict[str, dict[Any, Any]] = {}
    for part in parts:
        for column, data in part.items():
            if not is_keyed_by_episode(data):
                raise ConnectorError(
                    f"column '{column}' was made {type(data).__name__} for one of {len(parts)} modules, expected a "
                    "dict from agents to lists of items"
                )
            made.setdefault(column, {}).update(data)
    for column, by_agent in made.items():
        whole = {**batch.get(column, {}), **by_agent}
        batch[column] = {key: whole[key] for key in dict.fromkeys([*whole, *keys]) if key in whole}
    return batch
