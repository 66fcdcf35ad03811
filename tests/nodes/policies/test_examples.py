"""Comparison of what a policy computes with what it computed when it was saved."""

from typing import Any

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


WITH_NAN, OTHER = changed(LOGITS, 3, np.nan), changed(ACTIONS, 7, 0)
NEARLY = changed(LOGITS, 5, np.nextafter(SAVED[LOGITS][5], np.float32(2)))


@pytest.mark.parametrize(
    ("saved", "computed"),
    # Rounding, and a close call, may go otherwise on another processor.
    [(SAVED, SAVED), (WITH_NAN, WITH_NAN), (SAVED, NEARLY), (SAVED, OTHER)],
)
def test_what_is_the_same_passes(saved: Any, computed: Any) -> None:
    check_same(saved, computed)


@pytest.mark.parametrize(
    ("computed", "text"),
    [
        (
            changed(LOGITS, 5, SAVED[LOGITS][5] + 1e-4),
            r"module is the first part .* number 5 is .* \(1 of 128 differ\)",
        ),
        ({**SAVED, ACTIONS: 1 - SAVED[ACTIONS]}, "actions is the first part"),
        # What differs at an earlier step comes first.
        (changed(LOGITS, 127, 5.0) | {ACTIONS: 1 - SAVED[ACTIONS]}, "actions is the first part"),
        ({LOGITS: SAVED[LOGITS], "x: y int64": np.zeros(1)}, r"missing \['x: y int64'\], unused \['actions: env"),
    ],
)
def test_what_differs_is_named(computed: Any, text: str) -> None:
    with pytest.raises(PolicyError, match=text):
        check_same(SAVED, computed)
