"""Numbers that connector pieces are given, held against what they may be."""

import operator
from typing import Any


def checked_gamma(gamma: float) -> float:
    """`gamma` itself. Raises ValueError outside 0 … 1."""
    if not 0.0 <= gamma <= 1.0:
        raise ValueError(f"gamma is {gamma}, expected 0 … 1")
    return gamma


def checked_count(name: str, count: Any, least: int) -> int:
    """A whole number of whatever type as an int. Raises ValueError for another, a bool, or one below `least`."""
    try:
        number = operator.index(count)
    except TypeError:
        number = least - 1
    if isinstance(count, bool) or number < least:
        raise ValueError(f"{name} is {count!r}, expected a whole number from {least} on")
    return number
