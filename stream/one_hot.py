"""Whole numbers as vectors, by themselves; with a space, see `rollflow.stream.space`."""

from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray


def one_hot(
    x: Any, depth: int = 0, on_value: float = 1.0, off_value: float = 0.0, dtype: DTypeLike = np.float32
) -> NDArray[Any]:
    """Whole numbers `int[...]` as vectors `dtype[..., depth]` with `on_value` in one place.

        x         an int, an array, a tensor or a list
        depth     how long the vectors are; 0: as long as the largest number needs

    Raises ValueError for what are no whole numbers, and for one outside 0 … depth - 1.
    """
    numbers = np.asarray(x)
    if numbers.dtype.kind not in "iub" and numbers.size:
        raise ValueError(f"one_hot of {numbers.dtype}{list(numbers.shape)}, expected whole numbers")
    least, most = int(numbers.min(initial=0)), int(numbers.max(initial=-1))
    depth = depth or most + 1
    if least < 0 or most >= depth:
        raise ValueError(f"one_hot of numbers from {least} to {most}, expected 0 … {depth - 1}")
    vectors: NDArray[Any] = np.where(numbers[..., None] == np.arange(depth), on_value, off_value).astype(dtype)
    return vectors
