"""Items of one quantity over time, with a lookback: the index rules that every episode getter and setter share.

Positions are counted over everything stored. With a lookback of L items and n current ones:

    position    0 … L-1        L … L+n-1
    what        the lookback   the current items

An index i >= 0 is position L + i. An index i < 0 counts from the end, and runs on into the lookback; with
`neg_index_as_lookback` it counts leftward from the first current item instead, position L + i.
"""

import operator
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
import optree
from numpy.typing import NDArray

from rollflow.stream.errors import ColumnError, EpisodeError, EpisodeIndexError
from rollflow.stream.space import item_of, one_hot
from rollflow.stream.tree import (
    Tree,
    concatenate_trees,
    equal_trees,
    leaves_of,
    map_tree,
    stack_trees,
    tree_at,
    unstack_tree,
)

Index = int | np.integer[Any]
Indices = Index | slice | Sequence[Index] | NDArray[np.integer[Any]] | None


class LookbackBuffer:
    """A list of items, or a tree of arrays with a leading time axis, of which the first `lookback` are history.

        data        list of items, or a tree of arrays `any[L + n, ...]`; taken as it is, not copied; None
                    where a subclass has the items elsewhere
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
        """The item at a position; it must exist."""
        return self.data[position] if isinstance(self.data, list) else tree_at(self.data, position)

    def items(self, where: Any) -> Any:
        """The items at a slice with bounds 0 <= start <= stop and no step, or at a list of positions, which all exist.

        They come as a list, or as a tree of arrays: views for a slice, copies for positions.
        """
        if isinstance(self.data, list):
            return self.data[where] if isinstance(where, slice) else [self.data[position] for position in where]
        return tree_at(self.data, where)

    def write(self, position: int, item: Any) -> None:
        """Replace the item at a position, which must exist.

        An item that goes into arrays must have their structure and shape, and a dtype that theirs can hold
        (ColumnError); the arrays must not be read-only (EpisodeError).
        """
        if isinstance(self.data, list):
            self.data[position] = item
            return
        self._put(position, self._parts(item, leading=0))

    def write_several(self, positions: Sequence[int], items: Any) -> None:
        """Replace the items at positions, by a list or a tree of arrays with as many. Raises as `write` does."""
        if self.is_numpy and isinstance(items, list):
            items = self._stacked(items)  # items of two shapes are refused before the first is written
        if not isinstance(self.data, list | None):  # None: the arrays are elsewhere, and `write` knows where
            parts = self._parts(items, leading=1)
            if any(len(part) != len(positions) for part in parts):
                raise ColumnError(f"'{self.name}': the leaves of new data are not all {len(positions)} long")
            self._put(list(positions), parts)
            return
        for position, item in zip(positions, items if isinstance(items, list) else unstack_tree(items), strict=True):
            self.write(position, item)

    def append(self, item: Any) -> None:
        """Add one item at the end; arrays are copied into longer ones. Raises ColumnError as `in_form` does."""
        if isinstance(self.data, list):
            self.data.append(item)
        else:
            self.data = concatenate_trees([self.data, self.in_form([item])])

    def in_form(self, items: Any) -> Any:
        """`items`, a list or a tree of arrays, in the form that this buffer has: the same, or the other.

        Arrays come out in the dtypes that the buffer has, where those can hold the values. Raises ColumnError for
        items of another structure or shape than the buffer's.
        """
        if not self.is_numpy:
            return items if isinstance(items, list) else unstack_tree(items)
        if isinstance(items, list):
            if not items:
                return self.items(slice(0, 0))
            items = self._stacked(items)
        leaves, structure = optree.tree_flatten(self.data, none_is_leaf=True)
        parts = zip(leaves, self._parts(items, leading=1, same_dtype=False), strict=True)
        return structure.unflatten(
            [part.astype(leaf.dtype) if _holds(leaf.dtype, part) else part for leaf, part in parts]
        )

    def to_numpy(self) -> None:
        """Turn a list of items into a tree of arrays; a list as an item becomes an array, or a tuple in a Tuple space.

        Raises ColumnError for items that differ in structure or shape.
        """
        if isinstance(self.data, list) and self.data:
            self.data = self._stacked(self.data)

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
            return self._several(range(self.lookback, self.total()), fill, one_hot_discrete)
        if isinstance(indices, int | np.integer):
            return self._one(int(indices), neg_index_as_lookback, fill, one_hot_discrete)
        if isinstance(indices, slice):
            positions: Sequence[int] = self._slice_positions(indices, neg_index_as_lookback, fills=fill is not None)
        else:
            positions = self._list_positions(indices, neg_index_as_lookback, fills=fill is not None)
        if fill is not None and self.cut_away and len(positions):
            self._tell_of_cut(min(positions))
        return self._several(positions, fill, one_hot_discrete)

    def __len__(self) -> int:
        return self.total() - self.lookback

    def __getitem__(self, indices: Any) -> Any:
        return self.get(indices)

    def __iter__(self) -> Iterator[Any]:
        return (self.item(position) for position in range(self.lookback, self.total()))

    def __eq__(self, other: object) -> bool:
        if isinstance(other, LookbackBuffer) and self.is_numpy and other.is_numpy:
            return equal_trees(self.get(), other.get())
        if isinstance(other, LookbackBuffer | list):
            return len(self) == len(other) and all(map(equal_trees, self, other))
        return equal_trees(self.get(), other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        form = "arrays" if self.is_numpy else "list"
        return f"<{type(self).__name__} '{self.name}': {len(self)} items after {self.lookback} of lookback, {form}>"

    # Writing

    def set(self, new_data: Any, at_indices: Indices = None, *, neg_index_as_lookback: bool = False) -> None:
        """Replace items by index, read as in `get`; None replaces the current items, never the lookback.

        `new_data` is one item for an int, else as many items as indices: a list, or a tree of arrays. Raises
        EpisodeIndexError for an int or list index outside and when the numbers of items differ, ColumnError for an
        item that does not fit; then nothing is replaced.
        """
        if isinstance(at_indices, int | np.integer):
            self.write(self._list_positions([at_indices], neg_index_as_lookback)[0], new_data)
            return
        if at_indices is None:
            positions: Sequence[int] = range(self.lookback, self.total())
        elif isinstance(at_indices, slice):
            positions = self._slice_positions(at_indices, neg_index_as_lookback)
        else:
            positions = self._list_positions(at_indices, neg_index_as_lookback)
        count = len(new_data) if isinstance(new_data, list) else count_of(new_data, self.name)
        if count != len(positions):
            raise EpisodeIndexError(
                f"'{self.name}': {count} new items for {len(positions)} places; expected as many of both"
            )
        if count:
            # A copy: arrays may be views of what they replace.
            self.write_several(positions, new_data if isinstance(new_data, list) else map_tree(np.array, new_data))

    def __setitem__(self, indices: Any, new_data: Any) -> None:
        self.set(new_data, indices)

    @property
    def cut_away(self) -> int:
        """Items before the lookback that the episode had, as far as that is known."""
        return 0

    def _tell_of_cut(self, position: int) -> None:
        if position < 0 < self.cut_away:
            warnings.warn(
                f"'{self.name}': fill stands for steps that the episode had, but that are no longer kept: a piece that "
                "looks back says how far by its attribute 'lookback', or Rollout(lookback=...) does",
                stacklevel=4,
            )

    # Index rules

    def _one(self, index: int, neg_index_as_lookback: bool, fill: Any, one_hot_discrete: bool) -> Any:
        lookback, total = self.lookback, self.total()
        position = index + (lookback if index >= 0 or neg_index_as_lookback else total)
        if 0 <= position < total:
            return self._encoded(self.item(position), one_hot_discrete, several=False)
        if fill is None:
            raise self._outside(index)
        self._tell_of_cut(position)
        return self._filler(fill, one_hot_discrete)

    def _list_positions(self, indices: Iterable[Any], neg_index_as_lookback: bool, fills: bool = False) -> list[int]:
        """The position of each index; with `fills`, also of those where there is nothing."""
        lookback, total = self.lookback, self.total()
        positions = []
        for index in _numbers(indices, self.name):
            position = index + (lookback if index >= 0 or neg_index_as_lookback else total)
            if not fills and not 0 <= position < total:
                raise self._outside(index)
            positions.append(position)
        return positions

    def _slice_positions(self, indices: slice, neg_index_as_lookback: bool, fills: bool = False) -> range:
        """The positions that a slice names; with `fills`, also those where there is nothing."""
        step = 1 if indices.step is None else operator.index(indices.step)
        lookback, total = self.lookback, self.total()
        if step == 0:
            raise ValueError(f"slice step on '{self.name}' is 0, expected any other number")

        def position(bound: Any, default: int) -> int:
            if bound is None:
                return default
            number = operator.index(bound)
            return number + (lookback if number >= 0 or neg_index_as_lookback else total)

        if step > 0:
            start, stop = position(indices.start, lookback), position(indices.stop, total)
            first, last = 0, total
        else:
            start, stop = position(indices.start, total - 1), position(indices.stop, lookback - 1)
            first, last = -1, total - 1
        if not fills:
            return range(min(max(start, first), last), min(max(stop, first), last), step)
        if step == 1 and stop < start and (stop >= total or start <= 0):
            return range(stop, start)  # reversed, and all of it outside: so many fillers
        return range(start, stop, step)

    def _several(self, positions: Sequence[int], fill: Any, one_hot_discrete: bool) -> Any:
        total = self.total()
        if not positions:
            return self._encoded(self.items(slice(0, 0)), one_hot_discrete, several=True)
        if isinstance(positions, range) and positions.step == 1 and positions.start >= 0 and positions.stop <= total:
            return self._encoded(self.items(slice(positions.start, positions.stop)), one_hot_discrete, several=True)
        if all(0 <= position < total for position in positions):
            return self._encoded(self.items(list(positions)), one_hot_discrete, several=True)
        items = [
            self._encoded(self.item(position), one_hot_discrete, several=False)
            if 0 <= position < total
            else self._filler(fill, one_hot_discrete)
            for position in positions
        ]
        return self._stacked(items) if self.is_numpy else items

    def _filler(self, fill: Any, one_hot_discrete: bool) -> Any:
        if self.space is None:
            if not self.is_numpy or not self.total():
                return fill
            return map_tree(lambda leaf: _full(leaf.shape[1:], fill, leaf.dtype), self.items(slice(0, 1)))
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

    def _outside(self, index: int) -> EpisodeIndexError:
        return EpisodeIndexError(
            f"index {index} of '{self.name}' is outside {-self.total()} … {len(self) - 1} "
            f"(lookback {self.lookback}, length {len(self)})"
        )

    # Arrays

    def _stacked(self, items: list[Any]) -> Tree:
        try:
            if isinstance(items[0], list):
                whole: Any = tuple if isinstance(self.space, gym.spaces.Tuple) else np.asarray
                items = [whole(item) for item in items]
            return stack_trees(items)
        except ValueError as error:
            raise ColumnError(f"'{self.name}': the items can't be stacked into arrays: {error}") from None

    def _put(self, where: int | list[int], parts: list[NDArray[Any]]) -> None:
        leaves = leaves_of(self.data)
        if not all(leaf.flags.writeable for leaf in leaves):
            raise EpisodeError(f"'{self.name}' is read-only here; write to a copy: from_state(get_state())")
        for leaf, part in zip(leaves, parts, strict=True):
            leaf[where] = part

    def _parts(self, tree: Tree, leading: int, same_dtype: bool = True) -> list[NDArray[Any]]:
        """The leaves of one item (`leading` 0) or of a tree of arrays (1), which must fit the buffer's."""
        try:
            if isinstance(self.data, np.ndarray):
                leaves, parts = [self.data], [np.asarray(tree)]
            else:
                leaves, structure = optree.tree_flatten(self.data, none_is_leaf=True)
                parts = [np.asarray(part) for part in structure.flatten_up_to(tree)]
        except ValueError as error:
            raise ColumnError(f"'{self.name}': the structure of new data differs: {error}") from None
        for leaf, part in zip(leaves, parts, strict=True):
            if part.shape[leading:] != leaf.shape[1:] or (same_dtype and not _holds(leaf.dtype, part)):
                raise ColumnError(
                    f"'{self.name}': new data is {part.dtype}{list(part.shape[leading:])}, "
                    f"expected {leaf.dtype}{list(leaf.shape[1:])}"
                )
        return parts


def count_of(tree: Tree, name: str) -> int:
    """How many items a tree of arrays has. Raises TypeError, with `name`, for anything else."""
    try:
        return len(leaves_of(tree)[0])
    except (TypeError, IndexError):
        raise TypeError(f"'{name}': expected a list of items, or a tree of arrays; got {tree!r}") from None


def _numbers(indices: Iterable[Any], name: str) -> list[int]:
    try:
        return [operator.index(index) for index in indices]
    except TypeError:
        raise TypeError(f"index {indices!r} of '{name}' is no int, no slice and no list of ints") from None


def _full(shape: tuple[int, ...], fill: Any, dtype: np.dtype[Any]) -> Any:
    return np.full(shape, fill, dtype if _holds(dtype, np.asarray(fill)) else None)[()]


def _holds(dtype: np.dtype[Any], values: NDArray[Any]) -> bool:
    """Whether a dtype can hold values: it may round them, but not drop a fraction, wrap around or cut a string."""
    if np.can_cast(values.dtype, dtype):
        return True
    if values.dtype.kind in "iu" and dtype.kind in "iub":
        return bool((values.astype(dtype) == values).all())
    return dtype.kind in "fc" and np.can_cast(values.dtype, dtype, "same_kind")
