"""Comparison of nested structures, for tests of your own connector pieces."""

from collections.abc import Mapping
from typing import Any

import numpy as np


def check(
    x: Any, y: Any, decimals: int = 5, atol: float | None = None, rtol: float | None = None, false: bool = False
) -> None:
    """Raise AssertionError, with the place of the difference, unless two structures have equal values.

    x, y          numbers, strings, arrays, tensors, or dicts, lists and tuples of them, of one structure; an
                  array equals a list of its items
    decimals      digits after the point in which numbers agree, if neither `atol` nor `rtol` is given
    atol, rtol    how far numbers may differ: at most atol + rtol * |y|
    false         raise when the values are equal instead
    """
    if atol is None and rtol is None:
        atol = 0.5 * 10.0**-decimals
    difference = _difference(x, y, (atol or 0.0, rtol or 0.0), "")
    if false and difference is None:
        raise AssertionError(f"x is the same as y: {x!r}")
    if not false and difference is not None:
        raise AssertionError(difference)


def _difference(x: Any, y: Any, tolerance: tuple[float, float], at: str) -> str | None:
    place = f"at {at}" if at else "at the top"
    if isinstance(x, Mapping) or isinstance(y, Mapping):
        if not (isinstance(x, Mapping) and isinstance(y, Mapping)) or x.keys() != y.keys():
            return f"{place}: x is {x!r}, y is {y!r}: expected dicts with the same keys"
        parts = [(x[key], y[key], f"{at}[{key!r}]") for key in x]
    elif isinstance(x, list | tuple) or isinstance(y, list | tuple):
        if not (_is_sequence(x) and _is_sequence(y)) or len(x) != len(y):
            return f"{place}: x is {x!r}, y is {y!r}: expected as many items"
        parts = [(mine, other, f"{at}[{i}]") for i, (mine, other) in enumerate(zip(x, y, strict=True))]
    else:
        return None if _same_leaves(x, y, tolerance) else f"{place}: x is {x!r}, y is {y!r}"
    differences = (_difference(mine, other, tolerance, path) for mine, other, path in parts)
    return next((difference for difference in differences if difference is not None), None)


def _is_sequence(x: Any) -> bool:
    return isinstance(x, list | tuple) or bool(getattr(x, "ndim", 0))


def _same_leaves(x: Any, y: Any, tolerance: tuple[float, float]) -> bool:
    x, y = np.asarray(x), np.asarray(y)
    if x.shape != y.shape:
        return False
    if x.dtype.kind in "biufc" and y.dtype.kind in "biufc":
        return bool(np.allclose(x, y, atol=tolerance[0], rtol=tolerance[1], equal_nan=True))
    return bool(np.array_equal(x, y))
