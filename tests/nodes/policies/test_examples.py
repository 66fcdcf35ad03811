"""Comparison of what a policy computes with what it computed when it was saved."""

import numpy as np
import pytest

from rollflow.nodes.policies.artifact import check_same
from rollflow.stream import PolicyError

LOGITS, ACTIONS = "module: action_dist_inputs float32", "actions: env int64"
SAVED = {LOGITS: np.linspace(-1, 1, 128, dtype=np.float32), ACTIONS: np.arange(64) % 2}


def changed(name: str, place: int, value: float) -> dict[str, np.ndarray]:
    """The saved arrays with one number changed."""
    arrays = {key: array.copy() for key, array in SAVED.items()}
    arrays[name][place] = value
    return arrays


def test_the_same_numbers_are_the_same() -> None:
    check_same(SAVED, SAVED, exact=True)
    with_nan = changed(LOGITS, 3, np.nan)
    check_same(with_nan, with_nan, exact=True)


def test_one_bit_is_found_where_the_processor_is_the_same() -> None:
    nearly = changed(LOGITS, 5, np.nextafter(SAVED[LOGITS][5], np.float32(2)))
    with pytest.raises(PolicyError, match=r"module is the first part .* number 5 is .* \(1 of 128 differ\)"):
        check_same(SAVED, nearly, exact=True)
    check_same(SAVED, nearly, exact=False)


def test_more_than_rounding_is_found_everywhere() -> None:
    with pytest.raises(PolicyError, match="module is the first part"):
        check_same(SAVED, changed(LOGITS, 5, SAVED[LOGITS][5] + 1e-4), exact=False)


def test_a_close_call_may_go_otherwise_on_another_processor_alone() -> None:
    other = changed(ACTIONS, 7, 0)
    check_same(SAVED, other, exact=False)
    with pytest.raises(PolicyError, match="actions is the first part"):
        check_same(SAVED, other, exact=True)
    with pytest.raises(PolicyError, match="actions is the first part"):
        check_same(SAVED, {**SAVED, ACTIONS: 1 - SAVED[ACTIONS]}, exact=False)


def test_what_differs_at_an_earlier_step_comes_first() -> None:
    both = changed(LOGITS, 127, 5.0) | {ACTIONS: changed(ACTIONS, 0, 1)[ACTIONS]}
    with pytest.raises(PolicyError, match="actions is the first part"):
        check_same(SAVED, both, exact=True)


def test_columns_that_are_missing_and_unused_are_both_named() -> None:
    with pytest.raises(PolicyError, match=r"missing \['actions: env int64'\], unused \['x: y int64'\]"):
        check_same({LOGITS: SAVED[LOGITS], "x: y int64": np.zeros(1)}, SAVED, exact=True)
