"""Bytes that lie in several places and go as one array."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray


class Joined:
    """One array u8[nbytes] where it arrives: the parts one after the other, each filled up to a multiple of 8.

    parts    u8[n] each, C order; they must stay as they are until sent
    """

    def __init__(self, parts: Sequence[NDArray[np.uint8]]) -> None:
        self.parts = parts
        self.nbytes = sum([part.nbytes + -part.nbytes % 8 for part in parts])


def bytes_of(array: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[np.uint8]:
    """An array's bytes as this dtype, u8[n]: its own where it is in C order and of that dtype, or a copy."""
    return np.ascontiguousarray(array, dtype).reshape(-1).view(np.uint8)
