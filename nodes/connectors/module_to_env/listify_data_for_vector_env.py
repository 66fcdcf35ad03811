"""Items by episode become rows in the environments' order."""

from typing import Any

from rollflow.nodes.connectors.agents import episode_key, id_in_keys, single_agent_episodes
from rollflow.nodes.connectors.connector_v2 import Batch, ConnectorV2, Episodes
from rollflow.stream.columns import Columns
from rollflow.stream.errors import ConnectorError
from rollflow.stream.multi_agent_episode import MultiAgentEpisode
from rollflow.stream.tree import stack_trees

_ACTIONS = (Columns.ACTIONS, Columns.ACTIONS_FOR_ENV)


class ListifyDataForVectorEnv(ConnectorV2):
    """Turns `(episode id,) -> [item]` into lists with one item per slot, and actions into arrays `any[N, ...]`.

    With multi-agent episodes, `(episode id, agent id, module id) -> [item]` becomes a list with one dict per slot,
    agent id -> item, also for actions. Those are there even where no agent is to act: every dict is empty then.

    Columns that are arrays already, one row per slot, stay as they are. Raises ConnectorError for items of an episode
    that is none of those given, for an episode without its one item, and for an agent that is to act without an action.
    """

    columnar = True
    changes_episodes = False

    def __call__(
        self,
        *,
        rl_module: Any,
        batch: Batch,
        episodes: Episodes,
        explore: bool | None = None,
        shared_data: dict[str, Any] | None = None,
        metrics: Any = None,
        **kwargs: Any,
    ) -> Batch:
        if not batch and _are_several_agents(episodes):
            return _by_slots(batch, episodes)
        for column, data in batch.items():
            if not isinstance(data, dict) or not data or not _is_in_list_form(data):
                continue
            if _are_several_agents(episodes):
                return _by_slots(batch, episodes)
            keys = [episode_key(episode) for episode in single_agent_episodes(episodes, stepped_only=True)]
            if data.keys() != set(keys) or any(len(items) != 1 for items in data.values()):
                raise ConnectorError(
                    f"column '{column}' has {sum(map(len, data.values()))} items for episodes {list(data)}, expected "
                    f"one for each of {keys}"
                )
            items = [data[key][0] for key in keys]
            batch[column] = stack_trees(items) if column in _ACTIONS else items
        return batch


def _are_several_agents(episodes: Episodes) -> bool:
    return any(isinstance(episode, MultiAgentEpisode) for episode in episodes)


def _is_in_list_form(data: Any) -> bool:
    return isinstance(data, dict) and all(isinstance(key, tuple) for key in data)


def _by_slots(batch: Batch, episodes: Episodes) -> Batch:
    """Columns in list form as lists with one dict per slot, or one item for a slot with a single agent."""
    slots = {id_in_keys(episode): slot for slot, episode in enumerate(episodes)}
    batch.setdefault(Columns.ACTIONS, {})
    for column, data in batch.items():
        if not _is_in_list_form(data):
            continue
        listed: list[Any] = [{} if isinstance(episode, MultiAgentEpisode) else None for episode in episodes]
        for key, items in data.items():
            slot = slots.get(key[0])
            if slot is None or len(items) != 1:
                raise ConnectorError(
                    f"column '{column}' has {len(items)} items for {key}, expected one for an agent of: "
                    f"{', '.join(map(str, slots))}"
                )
            if isinstance(episodes[slot], MultiAgentEpisode):
                listed[slot][key[1]] = items[0]
            else:
                listed[slot] = items[0]
        if column in _ACTIONS:
            _refuse_idle(column, listed, episodes)
        batch[column] = listed
    return batch


def _refuse_idle(column: str, listed: list[Any], episodes: Episodes) -> None:
    """Raise ConnectorError for an agent that is to act and has no action."""
    for slot, (given, episode) in enumerate(zip(listed, episodes, strict=True)):
        if isinstance(episode, MultiAgentEpisode):
            idle = sorted(map(str, episode.get_agents_to_act() - given.keys()))
            told = f"agent '{idle[0]}' of episode '{episode.id_}' at env step {episode.env_t}" if idle else None
        else:
            told = f"episode '{episode.id_}' at step {episode.t}" if given is None else None
        if told is not None:
            raise ConnectorError(f"column '{column}' has no item for {told}, slot {slot}, expected one: it is to act")
