"""Checks of numbers that connector pieces take as arguments."""

import operator
from typing import Any


def checked_gamma(gamma: float) -> float:
    """Return `gamma`. Raises ValueError outside 0 … 1."""
    if not 0.0 <= gamma <= 1.0:
        raise ValueError(f"gamma is {gamma}, expected 0 … 1")
    return gamma


def checked_count(name: str, count: Any, least: int) -> int:
    """Return a whole number as an int. Raises ValueError for anything else, a bool, or one below `least`."""
    try:
        number = operator.index(count)
    except TypeError:
        number = least - 1
    if isinstance(count, bool) or number < least:
        raise ValueError(f"{name} is {count!r}, expected a whole number from {least} on")
    return number
