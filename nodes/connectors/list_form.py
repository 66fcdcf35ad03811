"""Spaces agent by agent, batches in list form, `column -> (episode id, …) -> [items]`, and agents in episodes."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from rollflow.stream.data.errors import ConnectorError, shown
from rollflow.stream.data.space import Space as Space, is_columnar
from rollflow.stream.episodes.multi_agent import MultiAgentEpisode
from rollflow.stream.episodes.single_agent import SingleAgentEpisode
from rollflow.stream.fragments.live_episode import LaneEpisodes, LiveEpisode


def space_of_agent(space: Any, agent_id: Any) -> Any:
    """An agent's part of a Dict space by agent ids; any other space is the same for all agents."""
    if agent_id is not None and isinstance(space, spaces.Dict) and agent_id in space.spaces:
        return space.spaces[agent_id]
    return space


def check_is_space(space: Any, origin: str) -> None:
    """Raise ConnectorError for anything but a space; `origin` begins the text."""
    if not isinstance(space, gym.Space):
        raise ConnectorError(f"{origin} {shown(space)}, {type(space).__name__}, expected a gymnasium space").see(
            "piece"
        )


def check_has_numbers(space: Any, refusal: str) -> None:
    """Raise ConnectorError, "`refusal` in ...", for a space that is not made of numbers alone."""
    if not is_columnar(space):
        raise ConnectorError(
            f"{refusal} in {space}; expected Box, Discrete, MultiDiscrete, MultiBinary, or a Dict or Tuple of those"
        )


def space_by_agents(observation_space: Space, action_space: Any, made: Callable[[Space, Any, Any], Space]) -> Space:
    """The Dict space, agent id -> `made(observation space, action space, agent id)` of each agent's part.

    Raises ConnectorError for an observation space that is no Dict.
    """
    if not isinstance(observation_space, spaces.Dict):
        raise ConnectorError(
            f"multi_agent=True and an observation space {observation_space}, expected a Dict by agent ids; in a "
            "MultiAgentRollout, whose pieces see each agent by itself, multi_agent is to be left out"
        )
    return spaces.Dict(
        {
            agent_id: made(part, space_of_agent(action_space, agent_id), agent_id)
            for agent_id, part in observation_space.spaces.items()
        }
    )


Episodes = Sequence[SingleAgentEpisode | MultiAgentEpisode]


def episode_key(episode: SingleAgentEpisode) -> tuple[Any, ...]:
    """The key of an episode's items in a batch in list form."""
    if episode.agent_id is None and episode.module_id is None:
        return (episode.id_,)
    return (episode.multi_agent_episode_id, episode.agent_id, episode.module_id)


def is_keyed_by_episode(data: Any) -> bool:
    """True if a column is in list form, `(episode id, …) -> [items]`, and no tree of arrays."""
    return (
        isinstance(data, dict)
        and bool(data)
        and all(isinstance(key, tuple) and isinstance(items, list) for key, items in data.items())
    )


def map_column(data: Any, change_item: Callable[[Any], Any], change_batch: Callable[[Any], Any]) -> Any:
    """A column with each item changed, if it is in list form or a list, or else changed as a whole."""
    if is_keyed_by_episode(data):
        return {key: [change_item(item) for item in items] for key, items in data.items()}
    return [change_item(item) for item in data] if isinstance(data, list) else change_batch(data)


def single_agent_episodes(episodes: Episodes, stepped_only: bool) -> Iterator[SingleAgentEpisode]:
    """Iterate over single-agent episodes, and over the agents' episodes of each multi-agent one in its place.

    stepped_only    without the agents that have no observation at their episode's last env step
    """
    for episode in episodes:
        if isinstance(episode, MultiAgentEpisode):
            chosen = episode.get_agents_that_stepped() if stepped_only else episode.agent_ids
            yield from (each for agent_id, each in episode.agent_episodes.items() if agent_id in chosen)
        else:
            yield episode


def paired_with_items(
    episodes: Sequence[SingleAgentEpisode], items: list[Any] | Mapping[tuple[Any, ...], list[Any]]
) -> Iterator[tuple[SingleAgentEpisode, Any]]:
    """Iterate over pairs of an episode and its item: see `ConnectorV2.single_agent_episode_iterator`."""
    if not isinstance(items, Mapping):
        if len(items) != len(episodes):
            raise ValueError(
                f"zip_with_batch_column has {len(items)} items, expected one for each of {len(episodes)} episodes"
            )
        yield from zip(episodes, items, strict=True)
        return
    taken: dict[tuple[Any, ...], int] = {}
    for episode in episodes:
        key = episode_key(episode)
        theirs, place = items.get(key, []), taken.get(key, 0)
        if place >= len(theirs):
            raise ValueError(
                f"zip_with_batch_column has {len(theirs)} items for episode {key}, expected one for each time "
                f"it is in the list of episodes; keys: {list(items)}"
            )
        taken[key] = place + 1
        yield episode, theirs[place]


