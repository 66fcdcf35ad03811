"""Observations of many agents, put together into arrays."""

from collections.abc import Callable, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
import optree
from numpy.typing import NDArray

from rollflow.stream.column import Column
from rollflow.stream.errors import ColumnError, EnvError
from rollflow.stream.space import item_of, row_of
from rollflow.stream.tree import Tree, leaves_of


class ObservationRows:
    """Makes a tree of arrays `any[K, ...]`, copies in the space's dtypes, from K items of one space."""

    def __init__(self, space: gym.Space[Any]) -> None:
        item = item_of(space)
        self._space = space
        self._spec = optree.tree_structure(item, none_is_leaf=True)
        self._leaves = [(leaf.shape, leaf.dtype) for leaf in leaves_of(item)]
        self._is_nested = isinstance(item, dict | tuple)

    def __call__(self, items: Sequence[Tree], whose: Callable[[int], str]) -> Tree:
        """The rows of these items.

        `whose` says for an error whose item it is, by its place in the sequence. Raises EnvError for an item that is
        not of the space's structure, shapes and kinds of dtypes.
        """
        if not items:
            return row_of(self._space, 0)
        if not self._is_nested:
            rows = _rows(items, *self._leaves[0])
            return self._one_by_one(items, whose) if rows is None else rows
        try:
            leaves = list(zip(*map(self._spec.flatten_up_to, items), strict=True))
        except ValueError:
            return self._one_by_one(items, whose)
        columns = [_rows(leaf, *like) for leaf, like in zip(leaves, self._leaves, strict=True)]
        if any(rows is None for rows in columns):
            return self._one_by_one(items, whose)
        return self._spec.unflatten(columns)

    def _one_by_one(self, items: Sequence[Tree], whose: Callable[[int], str]) -> Tree:
        column = Column.empty("obs", row_of(self._space, len(items)), 1)
        for place, item in enumerate(items):
            try:
                column.write_slot(0, place, item)
            except (ColumnError, ValueError) as error:
                raise EnvError(f"{whose(place)}: an observation that is not in its space: {error}") from None
        return column.row(0)


def _rows(values: Sequence[Any], shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any] | None:
    """The values as one array; None where they don't all fit."""
    try:
        rows = np.array(values)
    except ValueError:
        return None
    if rows.shape != (len(values), *shape) or not np.can_cast(rows.dtype, dtype, "same_kind"):
        return None
    return rows.astype(dtype, copy=False)
