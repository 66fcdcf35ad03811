"""Values that a header can say, to draw from, and whether two of them are the same."""

from typing import Any

import hypothesis.strategies as st
import numpy as np
from hypothesis.extra import numpy as npst

from rollflow.stream.data.infos import SlotInfos
from rollflow.stream.wire.codec.value import DTYPES

NAMED = st.sampled_from(sorted(DTYPES)).map(np.dtype)
TEXTS = st.text(max_size=6)
KEYS = TEXTS | st.integers(-9, 9)


def objects(items: list[Any]) -> Any:
    """An array of objects."""
    array = np.empty(len(items), object)
    for index, item in enumerate(items):
        array[index] = item
    return array


def arrays_of(dtypes: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Small arrays of these dtypes."""
    return npst.arrays(dtypes, npst.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4))


def values_of(dtypes: st.SearchStrategy[Any], keys: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Values with arrays and numbers of these dtypes, and dicts with these keys."""
    integers = st.integers(-(2**63), 2**64 - 1)
    plain = st.none() | st.booleans() | integers | st.floats() | TEXTS | st.binary(max_size=8)

    def inside(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        return (
            st.lists(values, max_size=3)
            | st.lists(values, max_size=3).map(tuple)
            | st.lists(values, max_size=4).map(objects)
            | st.lists(values, min_size=4, max_size=4).map(lambda each: objects(each).reshape(2, 2))
            | st.dictionaries(keys, values, max_size=3)
            | st.lists(st.dictionaries(TEXTS, values, max_size=2), max_size=3).map(SlotInfos)
        )

    return st.recursive(plain | arrays_of(dtypes) | dtypes.flatmap(npst.from_dtype), inside, max_leaves=8)


ARRAYS = arrays_of(NAMED)
VALUES = values_of(NAMED, KEYS)


def same(left: Any, right: Any) -> bool:
    """Return True if two values are of the same types and have the same bits."""
    if type(left) is not type(right):
        return False
    if isinstance(left, np.ndarray) and left.dtype == object:
        return bool(left.shape == right.shape) and same(left.reshape(-1).tolist(), right.reshape(-1).tolist())
    if isinstance(left, np.ndarray | np.generic):
        return bool((left.dtype, left.shape) == (right.dtype, right.shape)) and left.tobytes() == right.tobytes()
    if isinstance(left, SlotInfos):
        return same(left.dicts, right.dicts)
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, float):
        return bool(np.float64(left).tobytes() == np.float64(right).tobytes())
    return bool(left == right)