def rewrite_last(episode: SingleAgentEpisode, observation: Any, space: Space | None) -> None:
    """Replace an episode's last observation, `any[...]`, and its space, or its agent's part of a Dict by agent ids."""
    episode.set_observations(new_data=observation, at_indices=-1)
    if space is not None:
        episode.observation_space = space_of_agent(space, episode.agent_id)


def settle_observations(episodes: Episodes, space: Space | None) -> None:
    """End the turn of a piece that leaves observations in a space: what it wrote to live episodes is converted to it.

    Other episodes stay as they are.
    """
    if isinstance(episodes, LaneEpisodes):
        episodes.settle(space)
    elif len(episodes) and isinstance(episodes[0], LiveEpisode):
        episodes[0].settle(space)  # for all of them
    elif len(episodes) and isinstance(episodes[0], MultiAgentEpisode):
        for each in single_agent_episodes(episodes, stepped_only=False):
            if isinstance(each, LiveEpisode):
                each.settle(space_of_agent(space, each.agent_id))


def id_in_keys(episode: SingleAgentEpisode | MultiAgentEpisode) -> Any:
    """The id that the keys of an episode's items begin with."""
    return episode.id_ if isinstance(episode, MultiAgentEpisode) else episode_key(episode)[0]


Batch = dict[str, Any]


class BatchedArray(np.ndarray[Any, Any]):
    """An array whose first axis runs over several items, which `add_n_batch_items` has added at once."""


def change_items(batch: Batch, column: str | list[str] | tuple[str, ...], func: Callable[..., Any]) -> None:
    """Replace items in place: see `ConnectorV2.foreach_batch_item_change_in_place`."""
    columns = [column] if isinstance(column, str) else list(column)
    for name in columns:
        if name not in batch:
            raise ConnectorError(f"the batch has no column '{name}'; columns: {', '.join(batch) or 'none'}")
    keys, *others = (list(batch[name]) if isinstance(batch[name], Mapping) else [None] for name in columns)
    for name, theirs in zip(columns[1:], others, strict=True):
        if set(theirs) != set(keys):
            raise ConnectorError(f"column '{name}' has items of {theirs}, column '{columns[0]}' of {keys}")
    changed: list[tuple[list[Any], list[Any]]] = []
    for key in keys:
        lists = [batch[name] if key is None else batch[name][key] for name in columns]
        _check_lists(columns, key, lists)
        ids = (*(() if key is None else key), None, None, None)[:3]
        if isinstance(column, str):
            changed.append((lists[0], [func(item, *ids) for item in lists[0]]))
            continue
        made = [_one_for_each(columns, func(items, *ids)) for items in zip(*lists, strict=True)]
        changed += [(items, [values[i] for values in made]) for i, items in enumerate(lists)]
    for items, values in changed:
        items[:] = values


def _check_lists(columns: list[str], key: Any, lists: list[Any]) -> None:
    """Raise ConnectorError unless all columns have lists of one length under a key."""
    of = "" if key is None else f" of {key}"
    for column, items in zip(columns, lists, strict=True):
        if not isinstance(items, list):
            raise ConnectorError(f"column '{column}'{of} is {type(items).__name__}, expected a list of items")
        if len(items) != len(lists[0]):
            raise ConnectorError(
                f"column '{column}' has {len(items)} items{of}, column '{columns[0]}' {len(lists[0])}; expected as many"
            )


def _one_for_each(columns: list[str], made: Any) -> tuple[Any, ...]:
    """Return a function's results, one item for each column. Raises ConnectorError for any other number."""
    if not isinstance(made, tuple | list) or len(made) != len(columns):
        raise ConnectorError(f"the function returned {shown(made)}, expected a tuple of one item for each of {columns}")
    return tuple(made)


def _is_by_module(batch: Batch) -> bool:
    """True if a batch in list form is `module id -> column -> items`."""
    return any(
        isinstance(data, dict)
        and not is_keyed_by_episode(data)
        and any(isinstance(items, list) or is_keyed_by_episode(items) for items in data.values())
        for data in batch.values()
    )


def items_of(batch: Batch, column: str, episode: SingleAgentEpisode | None) -> list[Any]:
    """The list of items of a column (and episode); a new one is put into the batch if there is none."""
    if column not in batch and _is_by_module(batch):
        raise ConnectorError(
            f"column '{column}' can't be added: the batch is by module already ({', '.join(map(str, batch))}); pieces "
            "that add columns stand before AgentToModuleMapping"
        )
    if episode is None:
        items = batch.setdefault(column, [])
    else:
        by_episode = batch.setdefault(column, {})
        if not isinstance(by_episode, dict):
            raise ConnectorError(
                f"column '{column}' is {type(by_episode).__name__}, expected a dict from episodes to lists of items"
            )
        items = by_episode.setdefault(episode_key(episode), [])
    if not isinstance(items, list):
        raise ConnectorError(f"column '{column}' is {type(items).__name__}, expected a list of items")
    return items
