"""Items of one quantity over time, with a lookback: the index rules that every episode getter and setter share.

Positions are counted over everything stored. With a lookback of L items and n current ones:

    position    0 … L-1        L … L+n-1
    what        the lookback   the current items

An index i >= 0 is position L + i. An index i < 0 counts from the end, and runs on into the lookback; with
`neg_index_as_lookback` it counts leftward from the first current item instead, position L + i.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
import optree
from numpy.typing import NDArray

from rollflow.stream.errors import EpisodeError, EpisodeIndexError
from rollflow.stream.space import item_of, one_hot
from rollflow.stream.tree import Tree, concatenate_trees, leaves_of, map_tree, stack_trees

Index = int | np.integer[Any]
Indices = Index | slice | Sequence[Index] | NDArray[np.integer[Any]] | None


class LookbackBuffer:
    """A list of items, or a tree of arrays with a leading time axis, of which the first `lookback` are history.

        data        list of items, or a tree of arrays `any[L + n, ...]`; taken as it is, not copied
        lookback    L
        space       of one item; what `fill` and `one_hot_discrete` go by, where they are used
        name        of the quantity, for messages

    `len()`, iteration, `==` and `buffer[i]` see the current items; negative and list indices may reach the lookback.
    """

    def __init__(
        self, data: Tree, lookback: int = 0, space: gym.Space[Any] | None = None, *, name: str = "items"
    ) -> None:
        self.data = data
        self.space = space
        self.name = name
        self._lookback = lookback

    # Storage: what a buffer over something else overrides

    @property
    def lookback(self) -> int:
        """How many of the items are history."""
        return self._lookback

    @property
    def is_numpy(self) -> bool:
        """Whether the items are rows of arrays."""
        return not isinstance(self.data, list)

    def total(self) -> int:
        """How many items there are, the lookback included."""
        return len(self.data) if isinstance(self.data, list) else len(leaves_of(self.data)[0])

    def item(self, position: int) -> Any:
        """The item at a position."""
        return self.data[position] if isinstance(self.data, list | np.ndarray) else self.items(position)

    def items(self, where: Any) -> Any:
        """The items at a slice or array of positions: a list, or a tree of arrays."""
        if isinstance(self.data, list):
            return self.data[where] if isinstance(where, slice) else [self.data[position] for position in where]
        return map_tree(lambda leaf: leaf[where], self.data)

    def write(self, position: int, item: Any) -> None:
        """Replace the item at a position."""
        if isinstance(self.data, list):
            self.data[position] = item
            return
        parts = _parts_like(self.data, item, self.name)
        for leaf, part in zip(leaves_of(self.data), parts, strict=True):
            value = np.asarray(part)
            if value.shape != leaf.shape[1:]:
                raise EpisodeIndexError(
                    f"'{self.name}': the new item has shape {list(value.shape)}, expected {list(leaf.shape[1:])}"
                )
            leaf[position] = value

    def append(self, item: Any) -> None:
        """Add one item at the end; arrays are copied into longer ones."""
        if isinstance(self.data, list):
            self.data.append(item)
        else:
            self.extend([item])

    def extend(self, items: Any) -> None:
        """Add several items at the end: a list of them, or a tree of arrays."""
        if isinstance(self.data, list):
            self.data.extend(items if isinstance(items, list) else _rows(items))
        elif not isinstance(items, list) or items:
            rows = stack_trees(items) if isinstance(items, list) else items
            self.data = concatenate_trees([self.data, rows])

    def to_numpy(self) -> None:
        """Turn a list of items into a tree of arrays."""
        if isinstance(self.data, list) and self.data:
            self.data = stack_trees(self.data)

    # Reading

    def get(
        self,
        indices: Indices = None,
        *,
        neg_index_as_lookback: bool = False,
        fill: Any = None,
        one_hot_discrete: bool = False,
    ) -> Any:
        """Items by index: one for an int, several for a list or slice, the current ones for None.

        Several come as a list, or as a tree of arrays where the buffer holds arrays. What lies outside raises
        EpisodeIndexError for an int or list and is left out of a slice; with `fill`, it is replaced: by `fill`
        itself, or, where there is a `space`, by an item of the space that is full of it. `one_hot_discrete` turns
        Discrete and MultiDiscrete leaves into vectors (a filled one is full of `fill`) and needs a `space`
        (ValueError otherwise).
        """
        if one_hot_discrete and self.space is None:
            raise ValueError(f"one_hot_discrete on '{self.name}' needs a space, but the episode was given none")
        if indices is None:
            return self._encoded(self.items(slice(self.lookback, self.total())), one_hot_discrete, several=True)
        if isinstance(indices, int | np.integer):
            return self._one(int(indices), neg_index_as_lookback, fill, one_hot_discrete)
        if isinstance(indices, slice):
            positions = self._slice_positions(indices, neg_index_as_lookback, clip=fill is None)
            total = self.total()
            start, stop = positions.start, positions.stop
            if fill is not None and positions.step == 1 and stop < start and (stop >= total or start <= 0):
                positions = range(stop, start)  # reversed, and all of it outside: so many fillers
            if positions.step == 1 and positions.start >= 0 and positions.stop <= total:
                return self._encoded(self.items(slice(positions.start, positions.stop)), one_hot_discrete, several=True)
            return self._several(positions, fill, one_hot_discrete)
        positions_of = [self._position(int(index), neg_index_as_lookback, fill is not None) for index in indices]
        return self._several(positions_of, fill, one_hot_discrete)

    def __len__(self) -> int:
        return self.total() - self.lookback

    def __getitem__(self, indices: Any) -> Any:
        return self.get(indices)

    def __iter__(self) -> Iterator[Any]:
        return (self.item(position) for position in range(self.lookback, self.total()))

    def __eq__(self, other: object) -> bool:
        theirs = other.get() if isinstance(other, LookbackBuffer) else other
        return equal_trees(self.get(), theirs)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        form = "arrays" if self.is_numpy else "list"
        return f"<{type(self).__name__} '{self.name}': {len(self)} items after {self.lookback} of lookback, {form}>"

    # Writing

    def set(self, new_data: Any, at_indices: Indices = None, *, neg_index_as_lookback: bool = False) -> None:
        """Replace items by index, read as in `get`; None replaces the current items, never the lookback.

        `new_data` is one item for an int, else as many items as indices: a list, or a tree of arrays. Raises
        EpisodeIndexError for an index outside, and when the numbers of items differ.
        """
        if isinstance(at_indices, int | np.integer):
            self.write(self._position(int(at_indices), neg_index_as_lookback), new_data)
            return
        if at_indices is None:
            positions: Sequence[int] = range(self.lookback, self.total())
        elif isinstance(at_indices, slice):
            positions = self._slice_positions(at_indices, neg_index_as_lookback, clip=False)
            if positions and not 0 <= min(positions) <= max(positions) < self.total():
                raise self._outside(at_indices)
        else:
            positions = [self._position(int(index), neg_index_as_lookback) for index in at_indices]
        items = new_data if isinstance(new_data, list) else _rows(new_data)
        if len(items) != len(positions):
            raise EpisodeIndexError(
                f"'{self.name}': {len(items)} new items for {len(positions)} places; expected as many of both"
            )
        for position, item in zip(positions, items, strict=True):
            self.write(position, item)

    def __setitem__(self, indices: Any, new_data: Any) -> None:
        self.set(new_data, indices)

    # Index rules

    def _one(self, index: int, neg_index_as_lookback: bool, fill: Any, one_hot_discrete: bool) -> Any:
        lookback, total = self.lookback, self.total()
        position = index + (lookback if index >= 0 or neg_index_as_lookback else total)
        if 0 <= position < total:
            return self._encoded(self.item(position), one_hot_discrete, several=False)
        if fill is None:
            raise self._outside(index)
        return self._filler(fill, one_hot_discrete)

    def _position(self, index: int, neg_index_as_lookback: bool, may_lie_outside: bool = False) -> int:
        position = index + (self.lookback if index >= 0 or neg_index_as_lookback else self.total())
        if not may_lie_outside and not 0 <= position < self.total():
            raise self._outside(index)
        return position

    def _slice_positions(self, indices: slice, neg_index_as_lookback: bool, clip: bool) -> range:
        """The positions that a slice names; with `clip`, only those that exist."""
        step = 1 if indices.step is None else int(indices.step)
        lookback, total = self.lookback, self.total()
        if step == 0:
            raise ValueError(f"slice step on '{self.name}' is 0, expected any other number")

        def position(bound: Any, default: int) -> int:
            if bound is None:
                return default
            number = int(bound)
            return number + (lookback if number >= 0 or neg_index_as_lookback else total)

        if step > 0:
            start, stop = position(indices.start, lookback), position(indices.stop, total)
            if clip:
                start, stop = max(start, 0), min(stop, total)
        else:
            start, stop = position(indices.start, total - 1), position(indices.stop, lookback - 1)
            if clip:
                start, stop = min(start, total - 1), max(stop, -1)
        return range(start, stop, step)

    def _several(self, positions: Sequence[int], fill: Any, one_hot_discrete: bool) -> Any:
        total = self.total()
        if all(0 <= position < total for position in positions):
            where = list(positions)
            return self._encoded(self.items(where), one_hot_discrete, several=True)
        items = [
            self._encoded(self.item(position), one_hot_discrete, several=False)
            if 0 <= position < total
            else self._filler(fill, one_hot_discrete)
            for position in positions
        ]
        return stack_trees(items) if self.is_numpy else items

    def _filler(self, fill: Any, one_hot_discrete: bool) -> Any:
        if self.space is None:
            if not self.is_numpy or not self.total():
                return fill
            return map_tree(lambda leaf: np.full(leaf.shape[1:], fill, leaf.dtype), self.items(slice(0, 1)))
        item = item_of(self.space, fill)
        if not one_hot_discrete:
            return item
        return map_tree(lambda leaf: np.full_like(leaf, fill), one_hot(self.space, item))

    def _encoded(self, items: Any, one_hot_discrete: bool, *, several: bool) -> Any:
        if not one_hot_discrete or self.space is None:
            return items
        if several and not self.is_numpy:
            return [one_hot(self.space, item) for item in items]
        return one_hot(self.space, items)

    def _outside(self, index: Any) -> EpisodeIndexError:
        return EpisodeIndexError(
            f"index {index} of '{self.name}' is outside {-self.total()} … {len(self) - 1} "
            f"(lookback {self.lookback}, length {len(self)})"
        )


def equal_trees(left: Any, right: Any) -> bool:
    """Whether two items, or two lists of items, have the same structure and the same values."""
    try:
        return all(leaves_of(map_tree(_equal_leaves, left, right)))
    except ValueError:  # the structures differ
        return False


def _equal_leaves(left: Any, right: Any) -> bool:
    return bool(np.array_equal(left, right)) if _is_number(left) else bool(left == right)


def _is_number(leaf: Any) -> bool:
    return isinstance(leaf, np.ndarray | np.generic | int | float)


def _rows(tree: Tree) -> list[Tree]:
    """A tree of arrays with a leading axis, row by row."""
    count = len(leaves_of(tree)[0])
    return [map_tree(lambda leaf, i=i: leaf[i], tree) for i in range(count)]


def _parts_like(data: Tree, item: Any, name: str) -> list[Any]:
    try:
        return list(optree.tree_structure(data, none_is_leaf=True).flatten_up_to(item))
    except ValueError as error:
        raise EpisodeError(f"'{name}': the new item's structure differs: {error}") from None
