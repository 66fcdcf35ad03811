"""Helpers that users test their own pieces with."""

from typing import Any

import numpy as np
import pytest
import torch

from rollflow.stream.data.space import one_hot
from rollflow.stream.testing import check

SAME: list[tuple[Any, Any]] = [
    ([1, 2], (1, 2)),
    ({"a": 1}, {"a": 1.0000001}),
    (np.array([1, 2]), [1, 2]),
    (torch.ones(2), [1, 1]),
    ({("e",): [{"x": np.zeros(2)}]}, {("e",): [{"x": [0, 0]}]}),
    (None, None),
    ("a", "a"),
    ([[1, 2], [3]], [[1, 2], [3]]),
    (np.nan, np.nan),
]
DIFFERENT: list[tuple[Any, Any, str]] = [
    ({"a": 1}, {"b": 1}, "at the top: x is .*: expected dicts with the same keys"),
    ({"a": [1, 2]}, {"a": [1, 3]}, r"at \['a'\]\[1\]: x is 2, y is 3"),
    ([1, 2], [1], "at the top: .*: expected as many items"),
    (np.zeros(2), np.zeros(3), r"at the top: x is array\(\[0., 0.\]\)"),
    (1.001, 1.0, "at the top: x is 1.001, y is 1.0"),
    ("a", "b", "at the top: x is 'a', y is 'b'"),
    (1, [1], "expected as many items"),
    ({"a": 1}, 1, "expected dicts with the same keys"),
]


@pytest.mark.parametrize(("x", "y"), SAME)
def test_what_holds_the_same_passes(x: Any, y: Any) -> None:
    check(x, y)
    check(y, x)
    with pytest.raises(AssertionError, match="x is the same as y"):
        check(x, y, false=True)


@pytest.mark.parametrize(("x", "y", "told"), DIFFERENT)
def test_what_differs_is_told_with_its_place(x: Any, y: Any, told: str) -> None:
    with pytest.raises(AssertionError, match=told):
        check(x, y)
    check(x, y, false=True)


def test_how_far_numbers_may_be_apart_can_be_said() -> None:
    check(1.001, 1.0, decimals=2)
    check(1.1, 1.0, rtol=0.2)
    check(1.1, 1.0, atol=0.2)
    check(1.1, 1.0, atol=0.05, false=True)


def test_numbers_are_vectors_with_one_place_on() -> None:
    assert one_hot(np.array([1, 0, 0], np.int32)).tolist() == [[0, 1], [1, 0], [1, 0]]
    assert one_hot(2, 4).tolist() == [0, 0, 1, 0]
    made = one_hot(torch.tensor([[1], [2]]), 3, on_value=5, off_value=-1, dtype=np.int64)
    assert made.tolist() == [[[-1, 5, -1]], [[-1, -1, 5]]]
    assert one_hot(np.zeros(0, np.int64), 3).shape == (0, 3)
    assert one_hot([0]).dtype == np.float32


@pytest.mark.parametrize(
    ("x", "depth", "told"),
    [
        ([3], 3, "one_hot of numbers from 0 to 3, expected 0 … 2"),
        ([-1], 3, "one_hot of numbers from -1 to -1, expected 0 … 2"),
        ([1.0], 3, r"one_hot of float64\[1\], expected whole numbers"),
    ],
)
def test_numbers_that_have_no_place_are_refused(x: Any, depth: int, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        one_hot(x, depth)
