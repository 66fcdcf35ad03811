"""One question put to two implementations, and the answers held against each other."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch


@dataclass(frozen=True)
class Answer:
    """Result of a call: a value, or an error."""

    value: Any = None
    error: Exception | None = None

    def __str__(self) -> str:
        return f"{self.value!r}" if self.error is None else f"{type(self.error).__name__}: {self.error}"


def ask(call: Callable[[], Any]) -> Answer:
    try:
        return Answer(call())
    except Exception as error:
        return Answer(error=error)


def assert_same_answer(ours: Answer, theirs: Answer, told: object = "", **how: Any) -> None:
    """Both gave the same value, or both refused; the type of an error is each one's own affair."""
    difference = None
    if ours.error is None and theirs.error is None:
        difference = difference_of(ours.value, theirs.value, **how)
    elif ours.error is None or theirs.error is None:
        difference = "one of them refuses"
    assert difference is None, f"{difference}\n{told}\n  ours:   {ours}\n  theirs: {theirs}"


def assert_same(ours: Any, theirs: Any, **how: Any) -> None:
    difference = difference_of(ours, theirs, **how)
    assert difference is None, f"{difference}\n  ours:   {ours!r}\n  theirs: {theirs!r}"


def difference_of(ours: Any, theirs: Any, *, dtypes: bool = True, rtol: float = 0.0, at: str = "") -> str | None:
    """Return where two answers differ, None where they don't.

        dtypes    whether arrays must have one dtype
        rtol      how far numbers may be apart

    Dicts, tuples and lists are gone through. An array is no list, but a 0-d array is as good as its number.
    """
    how = {"dtypes": dtypes, "rtol": rtol}
    for kind in (dict, tuple, list):
        if isinstance(ours, kind) != isinstance(theirs, kind):
            return f"at {at or 'top'}: {type(ours).__name__} and {type(theirs).__name__}"
    if isinstance(ours, dict):
        if ours.keys() != theirs.keys():
            return f"at {at or 'top'}: keys {sorted(map(str, ours))} and {sorted(map(str, theirs))}"
        pairs = [(ours[key], theirs[key], f"{at}[{key!r}]") for key in ours]
    elif isinstance(ours, list | tuple):
        if len(ours) != len(theirs):
            return f"at {at or 'top'}: {len(ours)} and {len(theirs)} items"
        pairs = [(mine, other, f"{at}[{i}]") for i, (mine, other) in enumerate(zip(ours, theirs, strict=True))]
    else:
        return _leaf_difference(ours, theirs, at or "top", **how)
    differences = (difference_of(mine, other, at=place, **how) for mine, other, place in pairs)
    return next((difference for difference in differences if difference is not None), None)


def _leaf_difference(ours: Any, theirs: Any, at: str, *, dtypes: bool, rtol: float) -> str | None:
    if torch.is_tensor(ours) != torch.is_tensor(theirs):
        return f"at {at}: {type(ours).__name__} and {type(theirs).__name__}"
    mine, other = np.asarray(ours), np.asarray(theirs)
    if mine.shape != other.shape:
        return f"at {at}: shapes {mine.shape} and {other.shape}"
    if dtypes and isinstance(ours, np.ndarray) and isinstance(theirs, np.ndarray) and mine.dtype != other.dtype:
        return f"at {at}: {mine.dtype} and {other.dtype}"
    if mine.dtype.kind in "fc" and other.dtype.kind in "fciub":
        equal = np.allclose(mine, other, rtol=rtol, atol=rtol, equal_nan=True)
    else:
        equal = bool(np.array_equal(mine, other))
    return None if equal else f"at {at}: {ours!r} and {theirs!r}"
