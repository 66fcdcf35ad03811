"""Spaces as plain data: each comes back as it was, over msgpack and all."""

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import example, given, settings, strategies as st
from hypothesis.extra import numpy as hnp
from property_examples import examples

from rollflow.stream import ColumnError
from rollflow.stream.data.packing import pack, unpack
from rollflow.stream.data.space import describe_space, space_of

shapes = hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3)
seeds = st.integers(0, 2**32 - 1)
FLOATS, INTEGERS = [np.float16, np.float32, np.float64], [np.uint8, np.int8, np.int32, np.int64]


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
any_space = st.recursive(
    leaves,
    lambda parts: st.one_of(
        st.dictionaries(keys, parts, max_size=3).map(spaces.Dict),
        st.lists(parts, max_size=3).map(spaces.Tuple),
    ),
    max_leaves=6,
)


def sent(space: gym.Space[Any]) -> gym.Space[Any]:
    return space_of(unpack(pack(describe_space(space))))


@given(space=any_space, seed=seeds)
@example(space=spaces.MultiBinary(4), seed=0)
@example(space=spaces.Dict(bits=spaces.MultiBinary((4,))), seed=0)
@settings(max_examples=examples(200))
def test_every_columnar_space_comes_back_equal(space: gym.Space[Any], seed: int) -> None:
    came = sent(space)
    assert came == space
    assert str(came) == str(space)
    assert (came.shape, came.dtype) == (space.shape, space.dtype)
    # Equal is little: it is to draw the same, too.
    space.seed(seed)
    came.seed(seed)
    assert str(came.sample()) == str(space.sample())


def test_what_is_alike_all_over_takes_one_number() -> None:
    pixels = spaces.Box(0, 255, (84, 84, 4), np.uint8)
    assert len(pack(describe_space(pixels))) < 200
    assert sent(pixels) == pixels


@pytest.mark.parametrize(
    "plain",
    [
        {},
        {"kind": "Text"},
        {"kind": "Discrete"},
        {"kind": "Box", "low": ["<f4", [2], b"123"], "high": ["<f4", [2], b"1234"]},
        {"kind": "Tuple", "parts": [{"kind": "MultiBinary", "shape": "wide"}]},
        [1, 2],
        None,
    ],
    ids=str,
)
def test_what_is_no_description_is_refused(plain: Any) -> None:
    with pytest.raises(ColumnError, match="no description of a space: "):
        space_of(plain)
