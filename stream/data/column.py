"""Column: one quantity over a whole fragment, written a row at a time."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import optree
from numpy.typing import NDArray

from rollflow.stream.data.errors import ColumnError, shown
from rollflow.stream.data.ranges import check_range, is_narrower
from rollflow.stream.data.tree import Tree, leaves_of, map_tree

_Array = np.ndarray
_ARRAY: Tree = np.empty(0)
_LEAF = optree.tree_structure(_ARRAY, none_is_leaf=True)


class Column:
    """A tree of arrays `any[rows, N, ...]`: time first, then the N slots of a lane.

    The tree is one array for a Box or Discrete space, and a dict or tuple of arrays for a nested one.

    views    of all rows, which who reads them at each step may keep here until `seal`; None: there are none
    """

    __slots__ = (
        "_array",
        "_keys",
        "_leaves",
        "_shape",
        "_shapes",
        "_source_dtypes",
        "_treespec",
        "_whole",
        "name",
        "tree",
        "views",
    )

    def __init__(self, name: str, tree: Tree) -> None:
        self.name = name
        self.tree = tree
        self.views: Any = None
        self._leaves: list[NDArray[Any]]
        self._array: NDArray[Any] | None
        if isinstance(tree, np.ndarray):
            self._leaves, self._array, self._treespec = [tree], tree, _LEAF
        else:
            self._leaves, self._array = leaves_of(tree), None
            self._treespec = optree.tree_structure(tree, none_is_leaf=True)
        self._keys: list[Any] = []  # of the leaves, where these are the parts of a dict
        if type(tree) is dict:
            keys = {id(part): key for key, part in tree.items()}
            self._keys = [keys[id(leaf)] for leaf in self._leaves] if keys.keys() == set(map(id, self._leaves)) else []
        self._shapes = [leaf.shape[1:] for leaf in self._leaves]
        self._shape = self._shapes[0] if self._leaves else ()
        # dtypes of the last whole row written: only others are checked before they are cast.
        self._source_dtypes = [leaf.dtype for leaf in self._leaves]
        # The array, and dtype and shape of a row that it takes without a look; None of a tree.
        self._whole: tuple[Any, Any, Any] = None, None, None
        if self._array is not None:
            self._whole = self._array, self._array.dtype, self._shape

    @classmethod
    def empty(cls, name: str, row: Tree, rows: int) -> "Column":
        """A column of `rows` rows, each like `row`, a tree of arrays `any[N, ...]`; the contents are undefined."""
        return cls(name, map_tree(lambda leaf: np.empty((rows, *leaf.shape), leaf.dtype), row))

    def __len__(self) -> int:
        return len(self._leaves[0]) if self._leaves else 0

    def row(self, row: int) -> Tree:
        """Row `row`, a tree of views `any[N, ...]`."""
        array = self._array
        if array is not None:
            return array[row]
        if self._keys:
            return {key: leaf[row] for key, leaf in self.tree.items()}
        return self._treespec.unflatten([leaf[row] for leaf in self._leaves])

    def rows(self, start: int, stop: int) -> Tree:
        """Rows `start` to `stop`, a tree of views `any[stop - start, N, ...]`."""
        array = self._array
        return array[start:stop] if array is not None else map_tree(lambda leaf: leaf[start:stop], self.tree)

    def write(self, row: int, values: Tree) -> None:
        """Copy `values`, a tree of arrays `any[N, ...]`, into row `row`.

        Raises ColumnError when the structure, a shape, or the kind of a dtype differs, and for whole numbers that the
        column's dtype can't hold; nothing is broadcast.
        """
        array = self._array
        if array is not None and type(values) is _Array:
            if values.dtype is self._whole[1] and values.shape == self._shape:
                array[row] = values
                return
            array[row] = self._matched_row(values)[0]
            if not is_narrower(array.dtype, values.dtype):  # else the next row's numbers are checked as well
                self._whole = array, values.dtype, self._shape
            return
        if self._keys and type(values) is dict and len(values) == len(self._keys):
            for key, leaf, shape, dtype in zip(
                self._keys, self._leaves, self._shapes, self._source_dtypes, strict=True
            ):
                part = values.get(key)
                if type(part) is not _Array or part.dtype is not dtype or part.shape != shape:
                    break
                leaf[row] = part
            else:
                return
        parts = self._alike(values)
        if parts is None:
            parts = self._matched_row(values)
            pairs = zip(self._leaves, parts, strict=True)
            self._source_dtypes = [x.dtype if is_narrower(x.dtype, part.dtype) else part.dtype for x, part in pairs]
        for leaf, value in zip(self._leaves, parts, strict=True):
            leaf[row] = value

    def write_slot(self, row: int, slot: int, item: Tree) -> None:
        """Copy one slot's item, a tree of arrays `any[...]`, into row `row`. Raises ColumnError as `write` does."""
        for leaf, value in zip(self._leaves, self._matched(item, ()), strict=True):
            leaf[row, slot] = value

    def write_items(self, rows: NDArray[np.int64] | int, slots: NDArray[np.int64], items: Tree) -> None:
        """Copy `items`, a tree of arrays `any[K, ...]`, to `slots`, i64[K], in `rows`, i64[K] or one row for all.

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
        """The items at these rows and slots, which broadcast to i64[K]: a tree of new arrays `any[K, ...]`."""
        if type(rows) is int:
            if self._array is not None:
                return self._array[rows].take(slots, axis=0)
            return map_tree(lambda leaf: leaf[rows].take(slots, axis=0), self.tree)
        return map_tree(lambda leaf: leaf[rows, slots], self.tree)

    def try_write_slot(self, row: int, slot: int, item: Tree) -> bool:
        """Copy one slot's item, a tree of arrays `any[...]`, into row `row` if it has its dtypes; True if it has."""
        array = self._array
        if array is not None and type(item) is np.ndarray and item.dtype is array.dtype:
            if item.shape == array.shape[2:]:
                array[row, slot] = item
                return True
            return False
        if self._mismatch(item, ()) is not None:
            return False
        values = [np.asarray(value) for value in self._treespec.flatten_up_to(item)]
        if any(value.dtype != leaf.dtype for leaf, value in zip(self._leaves, values, strict=True)):
            return False
        for leaf, value in zip(self._leaves, values, strict=True):
            leaf[row, slot] = value
        return True

    def cast(self, items: Tree, count: int) -> Tree:
        """`items`, a tree of arrays `any[count, ...]`, in this column's dtypes. Raises ColumnError as `write` does.

        Leaves of these dtypes are not copied.
        """
        array = self._array
        if array is not None and type(items) is np.ndarray and items.dtype is array.dtype:
            if items.shape == (count, *self._shape[1:]):
                return items
        leaves = zip(self._leaves, self._matched(items, (count,)), strict=True)
        return self._treespec.unflatten([value.astype(leaf.dtype, copy=False) for leaf, value in leaves])

    def fitting(self, items: Tree, count: int) -> Tree | None:
        """`items`, a tree of arrays `any[count, ...]`, as `write` would take them, or `whole` makes them; else None."""
        if self._mismatch(items, (count,)) is None:
            return items
        made = self.whole(items)
        return made if made is not items and self._mismatch(made, (count,)) is None else None

    def whole(self, values: Tree) -> Tree:
        """`values` with float leaves of whole numbers as integers, if this column's leaves are integers.

        `values` is a tree of arrays `any[...]`. Leaves with fractions, and values of another structure, are returned
        unchanged: `write` refuses them.
        """
        if self._array is not None and self._array.dtype.kind not in "iub":
            return values
        try:
            parts = [_array_of(part) for part in self._treespec.flatten_up_to(values)]
        except ValueError:
            return values
        pairs = list(zip(self._leaves, parts, strict=True))
        if any(part is None for part in parts):
            return values
        return self._treespec.unflatten(
            [part.astype(leaf.dtype) if are_whole(part, leaf.dtype) else part for leaf, part in pairs]  # type: ignore[arg-type,union-attr]
        )

    def mismatch(self, items: Tree, count: int) -> str | None:
        """Why `write_items` would refuse these items, a tree of arrays `any[count, ...]`; None if it takes them."""
        return self._mismatch(items, (count,))

    def copy_rows(self, source: "Column", start: int, stop: int) -> None:
        """Copy rows `start` to `stop` of `source`, a column of the same types, into the first rows of this one.

        Rows of the dtype of those that `source` was given need no other check.
        """
        self._source_dtypes = source._source_dtypes
        self._whole = self._array, source._whole[1], self._shape
        for leaf, other in zip(self._leaves, source._leaves, strict=True):
            leaf[: stop - start] = other[start:stop]

    def seal(self) -> None:
        """Make the arrays read-only."""
        self.views = None
        for leaf in self._leaves:
            leaf.flags.writeable = False

    @property
    def nbytes(self) -> int:
        """Bytes in the arrays."""
        return sum(leaf.nbytes for leaf in self._leaves)

    def _alike(self, values: Tree) -> list[NDArray[Any]] | None:
        """The leaves of a whole row that needs no check: arrays of the shapes and dtypes of the last one; else None."""
        try:
            parts: list[Any] = self._treespec.flatten_up_to(values)
        except ValueError:
            return None
        for shape, part, dtype in zip(self._shapes, parts, self._source_dtypes, strict=True):
            if type(part) is not _Array or part.dtype is not dtype or part.shape != shape:
                return None
        return parts

    def _matched(self, values: Tree, leading: tuple[int, ...]) -> list[NDArray[Any]]:
        """The leaves of `values` as arrays, once each is found to have the axes `leading` and then its leaf's shape."""
        problem = self._mismatch(values, leading)
        if problem is not None:
            raise ColumnError(problem)
        parts = [np.asarray(part) for part in self._treespec.flatten_up_to(values)]
        for leaf, part in zip(self._leaves, parts, strict=True):
            if part.dtype is not leaf.dtype:
                check_range(part, leaf.dtype, f"column '{self.name}'")
        return parts

    def _matched_row(self, values: Tree) -> list[NDArray[Any]]:
        """`_matched` for a whole row, whose error also names a slot."""
        try:
            return self._matched(values, self._shape[:1])
        except ColumnError as error:
            first = self._first_slot_that_differs(values)
            raise ColumnError(f"{error}{first}") from None

    def _first_slot_that_differs(self, values: Tree) -> str:
        """The end of an error's text: the shape of slot 0, if the values have one item for each slot."""
        try:
            parts = map(_array_of, self._treespec.flatten_up_to(values))
        except ValueError:
            return ""
        for leaf, value in zip(self._leaves, parts, strict=True):
            if value is not None and value.shape[:1] == self._shape[:1] and value.shape != leaf.shape[1:]:
                return f"; slot 0 has shape {list(value.shape[1:])}, expected {list(leaf.shape[2:])}"
        return ""

    def _mismatch(self, values: Tree, leading: tuple[int, ...]) -> str | None:
        try:
            parts = self._treespec.flatten_up_to(values)
        except ValueError:
            return f"column '{self.name}'{_structure_mismatch(values, self.tree) or ': the structure differs'}"
        for i, (leaf, part) in enumerate(zip(self._leaves, parts, strict=True)):
            value, shape = _array_of(part), (*leading, *leaf.shape[2:])
            if value is None or value.shape != shape or not np.can_cast(value.dtype, leaf.dtype, "same_kind"):
                path = self._treespec.accessors()[i]
                where = path.codify("") if len(path) else ""
                is_number = value is not None and value.dtype.kind in "biufc"
                got = f"{value.dtype}{list(value.shape)}" if is_number else shown(part)  # type: ignore[union-attr]
                return f"column '{self.name}'{where}: got {got}, expected {leaf.dtype}{list(shape)}"
        return None


