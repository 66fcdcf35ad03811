"""Columns as Arrow arrays and back: structs for dicts and tuples, lists of a fixed size for items with a shape.

A *description* says what a column is like, in JSON's types: `{"dtype": "float32", "shape": [4]}` for an array,
`{"dict": [[key, description], ...]}`, `{"tuple": [...]}` or `{"list": [...]}` for a tree.
"""

import math
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollflow.stream.data.errors import DatasetError
from rollflow.stream.data.system import require_packages
from rollflow.stream.data.tree import Tree

Description = dict[str, Any]

_BITS = (8, 16, 32, 64)
_DTYPES = {"bool", "float16", "float32", "float64", *(f"{kind}{bits}" for kind in ("int", "uint") for bits in _BITS)}
_SEQUENCES = {"tuple": tuple, "list": list}


def import_pyarrow() -> tuple[Any, Any]:
    """The modules `pyarrow` and `pyarrow.parquet`. Raises DatasetError if they are not installed."""
    require_packages("a dataset", "datasets", "pyarrow", error=DatasetError)
    import pyarrow
    import pyarrow.parquet

    return pyarrow, pyarrow.parquet


def describe_tree(tree: Tree, where: str) -> Description:
    """Describe a tree of arrays any[n, ...]. Raises DatasetError, with the place `where`, for what no file can hold."""
    if isinstance(tree, dict):
        if not tree or not all(type(key) is str for key in tree):
            raise DatasetError(f"{where} has the keys {list(tree)}, expected names, and at least one")
        return {"dict": [[key, describe_tree(tree[key], f"{where}[{key!r}]")] for key in sorted(tree)]}
    for kind, of in _SEQUENCES.items():
        if isinstance(tree, of):
            if not tree:
                raise DatasetError(f"{where} is an empty {kind}, expected at least one part")
            return {kind: [describe_tree(part, f"{where}[{place}]") for place, part in enumerate(tree)]}
    dtype, shape = tree.dtype, list(tree.shape[1:])
    if dtype.name not in _DTYPES or not dtype.isnative or 0 in shape:
        raise DatasetError(
            f"{where} is {dtype}{shape}, expected one of {', '.join(sorted(_DTYPES))}, and no axis of length 0"
        )
    return {"dtype": dtype.name, "shape": shape}


def arrow_of(tree: Tree, description: Description) -> Any:
    """Arrow array of n items from a tree of arrays any[n, ...] that lie end to end in memory; only bools are copied."""
    pa, _ = import_pyarrow()
    if (parts := _parts_of(description)) is not None:
        arrays = [arrow_of(tree[key], part) for key, part in parts]
        fields = [pa.field(str(key), each.type, False) for (key, _), each in zip(parts, arrays, strict=True)]
        return pa.StructArray.from_arrays(arrays, fields=fields)
    values = np.ascontiguousarray(tree)
    if not description["shape"]:
        return array_of(values)
    size = math.prod(description["shape"])
    if values.dtype == np.uint8:  # Parquet holds a list of bytes as four bytes each
        return pa.FixedSizeBinaryArray.from_buffers(pa.binary(size), len(values), [None, pa.py_buffer(values)])
    items = array_of(values.reshape(-1))
    return pa.FixedSizeListArray.from_arrays(items, type=pa.list_(pa.field("element", items.type, False), size))


def table_of(columns: Mapping[str, Any], optional: Collection[str] = ()) -> Any:
    """Arrow table of arrays by name; those that are not `optional` say that they have no nulls, which reads faster."""
    pa, _ = import_pyarrow()
    fields = [pa.field(name, each.type, name in optional) for name, each in columns.items()]
    return pa.Table.from_arrays(list(columns.values()), schema=pa.schema(fields))


def tree_of(array: Any, description: Description) -> Tree:
    """The tree of arrays any[n, ...] in an Arrow array of n items; they may be read-only."""
    pa, _ = import_pyarrow()
    if isinstance(array, pa.ChunkedArray):
        array = array.chunk(0) if array.num_chunks == 1 else pa.concat_arrays(array.chunks)
    if (parts := _parts_of(description)) is not None:
        trees = [tree_of(each, part) for each, (_, part) in zip(array.flatten(), parts, strict=True)]
        return _tree_with(description, parts, trees)
    shape = description["shape"]
    if not shape:
        return array.to_numpy(zero_copy_only=False)
    if description["dtype"] == "uint8":
        size = math.prod(shape)
        values = np.frombuffer(array.buffers()[1], np.uint8, len(array) * size, array.offset * size)
    else:
        values = array.flatten().to_numpy(zero_copy_only=False)
    return values.reshape(len(array), *shape)


def array_of(values: NDArray[Any]) -> Any:
    """Arrow array of numbers or bools, any[n] end to end in memory; only bools are copied."""
    pa, _ = import_pyarrow()
    if values.dtype == np.bool_:
        return pa.array(values, pa.bool_())
    # `pyarrow.array` would look for pandas in every call.
    return pa.Array.from_buffers(pa.from_numpy_dtype(values.dtype), len(values), [None, pa.py_buffer(values)])


def empty_tree(description: Description, count: int) -> Tree:
    """A tree of new arrays any[count, ...] with undefined contents, for items of a description."""
    if (parts := _parts_of(description)) is not None:
        trees = [empty_tree(part, count) for _, part in parts]
        return _tree_with(description, parts, trees)
    return np.empty((count, *description["shape"]), description["dtype"])


def first_difference(ours: Any, others: Any, where: str, sides: tuple[str, str]) -> str | None:
    """Text of the first place where two values of JSON's types differ, found at two `sides`; None if they are equal."""
    if isinstance(ours, dict) and isinstance(others, dict) and ours.keys() == others.keys():
        pairs = [(f"{where}.{key}", ours[key], others[key]) for key in ours]
    elif isinstance(ours, list) and isinstance(others, list) and len(ours) == len(others):
        pairs = [(f"{where}[{place}]", *pair) for place, pair in enumerate(zip(ours, others, strict=True))]
    else:
        same = ours == others
        return None if same else f"{where} is {str(ours)[:120]} {sides[0]}, but {str(others)[:120]} {sides[1]}"
    return next((text for place, one, other in pairs if (text := first_difference(one, other, place, sides))), None)


def _tree_with(description: Description, parts: list[tuple[Any, Description]], trees: list[Tree]) -> Tree:
    """The dict, tuple or list of the trees of its parts."""
    kind = next(iter(description))
    return dict(zip((key for key, _ in parts), trees, strict=True)) if kind == "dict" else _SEQUENCES[kind](trees)


def _parts_of(description: Description) -> list[tuple[Any, Description]] | None:
    """Key and description of each part of a dict, tuple or list; None for an array."""
    if "dict" in description:
        return [(key, part) for key, part in description["dict"]]
    for kind in _SEQUENCES:
        if kind in description:
            return list(enumerate(description[kind]))
    return None
