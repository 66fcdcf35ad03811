"""Columns, and gymnasium spaces as trees of arrays and as plain data."""

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
from rollflow.stream.data.column import Column
from rollflow.stream.data.infos import info_of, replaced, without
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
from rollflow.stream.graph.seeding import fresh_seed, generator_for, seed_for


def nested() -> Column:
    return Column.empty("obs", {"a": np.zeros((4, 3), np.float32), "b": (np.zeros(4, np.int64),)}, rows=5)


def test_a_row_is_written_whole_and_read_as_views() -> None:
    column = nested()
    column.write(2, {"b": (np.arange(4),), "a": np.full((4, 3), 7.0)})
    row = column.row(2)
    assert row["b"][0].tolist() == [0, 1, 2, 3]
    assert (row["a"] == 7.0).all()
    assert np.shares_memory(row["a"], column.tree["a"])
    column.write_slot(2, 1, {"a": [1, 2, 3], "b": (9,)})
    assert row["a"][1].tolist() == [1, 2, 3]
    assert row["b"][0].tolist() == [0, 9, 2, 3]


@pytest.mark.parametrize(
    ("values", "told"),
    [
        (np.zeros((4, 2), np.float32), r"column 'x': got float32\[4, 2\], expected float32\[4, 3\]"),
        (np.zeros(3, np.float32), r"column 'x': got float32\[3\], expected float32\[4, 3\]"),
        (np.zeros((4, 3), complex), r"column 'x': got complex128\[4, 3\], expected float32\[4, 3\]"),
        (7.0, r"column 'x': got float64\[\], expected float32\[4, 3\]"),
    ],
)
def test_what_does_not_fit_is_refused_and_nothing_is_broadcast(values: Any, told: str) -> None:
    column = Column.empty("x", np.zeros((4, 3), np.float32), rows=2)
    with pytest.raises(ColumnError, match=told):
        column.write(0, values)


def test_a_leaf_that_does_not_fit_is_named_by_its_path() -> None:
    with pytest.raises(ColumnError, match=r"column 'obs'\['b'\]\[0\]: got float64\[4\], expected int64\[4\]"):
        nested().write(0, {"a": np.zeros((4, 3)), "b": (np.zeros(4),)})
    with pytest.raises(ColumnError, match=r"column 'obs': the structure differs"):
        nested().write(0, {"a": np.zeros((4, 3))})


@pytest.mark.parametrize("nest", [lambda values: values, lambda values: {"a": values}], ids=["array", "nested"])
def test_numbers_are_cast_within_their_kind_whichever_came_before(nest: Any) -> None:
    column = Column.empty("x", nest(np.zeros(2, np.float32)), 3)
    small = Column.empty("x", nest(np.zeros(2, np.int8)), 2)
    for row, values in enumerate((np.array([0.5, 1.5]), np.array([2, 3]), np.array([0.5, 1.5], np.float16))):
        column.write(row, nest(values))
    np.testing.assert_equal(column.tree, nest(np.array([[0.5, 1.5], [2, 3], [0.5, 1.5]])))
    with pytest.raises(ColumnError, match="got complex128"):
        column.write(0, nest(np.array([1j, 2])))
    small.write(0, nest(np.array([1, 2])))
    with pytest.raises(ColumnError, match="got 300, expected whole numbers from -128 to 127"):
        small.write(1, nest(np.array([300, 2])))


def test_a_sealed_column_can_not_be_written() -> None:
    column = nested()
    column.seal()
    with pytest.raises(ValueError, match="read-only"):
        column.write(0, {"b": (np.arange(4),), "a": np.zeros((4, 3))})


def test_infos_are_taken_apart_by_slot() -> None:
    some = np.array([True, False, True])
    deep = {"y": np.array(["a", None, "c"], object), "_y": some}
    infos = {"x": np.array([1, 2, 3]), "_x": some, "deep": deep, "_deep": some, "run": "name", "_own": 5}
    assert info_of(infos, 0) == {"x": 1, "deep": {"y": "a"}, "run": "name", "_own": 5}
    assert info_of(infos, 1) == {"run": "name", "_own": 5}
    assert without(infos, "x", "deep", "none") == {"run": "name", "_own": 5}


def test_infos_of_some_slots_may_be_replaced() -> None:
    before = {"x": np.array([1, 2]), "_x": np.array([True, True])}
    after = {"z": np.array([0, 9]), "_z": np.array([False, True])}
    merged = replaced(before, after, np.array([False, True]))
    assert [info_of(merged, slot) for slot in range(2)] == [{"x": 1}, {"z": 9}]


@given(st.integers(0, 2**63), st.text(max_size=8), st.integers(0, 1000))
def test_a_seed_belongs_to_a_name_and_a_number(seed: int, name: str, index: int) -> None:
    assert seed_for(seed, name, index) == seed_for(seed, name, index)
    assert seed_for(seed, name, index) != seed_for(seed, name, index + 1)
    assert seed_for(seed, name, index) != seed_for(seed, name + "x", index)
    first, second = (generator_for(seed, name, index).integers(2**62) for _ in range(2))
    assert first == second


def test_fresh_seeds_differ() -> None:
    assert len({fresh_seed() for _ in range(8)}) == 8


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
