"""Ranges of dtypes: casts of numbers that would come out as others are refused."""

from collections.abc import Callable
from math import isfinite
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollflow.stream.data.errors import ColumnError, EnvError


def is_narrower(dtype: np.dtype[Any], than: np.dtype[Any]) -> bool:
    """True if an integer dtype does not hold all numbers of another one."""
    return dtype.kind in "iu" and than.kind in "iu" and not np.can_cast(than, dtype)


def check_range(values: NDArray[Any], dtype: np.dtype[Any], whose: str) -> None:
    """Raise ColumnError, whose text begins with `whose`, for whole numbers any[...] that a dtype does not hold."""
    if not is_narrower(dtype, values.dtype) or not values.size:
        return
    info, least, most = np.iinfo(dtype), int(values.min()), int(values.max())
    if least < info.min or most > info.max:
        wrong = least if least < info.min else most
        raise ColumnError(f"{whose}: got {wrong}, expected whole numbers from {info.min} to {info.max}, as {dtype} has")


def finite_float32(rewards: NDArray[Any], named: Callable[[int], str]) -> NDArray[np.float32]:
    """The rewards number[N] as float32. Raises EnvError, with its name, for one that is not finite there."""
    values: NDArray[np.float32] = rewards
    if rewards.dtype != np.float32:
        with np.errstate(over="ignore"):
            values = rewards.astype(np.float32)
    # Quicker than to look at each: finite only where all are, and nearly always where they are.
    if not isfinite(np.vdot(values, values)) and not np.isfinite(values).all():
        place = int(np.argmin(np.isfinite(values)))
        text = f"{named(place)}: its reward is {rewards[place]}, expected a finite float32"
        raise EnvError(text).see("flags")
    return values
