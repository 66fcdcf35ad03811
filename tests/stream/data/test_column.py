from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from rollflow.stream import ColumnError
from rollflow.stream.data.column import Column
from rollflow.stream.data.infos import info_of, replaced, without
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
    infos = {
        "x": np.array([1, 2, 3]),
        "_x": np.array([True, False, True]),
        "deep": {"y": np.array(["a", None, "c"], object), "_y": np.array([True, False, True])},
        "_deep": np.array([True, False, True]),
        "run": "name",
        "_own": 5,
    }
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
