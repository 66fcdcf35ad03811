"""Packed places of columns that lie in blocks of shared memory, and the fragments of a series.

The same columns in other blocks have the same bytes, so most fragments of a lane have the same packed places.
"""

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import msgpack
import numpy as np
import optree
from numpy.typing import NDArray

from rollflow.stream.data.errors import WireError
from rollflow.stream.data.tree import Tree
from rollflow.stream.wire.codec.field import shown, whole
from rollflow.stream.wire.codec.handshake import MOST_NUMBER
from rollflow.stream.wire.codec.limits import MAX_VALUES
from rollflow.stream.wire.codec.messages import Fragment, Series
from rollflow.stream.wire.codec.scan import ARRAY, scan
from rollflow.stream.wire.codec.value import DTYPES, count_of, dtype_of

_REMEMBERED = 4096  # most bytes of packed places that are cached
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class LentLeaf(NamedTuple):
    """Place of an array in shared memory.

    block     index among those that its fragment lies in
    offset    bytes behind the beginning of the block
    """

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    block: int
    offset: int

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""
        return math.prod(self.shape) * self.dtype.itemsize

    def array(self, blocks: list[NDArray[np.uint8]]) -> NDArray[Any]:
        """The array `dtype[shape]`, a view of `u8[n]` blocks that it must lie in. Raises WireError for wrong bools."""
        if 0 in self.shape:
            return np.empty(self.shape, self.dtype)
        array: NDArray[Any] = np.ndarray(self.shape, self.dtype, blocks[self.block], self.offset)
        self._check_bool(array)
        return array

    def arrays(self, blocks: list[NDArray[np.uint8]], count: int, stride: int) -> list[NDArray[Any]]:
        """`count` arrays `dtype[shape]`, views of the blocks, `stride` bytes from each to the next.

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
        """The block, u8[n], that the array lies in. Raises WireError where it lies in none."""
        if self.block < len(blocks):
            block = blocks[self.block]
            if self.offset + (count - 1) * stride + self.nbytes <= block.size:
                return block
        sizes = [len(block) for block in blocks]
        arrays = f"lent: {count} of {self} at every {stride} bytes"
        raise WireError(f"{arrays} does not lie in its blocks, of {shown(sizes)} bytes", "memory")

    def _check_bool(self, array: NDArray[Any]) -> None:
        """Raise WireError for a bool array with a byte above 1."""
        if self.dtype.kind == "b" and np.count_nonzero(array.view(np.uint8) > 1):
            most = array.view(np.uint8).max()
            raise WireError(f"lent: array |b1{list(self.shape)} has a byte {most}, expected 0 or 1", "memory")


class LentColumns(NamedTuple):
    """Places of a tree of columns.

    leaves    of the tree `spec`
    ends      index of a block -> bytes of it that they reach into
    """

    leaves: list[LentLeaf]
    spec: optree.PyTreeSpec
    ends: dict[int, int]

    def tree(self, blocks: list[NDArray[np.uint8]]) -> Any:
        """The columns, views of `u8[n]` blocks. Raises WireError where one lies in none of them."""
        for index, end in self.ends.items():
            if index >= len(blocks) or end > blocks[index].size:
                for leaf in self.leaves:
                    leaf.block_of(blocks)  # which says what is wrong
        return optree.tree_unflatten(self.spec, [leaf.array(blocks) for leaf in self.leaves])


@lru_cache
def _strides(shape: tuple[int, ...], dtype: np.dtype[Any]) -> tuple[int, ...]:
    """Strides in bytes of an array in C order."""
    strides = [dtype.itemsize]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * size)
    return tuple(strides) if shape else ()


def can_be_lent(dtype: np.dtype[Any]) -> bool:
    """True if arrays of this dtype can be lent."""
    return dtype in _NAMES


def pack_columns(columns: Mapping[str, Tree]) -> bytes:
    """Pack columns whose leaves are `LentLeaf`."""
    packed: bytes = msgpack.packb({name: _plain(tree) for name, tree in columns.items()})
    return packed


def lent_columns(packed: bytes) -> LentColumns:
    """Unpack what `pack_columns` packed. Raises WireError for anything else."""
    return _remembered(packed) if len(packed) <= _REMEMBERED else _unpacked(packed)


def _plain(tree: Tree) -> Any:
    if isinstance(tree, LentLeaf):
        fields = [_NAMES[tree.dtype], list(tree.shape), tree.block, tree.offset]
        return msgpack.ExtType(ARRAY, msgpack.packb(fields))
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


def _leaf(code: int, packed: bytes) -> LentLeaf:
    value = msgpack.unpackb(packed, strict_map_key=True) if code == ARRAY else None
    if type(value) is not list or len(value) != 4:
        raise WireError(f"lent.columns: {shown(value)}, expected [dtype, shape, block, offset]", "memory")
    name, shape, block, offset = value
    if type(block) is not int or block < 0 or type(offset) is not int or offset < 0 or offset % 8:
        raise WireError(f"lent.columns: in block {shown(block)} at {shown(offset)}, expected multiples of 8", "memory")
    count_of(shape)  # which has limits
    return LentLeaf(dtype_of(name), tuple(shape), block, offset)


EACH = "each"  # entry of `rest`: what each fragment has in its own, beside what all have
LANE = "lane"  # entry of one of `each`: the fragment's lane, where it is another than the series'
_check_lane = whole(0, MOST_NUMBER)


def series_parts(series: Series, blocks: list[NDArray[np.uint8]]) -> list[Fragment]:
    """The fragments of a series, their arrays views of the `u8[n]` blocks.

    Raises WireError where an array lies in no block, or in that of another fragment.
    """
    where = lent_columns(series.columns)
    leaves, spec, _ = where
    count, stride = series.count, series.stride
    size = sum([leaf.nbytes for leaf in leaves])
    is_apart = bool(series.blocks and size and not stride)
    if not is_apart and (stride % 8 or stride < size):
        raise WireError(f"series: stride {stride}, expected a multiple of 8 of at least {size} bytes", "memory")
    if count * spec.num_nodes > MAX_VALUES:
        raise WireError(f"series: {count} trees of {spec.num_nodes} nodes, expected at most {MAX_VALUES}", "memory")
    if is_apart:
        trees = [where.tree(own) for own in _blocks_of_each(blocks, count)]
    else:
        columns = [leaf.arrays(blocks, count, stride) for leaf in leaves]
        trees = [optree.tree_unflatten(spec, [column[i] for column in columns]) for i in range(count)]
    return [
        Fragment(lane, series.number + i, tree, rest)
        for i, (tree, (lane, rest)) in enumerate(zip(trees, _lanes_and_rests(series), strict=True))
    ]


def _blocks_of_each(blocks: list[NDArray[np.uint8]], count: int) -> list[list[NDArray[np.uint8]]]:
    """The blocks of each fragment, where each has its own. Raises WireError where counts differ."""
    many, left = divmod(len(blocks), count)
    if left:
        raise WireError(f"series: {len(blocks)} blocks, expected as many for each of {count} fragments", "memory")
    return [blocks[begin : begin + many] for begin in range(0, len(blocks), many)]


def _lanes_and_rests(series: Series) -> list[tuple[int, Mapping[str, Any]]]:
    """Lane and rest of each fragment. Raises WireError where `each` is not a list of one map per fragment."""
    if EACH not in series.rest:
        return [(series.lane, series.rest)] * series.count
    each = series.rest[EACH]
    if not isinstance(each, list) or len(each) != series.count or not all(isinstance(own, dict) for own in each):
        raise WireError(f"series: rest.{EACH} is {shown(each)}, expected a list of {series.count} maps", "message")
    shared = {name: value for name, value in series.rest.items() if name != EACH}
    return [_of_one(own, shared, series.lane) for own in each]


def _of_one(own: dict[str, Any], shared: dict[str, Any], lane: int) -> tuple[int, Mapping[str, Any]]:
    """Lane and rest of the fragment with these entries of its own. Raises WireError where the lane is none."""
    if LANE not in own:
        return lane, shared | own
    rest = {name: value for name, value in own.items() if name != LANE}
    return _check_lane(own[LANE], f"series: rest.{EACH}.{LANE}"), shared | rest
