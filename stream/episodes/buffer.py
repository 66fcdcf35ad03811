"""LookbackBuffer: items of one quantity over time, with the index rules of all episode getters and setters.

Positions count all stored items. With a lookback of L items and n current ones:

    position    0 … L-1        L … L+n-1
    items       the lookback   the current items

An index i >= 0 is position L + i. An index i < 0 counts from the end, and may reach into the lookback. With
`neg_index_as_lookback` an index i < 0 is position L + i: it counts leftward from the first current item.
"""

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
import optree
from numpy.typing import NDArray

from rollflow.stream.data.column import are_whole
from rollflow.stream.data.errors import ColumnError, EpisodeError, EpisodeIndexError, shown, warn_caller
from rollflow.stream.data.infos import info_of
from rollflow.stream.data.space import item_of, one_hot_items
from rollflow.stream.data.tree import (
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
_LISTS = list, range
Indices = Index | slice | Sequence[Index] | NDArray[np.integer[Any]] | None


class LookbackBuffer:
    """A list of items, or a tree of arrays with a leading time axis, of which the first `lookback` are history.

        data        list of items, or a tree of arrays `any[L + n, ...]`, which is not copied; a range, which can't be
                    written to; None in a subclass that has the items elsewhere
        lookback    L
        space       space of one item, used by `fill` and `one_hot_discrete`; None: unknown
        name        name of the quantity, for errors

    `len()`, iteration, `==` and `buffer[i]` see the current items; negative and list indices may reach the lookback.
    """

    def __init__(
        self, data: Tree, lookback: int = 0, space: gym.Space[Any] | None = None, *, name: str = "items"
    ) -> None:
        self.data = data
        self.space = space
        self.name = name
        self._lookback = lookback

    # Storage, which subclasses override

    @property
    def lookback(self) -> int:
        """Number of items that are history: L."""
        return self._lookback

    @property
    def is_numpy(self) -> bool:
        """True if the items are rows of arrays."""
        return not isinstance(self.data, _LISTS)

    def total(self) -> int:
        """Number of items with the lookback: L + n."""
        return len(self.data) if isinstance(self.data, _LISTS) else len(leaves_of(self.data)[0])

    def item(self, position: int) -> Any:
        """The item at a position, which must exist: a tree of arrays `any[...]`, or a list's item."""
        return self.data[position] if isinstance(self.data, _LISTS) else tree_at(self.data, position)

    def single_items(self, where: Any) -> list[Any]:
        """`items` as a list, one by one."""
        positions = range(*where.indices(self.total())) if isinstance(where, slice) else where
        return [self.item(position) for position in positions]

    def items(self, where: Any) -> Any:
        """The items at a slice with bounds 0 <= start <= stop and no step, or at a list of existing positions.

        Returns a list, or a tree of arrays `any[K, ...]`: views for a slice, copies for positions.
        """
        if isinstance(self.data, _LISTS):
            return self.data[where] if isinstance(where, slice) else [self.data[position] for position in where]
        return tree_at(self.data, where)

    def write(self, position: int, item: Any) -> None:
        """Replace the item at a position, which must exist.

        Raises ColumnError for an item, any[...], with another structure or shape than the arrays, or a dtype that they
        can't hold. Integer arrays take whole-number floats. Raises EpisodeError if the arrays are read-only.
        """
        if isinstance(self.data, list):
            self.data[position] = item
            return
        self._put(position, self._parts(item, leading=0))

    def write_several(self, positions: Sequence[int], items: Any) -> None:
        """Replace the items at K positions, by a list or a tree of arrays `any[K, ...]`. Raises as `write` does."""
        if self.is_numpy and isinstance(items, list):
            items = self._stacked(items)  # different shapes are refused before the first item is written
        if not isinstance(self.data, list | None):  # None: only `write` of a subclass finds the arrays
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
        """`items`, a list or a tree of arrays `any[K, ...]`, in this buffer's form: a list, or a tree of arrays.

        Arrays get the buffer's dtypes if these can hold the values. Raises ColumnError for items of another structure
        or shape than the buffer's.
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
        """Turn a list of n items into a tree of arrays `any[n, ...]`.

        An item that is a list becomes an array, or a tuple in a Tuple space. Raises ColumnError for items that differ
        in structure or shape.
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

        Several items come as a list, or as a tree of arrays `any[K, ...]` if the buffer holds arrays. An int or list
        index outside raises EpisodeIndexError; a slice leaves such items out. With `fill`, items outside are `fill`,
        or, with a `space`, an item of the space full of it. `one_hot_discrete` turns Discrete and MultiDiscrete leaves
        into vectors (a filled one is full of `fill`), and raises ValueError without a `space`.
        """
        if one_hot_discrete and self.space is None:
            raise ValueError(f"one_hot_discrete on '{self.name}' needs a space, but the episode was given none")
        if isinstance(indices, int | np.integer):
            return self._one(int(indices), neg_index_as_lookback, fill, one_hot_discrete)
        positions = self._positions(indices, neg_index_as_lookback, fills=fill is not None)
        if fill is not None and self.cut_away and len(positions):
            self._warn_of_cut(min(positions))
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
        """Replace items by index, with the rules of `get`; None replaces the current items, never the lookback.

        `new_data` is one item for an int, else K items for K indices: a list, or a tree of arrays `any[K, ...]`. Raises
        EpisodeIndexError for an int or list index outside, and if the numbers of items differ. Raises ColumnError for
        an item that does not fit. Then nothing is replaced.
        """
        if isinstance(at_indices, int | np.integer):
            self.write(self._positions([at_indices], neg_index_as_lookback)[0], new_data)
            return
        positions = self._positions(at_indices, neg_index_as_lookback)
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
        """Number of items before the lookback that are known to have existed."""
        return 0

    def _warn_of_cut(self, position: int) -> None:
        """Warn if `fill` stands for an item that existed but is no longer kept."""
        if position < 0 < self.cut_away:
            warn_caller(
                f"'{self.name}': fill stands for steps that the episode had, but that are no longer kept: a piece that "
                "looks back says how far by its attribute 'lookback', or Rollout(lookback=...) does"
            )

    # Index rules

    def _position(self, index: int, neg_index_as_lookback: bool) -> int:
        return index + (self.lookback if index >= 0 or neg_index_as_lookback else self.total())

    def _one(self, index: int, neg_index_as_lookback: bool, fill: Any, one_hot_discrete: bool) -> Any:
        position = self._position(index, neg_index_as_lookback)
        if 0 <= position < self.total():
            return self._encoded(self.item(position), one_hot_discrete, several=False)
        if fill is None:
            raise self._outside(index)
        self._warn_of_cut(position)
        return self._filler(fill, one_hot_discrete)

    def _positions(
        self, indices: slice | Iterable[Any] | None, neg_index_as_lookback: bool, fills: bool = False
    ) -> Sequence[int]:
        """The positions of a slice, or of each index; None: those of the current items.

        Without `fills` an index outside raises EpisodeIndexError, and a slice leaves what is outside out.
        """
        if indices is None:
            return range(self.lookback, self.total())
        if isinstance(indices, slice):
            return self._slice_positions(indices, neg_index_as_lookback, fills)
        total, positions = self.total(), []
        for index in _numbers(indices, self.name):
            position = self._position(index, neg_index_as_lookback)
            if not fills and not 0 <= position < total:
                raise self._outside(index)
            positions.append(position)
        return positions

    def _slice_positions(self, indices: slice, neg_index_as_lookback: bool, fills: bool = False) -> range:
        """The positions of a slice; with `fills`, also those outside."""
        step = 1 if indices.step is None else operator.index(indices.step)
        lookback, total = self.lookback, self.total()
        if step == 0:
            raise ValueError(f"slice step on '{self.name}' is 0, expected any other number")

        def position(bound: Any, default: int) -> int:
            return default if bound is None else self._position(operator.index(bound), neg_index_as_lookback)

        if step > 0:
            start, stop = position(indices.start, lookback), position(indices.stop, total)
            first, last = 0, total
        else:
            start, stop = position(indices.start, total - 1), position(indices.stop, lookback - 1)
            first, last = -1, total - 1
        if not fills:
            return range(min(max(start, first), last), min(max(stop, first), last), step)
        if step == 1 and stop < start and (stop >= total or start <= 0):
            return range(stop, start)  # reversed bounds, all outside: as many fillers
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
        return map_tree(lambda leaf: np.full_like(leaf, fill), one_hot_items(self.space, item))

    def _encoded(self, items: Any, one_hot_discrete: bool, *, several: bool) -> Any:
        if not one_hot_discrete or self.space is None:
            return items
        if several and not self.is_numpy:
            return [one_hot_items(self.space, item) for item in items]
        return one_hot_items(self.space, items)

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
        """The leaves of one item, any[...] (`leading` 0), or of several, any[K, ...] (1). Raises ColumnError."""
        try:
            if isinstance(self.data, np.ndarray):
                leaves, parts = [self.data], [np.asarray(tree)]
            else:
                leaves, structure = optree.tree_flatten(self.data, none_is_leaf=True)
                parts = [np.asarray(part) for part in structure.flatten_up_to(tree)]
        except ValueError as error:
            raise ColumnError(f"'{self.name}': the structure of new data differs: {error}") from None
        for leaf, part in zip(leaves, parts, strict=True):
            fits = not same_dtype or _holds(leaf.dtype, part) or are_whole(part, leaf.dtype)
            if not fits or part.shape[leading:] != leaf.shape[1:]:
                raise ColumnError(
                    f"'{self.name}': new data is {part.dtype}{list(part.shape[leading:])}, "
                    f"expected {leaf.dtype}{list(leaf.shape[1:])}"
                )
        return parts


class BufferAndOne(LookbackBuffer):
    """View of a buffer's items with one more item at the end."""

    def __init__(self, buffer: LookbackBuffer, last: Any) -> None:
        super().__init__(buffer.data, buffer.lookback, buffer.space, name=buffer.name)
        self._buffer, self._last = buffer, last

    @property
    def is_numpy(self) -> bool:
        return self._buffer.is_numpy

    @property
    def cut_away(self) -> int:
        return self._buffer.cut_away

    def total(self) -> int:
        return self._buffer.total() + 1

    def item(self, position: int) -> Any:
        return self._last if position == self._buffer.total() else self._buffer.item(position)

    def write(self, position: int, item: Any) -> None:
        raise EpisodeError(f"'{self.name}' is read-only here; write to a copy: from_state(get_state())")

    def items(self, where: Any) -> Any:
        before = self._buffer.total()
        if isinstance(where, slice) and where.stop <= before:
            return self._buffer.items(where)
        if self.is_numpy:
            # A buffer over a lane's columns has no data of its own; the last item is from these columns too.
            last = stack_trees([self._last]) if self.data is None else self.in_form([self._last])
            joined = concatenate_trees([self._buffer.items(slice(0, before)), last])
            return map_tree(lambda leaf: leaf[where], joined)
        return self.single_items(where)


class InfosWindow(LookbackBuffer):
    """Buffer of one slot's info dicts, taken from gymnasium's vector infos of some rows.

    rows     vector infos of L + n rows
    last     vector infos of the last item; None: the last row's
    """

    def __init__(
        self, rows: Sequence[Mapping[str, Any]], slot: int, lookback: int, last: Mapping[str, Any] | None
    ) -> None:
        super().__init__([], lookback, name="infos")
        self._rows = [*rows[:-1], last] if last is not None else rows
        self._slot = slot

    def total(self) -> int:
        return len(self._rows)

    def item(self, position: int) -> Any:
        return info_of(self._rows[position], self._slot)

    items = LookbackBuffer.single_items

    def write(self, position: int, item: Any) -> None:
        raise EpisodeError("infos of a fragment are read-only")


def count_of(tree: Tree, name: str) -> int:
    """Number of items in a tree of arrays `any[n, ...]`. Raises TypeError, with `name`, for anything else."""
    try:
        return len(leaves_of(tree)[0])
    except (TypeError, IndexError):
        raise TypeError(f"'{name}': expected a list of items, or a tree of arrays; got {shown(tree)}") from None


def _numbers(indices: Iterable[Any], name: str) -> list[int]:
    try:
        return [operator.index(index) for index in indices]
    except TypeError:
        raise TypeError(f"index {shown(indices)} of '{name}' is no int, no slice and no list of ints") from None


def _full(shape: tuple[int, ...], fill: Any, dtype: np.dtype[Any]) -> Any:
    return np.full(shape, fill, dtype if _holds(dtype, np.asarray(fill)) else None)[()]


def _holds(dtype: np.dtype[Any], values: NDArray[Any]) -> bool:
    """True if a dtype can hold values, any[...]: it may round them, but not drop fractions, overflow or cut strings."""
    if np.can_cast(values.dtype, dtype):
        return True
    if values.dtype.kind in "iu" and dtype.kind in "iub":
        return bool((values.astype(dtype) == values).all())
    return dtype.kind in "fc" and np.can_cast(values.dtype, dtype, "same_kind")
