"""Where arrays lie that are put one behind the other."""

import math
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import optree

from rollflow.stream.errors import ColumnError
from rollflow.stream.wire import LentLeaf, can_be_lent, pack_columns

Kind = tuple[np.dtype[Any], tuple[int, ...]]  # of an array: dtype and shape


class Layout(NamedTuple):
    """Arrays one behind the other.

    leaves    of each array: its dtype, little-endian, shape and place, in block 0
    size      bytes that they take
    """

    leaves: tuple[LentLeaf, ...]
    size: int


@lru_cache(1024)
def laid_out(kinds: tuple[Kind, ...], alignment: int) -> Layout:
    """Where arrays of these kinds lie. Raises ColumnError where one can't be sent."""
    leaves, offset = [], 0
    for dtype, shape in kinds:
        little = dtype.newbyteorder("<")
        if not can_be_lent(little):
            raise ColumnError(f"a column of dtype {dtype} can't be sent, expected numbers or bool")
        leaves.append(LentLeaf(little, shape, 0, offset))
        offset += -(-little.itemsize * math.prod(shape) // alignment) * alignment
    return Layout(tuple(leaves), offset)


@lru_cache(1024)
def packed(spec: optree.PyTreeSpec, leaves: tuple[LentLeaf, ...]) -> bytes:
    """What there is to say of a tree of arrays."""
    columns: Any = optree.tree_unflatten(spec, leaves)
    return pack_columns(columns)
