"""Rings of rows: a position that counts every row ever written stands in row `position % num_rows`.

An array may have more rows behind those of its ring.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray


def read_ring(array: NDArray[Any], num_rows: int, begin: int, end: int) -> NDArray[Any]:
    """The rows of positions from `begin` to `end`, at most once round the ring; may be a view."""
    row = begin % num_rows
    there = array[row : min(row + end - begin, num_rows)]
    behind = end - begin - len(there)
    return np.concatenate([there, array[:behind]]) if behind else there


def write_ring(array: NDArray[Any], num_rows: int, begin: int, values: NDArray[Any]) -> None:
    """Set the rows of positions from `begin` on, at most once round the ring."""
    row = begin % num_rows
    before = num_rows - row
    array[row : row + len(values[:before])] = values[:before]
    if len(values) > before:
        array[: len(values) - before] = values[before:]
