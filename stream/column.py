"""One quantity over a whole fragment, written a row at a time."""

from typing import Any

import numpy as np
import optree
from numpy.typing import NDArray

from rollflow.stream.errors import ColumnError
from rollflow.stream.tree import Tree, leaves_of, map_tree

_ARRAY: Tree = np.empty(0)
_LEAF = optree.tree_structure(_ARRAY, none_is_leaf=True)


class Column:
    """A tree of arrays `any[rows, N, ...]`: time first, then the slots of a lane.

    The tree is a plain array for a Box or Discrete space, and a dict or tuple of arrays for a nested one.
    """

    __slots__ = ("_array", "_leaves", "_shape", "_source_dtype", "_treespec", "name", "tree")

    def __init__(self, name: str, tree: Tree) -> None:
        self.name = name
        self.tree = tree
        self._leaves: list[NDArray[Any]]
        self._array: NDArray[Any] | None
        if isinstance(tree, np.ndarray):
            self._leaves, self._array, self._treespec = [tree], tree, _LEAF
        else:
            self._leaves, self._array = leaves_of(tree), None
            self._treespec = optree.tree_structure(tree, none_is_leaf=True)
        self._shape = self._leaves[0].shape[1:] if self._leaves else ()
        # The dtype that the last whole row came in: another one is checked before it is cast.
        self._source_dtype = self._leaves[0].dtype if self._leaves else np.dtype(bool)

    @classmethod
    def empty(cls, name: str, row: Tree, rows: int) -> "Column":
        """A column of `rows` rows, each like `row`, a tree of arrays `any[N, ...]`; the contents are undefined."""
        return cls(name, map_tree(lambda leaf: np.empty((rows, *leaf.shape), leaf.dtype), row))

    def __len__(self) -> int:
        return len(self._leaves[0]) if self._leaves else 0

    def row(self, row: int) -> Tree:
        """Row `row`, a tree of views `any[N, ...]`."""
        array = self._array
        return array[row] if array is not None else map_tree(lambda leaf: leaf[row], self.tree)

    def rows(self, start: int, stop: int) -> Tree:
        """Rows `start` to `stop`, a tree of views `any[stop - start, N, ...]`."""
        array = self._array
        return array[start:stop] if array is not None else map_tree(lambda leaf: leaf[start:stop], self.tree)

    def write(self, row: int, values: Tree) -> None:
        """Copy `values`, a tree of arrays `any[N, ...]`, into row `row`.

        Raises ColumnError when the structure, a shape, or the kind of a dtype differs; nothing is broadcast.
        """
        array = self._array
        if array is not None and type(values) is np.ndarray:
            if values.shape == self._shape and values.dtype is self._source_dtype:
                array[row] = values
                return
            array[row] = self._matched(values, self._slots)[0]
            self._source_dtype = values.dtype
            return
        for leaf, value in zip(self._leaves, self._matched(values, self._slots), strict=True):
            leaf[row] = value

    def write_slot(self, row: int, slot: int, item: Tree) -> None:
        """Copy one slot's item, a tree of values `any[...]`, into row `row`. Raises ColumnError as `write` does."""
        for leaf, value in zip(self._leaves, self._matched(item, ()), strict=True):
            leaf[row, slot] = value

    def write_items(self, rows: NDArray[np.int64] | int, slots: NDArray[np.int64], items: Tree) -> None:
        """Copy `items`, a tree of arrays `any[K, ...]`, each to a slot, i64[K], and a row of its own, or all to one.

        Raises ColumnError as `write` does.
        """
        array = self._array
        if array is not None and type(items) is np.ndarray and items.dtype is array.dtype:
            if items.shape == (len(slots), *self._shape[1:]):
                if type(rows) is int:
                    array[rows][slots] = items
                else:
                    array[rows, slots] = items
                return
        for leaf, value in zip(self._leaves, self._matched(items, (len(slots),)), strict=True):
            leaf[rows, slots] = value

    def items(self, rows: NDArray[np.int64] | int, slots: NDArray[np.int64]) -> Tree:
        """What stands in such places: a tree of new arrays `any[K, ...]`, of indices that broadcast to `any[K]`."""
        if type(rows) is int:
            return map_tree(lambda leaf: leaf[rows].take(slots, axis=0), self.tree)
        return map_tree(lambda leaf: leaf[rows, slots], self.tree)

    def try_write_slot(self, row: int, slot: int, item: Tree) -> bool:
        """Copy one slot's item into row `row` if it fits; whether it does."""
        array = self._array
        if array is not None and type(item) is np.ndarray and item.dtype is array.dtype:
            if item.shape == array.shape[2:]:
                array[row, slot] = item
                return True
            return False
        if self._mismatch(item, ()) is not None:
            return False
        for leaf, value in zip(self._leaves, self._treespec.flatten_up_to(item), strict=True):
            leaf[row, slot] = value
        return True

    def cast(self, items: Tree, count: int) -> Tree:
        """`items`, a tree of arrays `any[count, ...]`, in this column's dtypes. Raises ColumnError."""
        leaves = zip(self._leaves, self._matched(items, (count,)), strict=True)
        return self._treespec.unflatten([value.astype(leaf.dtype) for leaf, value in leaves])

    def fits_row(self, values: Tree) -> bool:
        """Whether `write` would take these values."""
        return self._mismatch(values, self._slots) is None

    def fits_items(self, items: Tree, count: int) -> bool:
        """Whether `write_items` would take these, `any[count, ...]`."""
        return self._mismatch(items, (count,)) is None

    def copy_rows(self, source: "Column", start: int, stop: int) -> None:
        """Copy rows `start` to `stop` of `source` into the first rows of this column."""
        for leaf, other in zip(self._leaves, source._leaves, strict=True):
            leaf[: stop - start] = other[start:stop]

    def seal(self) -> None:
        """Make the arrays read-only."""
        for leaf in self._leaves:
            leaf.flags.writeable = False

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(leaf.nbytes for leaf in self._leaves)

    @property
    def _slots(self) -> tuple[int, ...]:
        return self._shape[:1]

    def _matched(self, values: Tree, leading: tuple[int, ...]) -> list[NDArray[Any]]:
        """The leaves of `values` as arrays, each of which fits its own leaf behind the axes `leading`."""
        problem = self._mismatch(values, leading)
        if problem is not None:
            raise ColumnError(problem)
        return [np.asarray(part) for part in self._treespec.flatten_up_to(values)]

    def _mismatch(self, values: Tree, leading: tuple[int, ...]) -> str | None:
        try:
            parts = self._treespec.flatten_up_to(values)
        except ValueError as error:
            return f"column '{self.name}': the structure differs: {error}"
        for i, (leaf, part) in enumerate(zip(self._leaves, parts, strict=True)):
            value, shape = np.asarray(part), (*leading, *leaf.shape[2:])
            if value.shape != shape or not np.can_cast(value.dtype, leaf.dtype, "same_kind"):
                path = self._treespec.accessors()[i]
                where = path.codify("") if len(path) else ""
                return (
                    f"column '{self.name}'{where}: got {value.dtype}{list(value.shape)}, "
                    f"expected {leaf.dtype}{list(shape)}"
                )
        return None
