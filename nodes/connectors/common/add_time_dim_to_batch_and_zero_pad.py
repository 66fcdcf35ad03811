"""A time axis for stateful modules."""

from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from rollflow.nodes.connectors.agents import episode_key, is_keyed_by_episode, single_agent_episodes
from rollflow.nodes.connectors.by_module import module_by_module
from rollflow.nodes.connectors.connector_v2 import Batch, BatchedArray, ConnectorV2, Episodes
from rollflow.nodes.connectors.stateful import is_stateful, max_seq_len_of
from rollflow.stream.columns import Columns
from rollflow.stream.errors import ConnectorError
from rollflow.stream.fragment_episodes import FragmentEpisodes
from rollflow.stream.tree import Tree, concatenate_trees, leaves_of, map_tree

TIME_RANK_ADDED = "_added_single_ts_time_rank"
"""Where `shared_data` says that the forward batch has a time axis, of which the output is to be freed."""


class AddTimeDimToBatchAndZeroPad(ConnectorV2):
    """Gives every column but the infos a time axis, for a stateful module.

        as_learner_connector    whether the batch is for training

    While acting, an item `any[...]` becomes `any[1, ...]`. For training, each episode's items become rows of
    `max_seq_len` steps, `any[L, ...]`, the last of them padded on the right with zeros; added are `loss_mask`,
    bool[rows, L], False where padded, and `seq_lens`, i64[rows], the steps that each row really has.
    `max_seq_len` is the module's `model_config`'s, 20 where that says nothing.

    Does nothing for a module that is not stateful, and where a piece has put `state_in` into the batch itself. Raises
    ConnectorError for a column that does not have one item for each step.
    """

    columnar = True
    changes_episodes = False

    def __init__(
        self,
        input_observation_space: gym.Space[Any] | None = None,
        input_action_space: gym.Space[Any] | None = None,
        *,
        as_learner_connector: bool = False,
    ) -> None:
        super().__init__(input_observation_space, input_action_space)
        self.as_learner_connector = as_learner_connector

    @module_by_module
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
        if not is_stateful(rl_module) or Columns.STATE_IN in batch:
            return batch
        if self.as_learner_connector:
            return self._in_rows(batch, episodes, max_seq_len_of(rl_module))
        for column, data in batch.items():
            if column != Columns.INFOS:
                batch[column] = _with_axis(data)
        if shared_data is not None:
            shared_data[TIME_RANK_ADDED] = True
        return batch

    def _in_rows(self, batch: Batch, episodes: Episodes, length: int) -> Batch:
        columnar = isinstance(episodes, FragmentEpisodes)
        lengths = _lengths(episodes)
        steps = steps_of_rows(lengths, length)
        for column, data in batch.items():
            if column == Columns.INFOS:
                continue
            if is_keyed_by_episode(data):
                batch[column] = _keyed_rows(column, data, episodes, length)
            else:
                items = concatenate_trees([_as_array(item) for item in data]) if isinstance(data, list) else data
                batch[column] = _rows_of(f"column '{column}'", items, steps, int(lengths.sum()))
        mask = steps >= 0
        added = {Columns.SEQ_LENS: mask.sum(1)}
        if Columns.LOSS_MASK not in batch:  # one that a piece put there is cut and padded with False like all else
            added[Columns.LOSS_MASK] = mask
        batch |= added
        if not columnar:
            rows = num_rows(lengths, length)
            ends = np.cumsum(rows)
            alone = list(single_agent_episodes(episodes, stepped_only=False))
            for column in added:
                whole = batch.pop(column)
                for episode, begin, end in zip(alone, ends - rows, ends, strict=True):
                    self.add_n_batch_items(batch, column, whole[begin:end], int(end - begin), episode)
        return batch


def _lengths(episodes: Episodes) -> NDArray[np.int64]:
    if isinstance(episodes, FragmentEpisodes):
        return episodes.lengths
    return np.array([len(episode) for episode in episodes], np.int64)


def num_rows(lengths: NDArray[np.int64], length: int) -> NDArray[np.int64]:
    """i64[C]: in how many rows of `length` steps each chunk is laid out."""
    rows: NDArray[np.int64] = -(-lengths // length)
    return rows


def steps_of_rows(lengths: NDArray[np.int64], length: int) -> NDArray[np.int64]:
    """i64[rows, length]: which step stands where, of chunks laid end to end; -1 for padding."""
    rows = num_rows(lengths, length)
    chunk = np.repeat(np.arange(len(lengths)), rows)
    nth = np.arange(len(chunk)) - np.repeat(np.cumsum(rows) - rows, rows)  # row within its chunk
    within = nth[:, None] * length + np.arange(length)
    start = (np.cumsum(lengths) - lengths)[chunk]
    return np.where(within < lengths[chunk][:, None], within + start[:, None], -1)


def _rows_of(told: str, items: Tree, steps: NDArray[np.int64], count: int) -> Tree:
    """Items, a tree of arrays `any[count, ...]`, as a tree of arrays `any[rows, L, ...]`."""
    padding = steps < 0

    def laid_out(leaf: Any) -> Any:
        leaf = np.asarray(leaf)
        if len(leaf) != count:
            raise ConnectorError(f"{told} has {len(leaf)} items, expected {count}: one for each step")
        rows = leaf[steps]
        rows[padding] = 0
        return rows

    return map_tree(laid_out, items)


def _keyed_rows(column: str, data: dict[Any, list[Any]], episodes: Episodes, length: int) -> dict[Any, list[Any]]:
    """Each chunk's items as one array of rows; those of chunks of one episode are dealt out in order."""
    joined = {key: concatenate_trees([_as_array(item) for item in items]) for key, items in data.items() if items}
    taken = dict.fromkeys(joined, 0)
    rows: dict[Any, list[Any]] = {key: [] for key in data}
    for episode in single_agent_episodes(episodes, stepped_only=False):
        key, count = episode_key(episode), len(episode)
        if key not in joined or not count:
            continue
        begin = taken[key]
        taken[key] = begin + count
        told = f"column '{column}' of episode '{key[0]}'"
        items = map_tree(lambda leaf, a=begin, b=begin + count: leaf[a:b], joined[key])
        laid_out = _rows_of(told, items, steps_of_rows(np.array([count]), length), count)
        rows[key].append(map_tree(lambda leaf: leaf.view(BatchedArray), laid_out))
    for key, items in joined.items():
        there = len(leaves_of(items)[0])
        if there != taken[key]:
            raise ConnectorError(
                f"column '{column}' of episode '{key[0]}' has {there} items, expected {taken[key]}: one for each step"
            )
    return rows


def _as_array(item: Tree) -> Tree:
    """An item with a leading axis, a tree of plain arrays: the one it came with, or a new one."""
    if isinstance(leaves_of(item)[0], BatchedArray):
        return map_tree(np.asarray, item)
    return map_tree(lambda leaf: np.asarray(leaf)[None], item)


def _with_axis(data: Any) -> Any:
    """A column with a time axis of one step behind the batch's."""
    if is_keyed_by_episode(data):
        return {key: [_item_with_axis(item) for item in items] for key, items in data.items()}
    if isinstance(data, list):
        return [_item_with_axis(item) for item in data]
    return map_tree(lambda leaf: leaf[:, None], data)


def _item_with_axis(item: Tree) -> Tree:
    def widened(leaf: Any) -> Any:
        return leaf[:, None] if isinstance(leaf, BatchedArray) else np.asarray(leaf)[None]

    return map_tree(widened, item)