def write_row(columns: Mapping[str, Column], row: int, values: Mapping[str, Tree]) -> None:
    """Copy values, name -> tree of arrays `any[N, ...]`, into row `row` of the columns of these names.

    Raises ColumnError as `Column.write` does, and KeyError for a name of no column.
    """
    try:
        for name, value in values.items():
            array, dtype, shape = columns[name]._whole
            if array is not None and value.dtype is dtype and value.shape == shape:
                array[row] = value  # without a call for each column
            else:
                columns[name].write(row, value)
    except AttributeError:  # a value that is no array
        for name, value in values.items():
            columns[name].write(row, value)


def _array_of(part: Any) -> NDArray[Any] | None:
    """A leaf as an array; None for what numpy does not take: lists of different lengths, tensors of some devices."""
    try:
        return np.asarray(part)
    except (TypeError, ValueError, RuntimeError):
        return None


def _structure_mismatch(values: Tree, expected: Tree, path: str = "") -> str:
    """The first place, in the nodes of two trees, in which they differ, and how: the end of an error's text."""
    differs, wanted = f"{path}: the structure differs:", f"{type(expected).__name__} of {len(expected)} parts"
    if isinstance(expected, dict) and isinstance(values, dict):
        missing, new = [key for key in expected if key not in values], [key for key in values if key not in expected]
        if missing or new:
            texts = (
                f"the keys {shown(keys)} are {text}" for keys, text in ((missing, "missing"), (new, "new")) if keys
            )
            return f"{differs} {' and '.join(texts)}, expected the keys {shown(list(expected))}"
        parts = [(f"[{key!r}]", values[key], part) for key, part in expected.items()]
    elif type(values) is type(expected) and len(values) == len(expected):
        parts = [(f"[{place}]", *pair) for place, pair in enumerate(zip(values, expected, strict=True))]
    else:
        return f"{differs} got {shown(values)}, expected a {wanted}"
    nodes = [each for each in parts if isinstance(each[2], dict | tuple | list)]
    return next(filter(None, (_structure_mismatch(value, part, path + key) for key, value, part in nodes)), "")


def are_whole(values: NDArray[Any], dtype: np.dtype[Any]) -> bool:
    """True if `values`, floats any[...], are whole numbers that `dtype`, an integer or bool one, can hold."""
    if values.dtype.kind != "f" or dtype.kind not in "iub":
        return False
    lowest, highest = (0, 1) if dtype.kind == "b" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    wide = values.astype(np.float64)  # in which the bounds are finite numbers
    # An i64's or u64's highest number is rounded up to one that it can't hold: hence "less than the next one".
    return bool(((wide == np.trunc(wide)) & (wide >= lowest) & (wide < float(highest) + 1.0)).all())
