"""Columns that lie in blocks of shared memory: where each of their arrays does, packed.

The same columns in other blocks have the same bytes, so that most fragments of a lane are told of in the same words.
"""

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import msgpack
import numpy as np
import optree
from numpy.typing import NDArray

from rollflow.stream.errors import WireError
from rollflow.stream.tree import Tree
from rollflow.stream.wire.field import shown
from rollflow.stream.wire.scan import ARRAY, scan
from rollflow.stream.wire.value import DTYPES, count_of, dtype_of

_REMEMBERED = 4096  # bytes of what is remembered as unpacked
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class LentLeaf(NamedTuple):
    """Where an array lies.

    block     index among those that its fragment lies in
    offset    bytes behind the beginning of the block
    """

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    block: int
    offset: int

    @property
    def nbytes(self) -> int:
        """Bytes of it."""
        return math.prod(self.shape) * self.dtype.itemsize

    def array(self, blocks: list[NDArray[np.uint8]]) -> NDArray[Any]:
        """The array, a view. Raises WireError where it is of no such dtype; it must lie in these blocks."""
        if 0 in self.shape:
            return np.empty(self.shape, self.dtype)
        array: NDArray[Any] = np.ndarray(self.shape, self.dtype, blocks[self.block], self.offset)
        self._check_bool(array)
        return array

    def arrays(self, blocks: list[NDArray[np.uint8]], count: int, stride: int) -> list[NDArray[Any]]:
        """This one and those behind it, so many bytes from each to the next, views.

        Raises WireError where one lies in none of these blocks.
        """
        if 0 in self.shape:
            return [np.empty(self.shape, self.dtype) for _ in range(count)]
        block = self.block_of(blocks, count, stride)
        shape, strides = (count, *self.shape), (stride, *_strides(self.shape, self.dtype))
        every: NDArray[Any] = np.ndarray(shape, self.dtype, block, self.offset, strides)
        self._check_bool(every)
        return [every[index, ...] for index in range(count)]

    def block_of(self, blocks: list[NDArray[np.uint8]], count: int = 1, stride: int = 0) -> NDArray[np.uint8]:
        """What it lies in. Raises WireError where it does not."""
        if self.block < len(blocks):
            block = blocks[self.block]
            if self.offset + (count - 1) * stride + self.nbytes <= block.size:
                return block
        sizes = [len(block) for block in blocks]
        told = f"lent: {count} of {self} at every {stride} bytes"
        raise WireError(f"{told} does not lie in its blocks, of {sizes!r:.100} bytes", "memory")

    def _check_bool(self, array: NDArray[Any]) -> None:
        """Raise WireError for bools that are none."""
        if self.dtype.kind == "b" and np.count_nonzero(array.view(np.uint8) > 1):
            most = array.view(np.uint8).max()
            raise WireError(f"lent: array |b1{list(self.shape)} has a byte {most}, expected 0 or 1", "memory")


class LentColumns(NamedTuple):
    """Where columns lie.

    leaves    of the tree `spec`
    ends      index of a block -> bytes of it that they reach into
    """

    leaves: list[LentLeaf]
    spec: optree.PyTreeSpec
    ends: dict[int, int]

    def tree(self, blocks: list[NDArray[np.uint8]]) -> Any:
        """The columns, views. Raises WireError where one lies in none of these blocks."""
        for index, end in self.ends.items():
            if index >= len(blocks) or end > blocks[index].size:
                for leaf in self.leaves:
                    leaf.block_of(blocks)  # which says what is wrong
        return optree.tree_unflatten(self.spec, [leaf.array(blocks) for leaf in self.leaves])


@lru_cache
def _strides(shape: tuple[int, ...], dtype: np.dtype[Any]) -> tuple[int, ...]:
    """Of an array in C order."""
    strides = [dtype.itemsize]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * size)
    return tuple(strides) if shape else ()


def can_be_lent(dtype: np.dtype[Any]) -> bool:
    """Whether arrays of this dtype can be told of."""
    return dtype in _NAMES


def pack_columns(columns: Mapping[str, Tree]) -> bytes:
    """Columns whose leaves are `LentLeaf`, as bytes."""
    packed: bytes = msgpack.packb({name: _plain(tree) for name, tree in columns.items()})
    return packed


def lent_columns(packed: bytes) -> LentColumns:
    """The columns that were packed. Raises WireError for what is none."""
    return _remembered(packed) if len(packed) <= _REMEMBERED else _unpacked(packed)


def _plain(tree: Tree) -> Any:
    if isinstance(tree, LentLeaf):
        told = [_NAMES[tree.dtype], list(tree.shape), tree.block, tree.offset]
        return msgpack.ExtType(ARRAY, msgpack.packb(told))
    if isinstance(tree, Mapping):
        return {key: _plain(part) for key, part in tree.items()}
    return [_plain(part) for part in tree]


def _unpacked(packed: bytes) -> LentColumns:
    scan(packed)
    try:
        columns = msgpack.unpackb(packed, ext_hook=_leaf, strict_map_key=True)
    except (TypeError, ValueError, OverflowError) as error:
        raise WireError(f"lent.columns: {error}", "memory") from error
    if type(columns) is not dict:
        raise WireError(f"lent.columns is {shown(columns)}, expected a map", "memory")
    for name, tree in columns.items():
        _check(tree, f"lent.columns[{name!r}]")
    return _located(columns)


def _located(columns: Any) -> LentColumns:
    leaves, spec = optree.tree_flatten(columns, is_leaf=_is_leaf)
    ends: dict[int, int] = {}
    for leaf in leaves:
        if 0 not in leaf.shape:
            ends[leaf.block] = max(ends.get(leaf.block, 0), leaf.offset + leaf.nbytes)
    return LentColumns(leaves, spec, ends)


_remembered = lru_cache(256)(_unpacked)


def _is_leaf(part: Any) -> bool:
    return isinstance(part, LentLeaf)


def _check(tree: Any, where: str) -> None:
    """Raise WireError unless it is a tree whose keys are strings."""
    if isinstance(tree, LentLeaf):
        return
    if type(tree) is dict and all(type(key) is str for key in tree):
        parts = list(tree.values())
    elif type(tree) is list:
        parts = tree
    else:
        raise WireError(f"{where} is {shown(tree)}, expected an array, or a map or list of arrays", "memory")
    for part in parts:
        _check(part, where)


def _leaf(code: int, told: bytes) -> LentLeaf:
    value = msgpack.unpackb(told, strict_map_key=True) if code == ARRAY else None
    if type(value) is not list or len(value) != 4:
        raise WireError(f"lent.columns: {shown(value)}, expected [dtype, shape, block, offset]", "memory")
    name, shape, block, offset = value
    if type(block) is not int or block < 0 or type(offset) is not int or offset < 0 or offset % 8:
        raise WireError(f"lent.columns: in block {block!r:.40} at {offset!r:.40}, expected multiples of 8", "memory")
    count_of(shape)  # which has limits
    return LentLeaf(dtype_of(name), tuple(shape), block, offset)
