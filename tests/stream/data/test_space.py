"""gymnasium spaces as trees of arrays, and as plain data."""

from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from drawn_spaces import SPACES
from gymnasium import spaces
from hypothesis import example, given, settings, strategies as st
from property_examples import examples

from rollflow.stream import ColumnError
from rollflow.stream.data.packing import pack, unpack
from rollflow.stream.data.space import (
    check_columnar,
    describe_space,
    flatten,
    is_columnar,
    item_of,
    one_hot_items,
    row_of,
    space_of,
)
from rollflow.stream.data.tree import equal_trees, map_tree, stack_trees

TEXT = spaces.Text(5)
NESTED = spaces.Dict(
    {"box": spaces.Box(-1, 1, (2,), np.float32), "pair": spaces.Tuple([spaces.Discrete(3), spaces.MultiBinary(4)])}
)


@pytest.mark.parametrize(
    ("space", "expected"),
    [
        (spaces.Box(0, 255, (4, 4), np.uint8), True),
        (spaces.MultiDiscrete([2, 3]), True),
        (NESTED, True),
        (TEXT, False),
        (spaces.Dict({"a": spaces.Discrete(2), "b": spaces.Text(5)}), False),
        (spaces.Tuple([spaces.Sequence(spaces.Discrete(2))]), False),
    ],
)
def test_a_space_has_columns_when_all_its_leaves_are_numbers(space: gym.Space[Any], expected: bool) -> None:
    assert is_columnar(space) is expected


def test_a_row_has_one_item_per_slot_in_the_spaces_dtypes() -> None:
    row = row_of(NESTED, 5)
    assert (row["box"].shape, row["box"].dtype) == ((5, 2), np.float32)
    assert (row["pair"][0].shape, row["pair"][0].dtype) == ((5,), np.int64)
    assert (row["pair"][1].shape, row["pair"][1].dtype) == ((5, 4), np.int8)


@pytest.mark.parametrize("refuse", [item_of, check_columnar, describe_space])
def test_a_part_without_columns_is_named_by_its_keys(refuse: Callable[..., Any]) -> None:
    space = spaces.Dict({"a": spaces.Discrete(2), "b": spaces.Tuple([spaces.Discrete(2), spaces.Dict(c=TEXT)])})
    with pytest.raises(ColumnError, match=r"space Text\(.*\) has no columns; expected Box, Discrete"):
        refuse(TEXT)
    with pytest.raises(ColumnError, match=r"space at \['b'\]\[1\]\['c'\] is Text\(.*\), which has no columns"):
        refuse(space)


def test_one_hot_counts_from_where_a_discrete_space_starts() -> None:
    assert one_hot_items(spaces.Discrete(3, start=5), np.array([5, 7])).tolist() == [[1, 0, 0], [0, 0, 1]]


@pytest.mark.parametrize("encode", [one_hot_items, flatten])
def test_no_items_have_vectors_as_long_as_those_of_some(encode: Callable[..., Any]) -> None:
    for space, size in [(spaces.MultiDiscrete([2, 3]), 5), (spaces.Discrete(3), 3)]:
        items = np.zeros((0, *space.shape), np.int64)
        assert encode(space, items).shape == (0, size)
    assert flatten(spaces.Box(0.0, 1.0, (2, 3)), np.zeros((0, 2, 3))).shape == (0, 6)


def test_one_hot_leaves_other_leaves_alone() -> None:
    item = {"box": np.ones(2, np.float32), "pair": (np.int64(1), np.ones(4, np.int8))}
    encoded = one_hot_items(NESTED, item)
    assert encoded["box"] is item["box"]
    assert encoded["pair"][0].tolist() == [0, 1, 0]
    assert encoded["pair"][1] is item["pair"][1]


@pytest.mark.parametrize("start", [0, 4])
def test_one_hot_counts_the_parts_of_a_multi_discrete_table_row_by_row(start: int) -> None:
    space = spaces.MultiDiscrete(np.array([[2, 3], [1, 2]]), start=np.full((2, 2), start))
    item = np.array([[1, 2], [0, 1]]) + start
    expected = [0, 1, 0, 0, 1, 1, 0, 1]
    assert one_hot_items(space, item).tolist() == expected
    assert one_hot_items(space, np.stack([item, item])).tolist() == [expected, expected]


def test_one_hot_of_arrays_is_one_hot_of_each_row() -> None:
    items = [NESTED.sample() for _ in range(4)]
    rows = stack_trees(items)
    encoded = one_hot_items(NESTED, rows)
    for row, item in enumerate(items):
        assert equal_trees(map_tree(lambda leaf, row=row: leaf[row], encoded), one_hot_items(NESTED, item))
    assert encoded["pair"][0].dtype == np.float32


def test_an_item_has_the_structure_of_its_space_and_is_full_of_one_value() -> None:
    item = item_of(NESTED, 1)
    assert NESTED.contains(item)
    assert (item["box"].tolist(), item["pair"][0], item["pair"][1].tolist()) == ([1, 1], 1, [1] * 4)


# Spaces as plain data: each comes back as it was, over msgpack and all


def sent(space: gym.Space[Any]) -> gym.Space[Any]:
    return space_of(unpack(pack(describe_space(space))))


@given(space=SPACES, seed=st.integers(0, 2**32 - 1))
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
