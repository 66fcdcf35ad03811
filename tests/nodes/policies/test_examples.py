"""Comparison of what a policy computes with what it computed when it was saved."""

import numpy as np
import pytest

from rollflow.nodes.policies.examples import difference_of

LOGITS, ACTIONS = "module: action_dist_inputs float32", "actions: env int64"
SAVED = {LOGITS: np.linspace(-1, 1, 128, dtype=np.float32), ACTIONS: np.arange(64) % 2}


def changed(name: str, place: int, value: float) -> dict[str, np.ndarray]:
    """The saved arrays with one number changed."""
    arrays = {key: array.copy() for key, array in SAVED.items()}
    arrays[name][place] = value
    return arrays


@pytest.mark.parametrize(
    ("saved", "computed", "text"),
    [
        (SAVED, SAVED, ""),
        (changed(LOGITS, 3, np.nan), changed(LOGITS, 3, np.nan), ""),
        (SAVED, changed(LOGITS, 5, SAVED[LOGITS][5] + 1e-6), ""),  # by rounding
        (SAVED, changed(LOGITS, 5, 2.0), "in module: action_dist_inputs float32, number 5 is "),
        (SAVED, changed(LOGITS, 5, np.nan), "in module: action_dist_inputs float32, number 5 is "),
        (SAVED, changed(ACTIONS, 7, 0), ""),  # a close call
        (SAVED, {**SAVED, ACTIONS: 1 - SAVED[ACTIONS]}, "in actions: env int64, number 0 is "),
        ({LOGITS: SAVED[LOGITS]}, SAVED, "actions: env int64 has 64 numbers, expected 0"),
        (SAVED, {ACTIONS: SAVED[ACTIONS][:9]}, "actions: env int64 has 9 numbers, expected 64"),
        (SAVED, {ACTIONS: SAVED[ACTIONS]}, ""),  # of a policy that samples
    ],
    ids=range(10),
)
def test_what_differs_by_more_than_rounding_is_named(
    saved: dict[str, np.ndarray], computed: dict[str, np.ndarray], text: str
) -> None:
    found = difference_of(saved, computed)
    assert found.startswith(text)
    assert bool(found) == bool(text)
