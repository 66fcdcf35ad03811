"""Packed places of columns that lie in blocks of shared memory.

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
from rollflow.stream.wire.codec.field import shown
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

    def array(self, blocks: list[NDArray[np.uint8]]) -> NDArray[Any]:
        """The array `dtype[shape]`, a view of `u8[n]` blocks. Raises WireError beyond these, and for wrong bools."""
        if 0 in self.shape:
            return np.empty(self.shape, self.dtype)
        nbytes = math.prod(self.shape) * self.dtype.itemsize
        if self.block >= len(blocks) or self.offset + nbytes > blocks[self.block].size:
            sizes = [len(block) for block in blocks]
            raise WireError(f"lent: {self} does not lie in its blocks, of {shown(sizes)} bytes", "memory")
        array: NDArray[Any] = np.ndarray(self.shape, self.dtype, blocks[self.block], self.offset)
        if self.dtype.kind == "b" and np.count_nonzero(array.view(np.uint8) > 1):
            most = array.view(np.uint8).max()
            raise WireError(f"lent: array |b1{list(self.shape)} has a byte {most}, expected 0 or 1", "memory")
        return array


def can_be_lent(dtype: np.dtype[Any]) -> bool:
    """True if arrays of this dtype can be lent."""
    return dtype in _NAMES


def pack_columns(columns: Mapping[str, Tree]) -> bytes:
    """Pack columns whose leaves are `LentLeaf`."""
    packed: bytes = msgpack.packb({name: _plain(tree) for name, tree in columns.items()})
    return packed


def lent_columns(packed: bytes, blocks: list[NDArray[np.uint8]]) -> Any:
    """The columns that `pack_columns` packed, views of `u8[n]` blocks.

    Raises WireError for anything else, and where one lies in none of the blocks.
    """
    leaves, spec = _remembered(packed) if len(packed) <= _REMEMBERED else _unpacked(packed)
    return optree.tree_unflatten(spec, [leaf.array(blocks) for leaf in leaves])


def _plain(tree: Tree) -> Any:
    if isinstance(tree, LentLeaf):
        fields = [_NAMES[tree.dtype], list(tree.shape), tree.block, tree.offset]
        return msgpack.ExtType(ARRAY, msgpack.packb(fields))
    if isinstance(tree, Mapping):
        return {key: _plain(part) for key, part in tree.items()}
    return [_plain(part) for part in tree]


def _unpacked(packed: bytes) -> tuple[list[LentLeaf], optree.PyTreeSpec]:
    scan(packed)
    try:
        columns = msgpack.unpackb(packed, ext_hook=_leaf, strict_map_key=True)
    except (TypeError, ValueError, OverflowError) as error:
        raise WireError(f"lent.columns: {error}", "memory") from error
    if type(columns) is not dict:
        raise WireError(f"lent.columns is {shown(columns)}, expected a map", "memory")
    _check(columns, "lent.columns")
    plain: Any = columns
    return optree.tree_flatten(plain, is_leaf=_is_leaf)


_remembered = lru_cache(256)(_unpacked)


def _is_leaf(part: Any) -> bool:
    return isinstance(part, LentLeaf)


def _check(tree: Any, where: str) -> None:
    """Raise WireError unless it is a tree of arrays whose keys are strings."""
    if isinstance(tree, LentLeaf):
        return
    if type(tree) not in (dict, list):
        raise WireError(f"{where} is {shown(tree)}, expected an array, or a map or list of arrays", "memory")
    for key, part in tree.items() if type(tree) is dict else enumerate(tree):
        if type(tree) is dict and type(key) is not str:
            raise WireError(f"{where} has a key {shown(key)}, expected a string", "memory")
        _check(part, f"{where}[{key!r}]")


def _leaf(code: int, packed: bytes) -> LentLeaf:
    value = msgpack.unpackb(packed, strict_map_key=True) if code == ARRAY else None
    if type(value) is not list or len(value) != 4:
        raise WireError(f"lent.columns: {shown(value)}, expected [dtype, shape, block, offset]", "memory")
    name, shape, block, offset = value
    if type(block) is not int or block < 0 or type(offset) is not int or offset < 0 or offset % 8:
        raise WireError(f"lent.columns: in block {shown(block)} at {shown(offset)}, expected multiples of 8", "memory")
    count_of(shape)  # which has limits
    return LentLeaf(dtype_of(name), tuple(shape), block, offset)
