"""Batches items: lists of them become arrays."""

from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rollflow.nodes.connectors.connector_v2 import Batch, BatchedArray, ConnectorV2, Episodes
from rollflow.nodes.connectors.list_form import episode_key, is_keyed_by_episode, single_agent_episodes
from rollflow.nodes.connectors.stateful import max_seq_len_of
from rollflow.stream.data.columns import Columns
from rollflow.stream.data.errors import ConnectorError
from rollflow.stream.data.tree import Tree, concatenate_trees, leaves_of, map_tree, stack_trees


@dataclass(kw_only=True, eq=False, repr=False)
class BatchIndividualItems(ConnectorV2):
    """Turns columns in list form into trees of arrays `any[B, ...]`, episode by episode in order.

    multi_agent    True where columns may be under module ids

    Items that were added as arrays are joined end to end. Columns that are arrays already stay as they are, and infos
    stay a list. Raises ConnectorError, naming the column, where items do not have one shape.
    """

    columnar = True
    changes_episodes = False

    multi_agent: bool = False

    def __call__(self, *, rl_module: Any, batch: Batch, episodes: Episodes, **kwargs: Any) -> Batch:
        for column, data in batch.items():
            if isinstance(data, np.ndarray | torch.Tensor):
                continue
            if self.multi_agent and isinstance(data, dict) and not is_keyed_by_episode(data):  # a module's columns
                for name, part in data.items():
                    if _is_list_form(part):
                        data[name] = _items(part) if name == Columns.INFOS else _batched(name, _items(part))
            elif _is_list_form(data):
                length = max_seq_len_of(rl_module) if Columns.SEQ_LENS in batch and column != Columns.INFOS else 1
                items = _items(data) if isinstance(data, list) else _in_order(column, data, episodes, length)
                batch[column] = items if column == Columns.INFOS or not items else _batched(column, items)
        return batch


def _is_list_form(data: Any) -> bool:
    return isinstance(data, list) or is_keyed_by_episode(data)


def _items(data: Any) -> list[Any]:
    """The items of a column in list form, episode after episode."""
    return [item for items in data.values() for item in items] if isinstance(data, dict) else data


def _in_order(column: str, data: dict[tuple[Any, ...], list[Any]], episodes: Episodes | None, length: int) -> list[Any]:
    """The items of a column in the order of the episodes, which is that of all columns made from arrays.

    length    steps of an item, which is a row
    """
    chunks = list(single_agent_episodes(episodes or (), stepped_only=False))
    keys = [episode_key(chunk) for chunk in chunks]
    if data.keys() - set(keys) or any(len(chunk) and key not in data for key, chunk in zip(keys, chunks, strict=True)):
        return _items(data)  # not a column over these episodes
    data = {key: data.get(key, []) for key in keys}
    if len(data) == len(keys):
        return [item for key in keys for item in data[key]]
    # Chunks of one episode share a key and its items: one for each step or row, or one for each chunk.
    there = {key: sum(map(num_rows_of, items)) for key, items in data.items()}
    for wanted in ([-(-len(chunk) // length) for chunk in chunks], [1] * len(chunks)):
        sums = dict.fromkeys(data, 0)
        for key, count in zip(keys, wanted, strict=True):
            sums[key] += count
        if sums == there:
            return _dealt_out(data, keys, wanted)
    key = next(key for key in data if there[key] != sums[key])
    raise ConnectorError(
        f"column '{column}' has {there[key]} items under {key}, expected one for each step of that episode's "
        f"{keys.count(key)} chunks, or one for each chunk"
    )


def _dealt_out(data: dict[tuple[Any, ...], list[Any]], keys: list[tuple[Any, ...]], wanted: list[int]) -> list[Any]:
    left = {key: deque(items) for key, items in data.items()}
    ordered: list[Any] = []
    for key, count in zip(keys, wanted, strict=True):
        rows = 0
        while rows < count:
            item = left[key].popleft()
            rows += num_rows_of(item)
            ordered.append(item)
    return ordered


def num_rows_of(item: Tree) -> int:
    """The number of items that an item stands for: several where it came as arrays with a leading axis."""
    return len(leaves_of(item)[0]) if _is_batched(item) else 1


def _is_batched(item: Tree) -> bool:
    """True if an item stands for several; infos may be without a leaf."""
    return any(isinstance(leaf, BatchedArray) for leaf in leaves_of(item)[:1])


def with_leading_axis(item: Tree) -> Tree:
    """An item as a tree of plain arrays with a leading axis: its own one, or a new one."""
    if _is_batched(item):
        return map_tree(np.asarray, item)
    return map_tree(lambda leaf: np.asarray(leaf)[None], item)


def _batched(column: str, items: list[Any]) -> Tree:
    try:
        if any(map(_is_batched, items)):
            return concatenate_trees(list(map(with_leading_axis, items)))
        return stack_trees(items)
    except ValueError as error:
        shapes = sorted({str(map_tree(np.shape, item)) for item in items})
        raise ConnectorError(f"column '{column}': items of shapes {', '.join(shapes)} make no batch: {error}") from None
