"""Pieces that take a forward pass's output apart: into items, by agents, and as rows for the environments."""

from functools import partial
from typing import Any

import numpy as np

from rollflow.nodes.connectors.common.by_module import MEMORIZED, module_by_module
from rollflow.nodes.connectors.common.episode_columns import TIME_RANK_ADDED
from rollflow.nodes.connectors.connector_v2 import Batch, ConnectorV2, Episodes, SharedData
from rollflow.nodes.connectors.list_form import (
    episode_key,
    id_in_keys,
    is_keyed_by_episode,
    map_column,
    single_agent_episodes,
)
from rollflow.stream.data.columns import Columns
from rollflow.stream.data.errors import ConnectorError
from rollflow.stream.data.tree import Tree, leaves_of, map_tree, stack_trees
from rollflow.stream.episodes.multi_agent import MultiAgentEpisode
from rollflow.stream.fragments.live_episode import LaneEpisodes


class UnBatchToIndividualItems(ConnectorV2):
    """Turns trees of arrays `any[N, ...]` into `(episode id,) -> [item]`, in the episodes' order.

    A batch by module ids becomes `module id -> column -> (episode id, agent id, module id) -> [item]`. The order is
    that which `AgentToModuleMapping` keeps in `shared_data`. Arrays stay where all pieces after this one work with
    columns. Raises ConnectorError where a column does not have one row per episode.
    """

    columnar = True
    changes_episodes = False

    def __call__(self, *, batch: Batch, episodes: Episodes, shared_data: SharedData = None, **kwargs: Any) -> Batch:
        memorized = (shared_data or {}).get(MEMORIZED)
        if memorized is not None and batch.keys() <= memorized.keys():  # by module ids
            for module, columns in batch.items():
                keys = [
                    (episode_id,) if agent_id is None else (episode_id, agent_id, module)
                    for episode_id, agent_id in memorized[module]
                ]
                batch[module] = {column: _unbatched(column, data, keys) for column, data in columns.items()}
            return batch
        if isinstance(episodes, LaneEpisodes):
            return batch
        keys = [episode_key(episode) for episode in single_agent_episodes(episodes, stepped_only=True)]
        for column, data in batch.items():
            batch[column] = _unbatched(column, data, keys)
        return batch


def _unbatched(column: str, data: Tree, keys: list[tuple[Any, ...]]) -> dict[tuple[Any, ...], list[Any]]:
    for leaf in leaves_of(data):
        if np.shape(leaf)[:1] != (len(keys),):
            raise ConnectorError(
                f"column '{column}' has an array of shape {list(np.shape(leaf))}, expected {len(keys)} rows: "
                "one per episode"
            )
    return {key: [map_tree(lambda leaf, i=i: leaf[i], data)] for i, key in enumerate(keys)}


class RemoveSingleTsTimeRankFromBatch(ConnectorV2):
    """Removes from every column but `state_out` the time axis that `AddTimeDimToBatchAndZeroPad` added before.

    An item `any[1, ...]` becomes `any[...]`. Does nothing unless that piece has added one, by `shared_data`. Raises
    ConnectorError for a column that has no time axis of one step.
    """

    columnar = True
    changes_episodes = False

    @module_by_module
    def __call__(self, *, batch: Batch, shared_data: SharedData = None, **kwargs: Any) -> Batch:
        if not shared_data or not shared_data.get(TIME_RANK_ADDED):
            return batch
        for column, data in batch.items():
            if column in (Columns.STATE_OUT, Columns.INFOS):
                continue
            batch[column] = map_column(data, partial(_without, column, 0), partial(_without, column, 1))
        return batch


def _without(column: str, axis: int, data: Tree) -> Tree:
    def taken(leaf: Any) -> Any:
        if leaf.ndim <= axis or leaf.shape[axis] != 1:
            expected = "[N, 1, ...]" if axis else "[1, ...]"
            raise ConnectorError(
                f"column '{column}' has shape {list(leaf.shape)}, expected {expected}: a stateful module's outputs "
                f"have a time axis, all but '{Columns.STATE_OUT}'"
            )
        return leaf[:, 0] if axis else leaf[0]

    return map_tree(taken, data)


class ModuleToAgentUnmapping(ConnectorV2):
    """Turns `module id -> column -> (episode id, agent id, module id) -> items` into `column -> keys -> items`.

    Items of one key under several modules come one after the other. Raises ConnectorError for a batch that is not by
    module ids and episodes.
    """

    columnar = False
    pipelines = ("module-to-env",)
    changes_episodes = False

    def __call__(self, *, batch: Batch, **kwargs: Any) -> Batch:
        unmapped: Batch = {}
        for module, columns in batch.items():
            if not isinstance(columns, dict):
                raise ConnectorError(f"'{module}' is {type(columns).__name__}, expected a module's columns, a dict")
            for column, data in columns.items():
                if not is_keyed_by_episode(data):
                    raise ConnectorError(
                        f"column '{column}' of module '{module}' is {type(data).__name__}, expected a dict from "
                        "episodes to lists of items: ModuleToAgentUnmapping stands behind UnBatchToIndividualItems"
                    )
                for key, items in data.items():
                    unmapped.setdefault(column, {}).setdefault(key, []).extend(items)
        return unmapped


_ACTIONS = (Columns.ACTIONS, Columns.ACTIONS_FOR_ENV)


class ListifyDataForVectorEnv(ConnectorV2):
    """Turns `(episode id,) -> [item]` into lists with one item per slot, and actions into arrays `any[N, ...]`.

    With multi-agent episodes, `(episode id, agent id, module id) -> [item]` becomes a list with one dict per slot:
    agent id -> item. Actions do as well, also where no agent is to act: every dict is empty then.

    Columns that are arrays already, one row per slot, stay as they are. Raises ConnectorError for items of an unknown
    episode, an episode without its one item, and an agent that is to act without an action.
    """

    columnar = True
    pipelines = ("module-to-env",)
    changes_episodes = False

    def __call__(self, *, batch: Batch, episodes: Episodes, **kwargs: Any) -> Batch:
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
    for slot, (item, episode) in enumerate(zip(listed, episodes, strict=True)):
        if isinstance(episode, MultiAgentEpisode):
            idle = sorted(map(str, episode.get_agents_to_act() - item.keys()))
            idler = f"agent '{idle[0]}' of episode '{episode.id_}' at env step {episode.env_t}" if idle else None
        else:
            idler = f"episode '{episode.id_}' at step {episode.t}" if item is None else None
        if idler is not None:
            raise ConnectorError(f"column '{column}' has no item for {idler}, slot {slot}, expected one: it is to act")
