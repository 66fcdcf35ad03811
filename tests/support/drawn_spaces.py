"""Spaces of every kind that has columns, drawn by chance."""

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

shapes = hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3)
FLOATS = [np.float16, np.float32, np.float64]
INTEGERS = [np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64]


@st.composite
def boxes(draw: Any) -> gym.Space[Any]:
    dtype = np.dtype(draw(st.sampled_from([*FLOATS, *INTEGERS, np.bool_])))
    shape = draw(shapes)
    if dtype == np.bool_:
        return spaces.Box(np.zeros(shape, np.bool_), np.ones(shape, np.bool_), dtype=np.bool_)
    if dtype.kind == "f":
        numbers = st.sampled_from([-np.inf, -1e3, -0.5, 0.0, 0.25, 7.0, np.inf])
    else:
        numbers = st.integers(0, 100)
    ends = st.tuples(numbers, numbers).map(sorted).filter(lambda pair: pair[0] < np.inf and pair[1] > -np.inf)
    if draw(st.booleans()):
        low, high = draw(ends)
        return spaces.Box(dtype.type(low), dtype.type(high), shape, dtype.type)
    count = int(np.prod(shape, dtype=np.int64))
    drawn = np.array(draw(st.lists(ends, min_size=count, max_size=count)), dtype).reshape(*shape, 2)
    return spaces.Box(drawn[..., 0], drawn[..., 1], dtype=dtype.type)


@st.composite
def multi_discretes(draw: Any) -> gym.Space[Any]:
    shape = draw(hnp.array_shapes(max_dims=2, max_side=3))
    dtype = draw(st.sampled_from(INTEGERS))
    nvec, start = (draw(hnp.arrays(dtype, shape, elements=st.integers(least, 9))) for least in (1, 0))
    return spaces.MultiDiscrete(nvec, dtype=dtype, start=start)


leaves = st.one_of(
    boxes(),
    multi_discretes(),
    st.builds(lambda n, start: spaces.Discrete(n, start=start), st.integers(1, 50), st.integers(-9, 9)),
    st.integers(1, 5).map(spaces.MultiBinary),
    hnp.array_shapes(max_dims=3, max_side=3).map(spaces.MultiBinary),
)
keys = st.text(max_size=3)
SPACES = st.recursive(
    leaves,
    lambda parts: st.one_of(
        st.dictionaries(keys, parts, max_size=3).map(spaces.Dict), st.lists(parts, max_size=3).map(spaces.Tuple)
    ),
    max_leaves=6,
)
