"""Sum tree: draws from many numbers in proportion to their values, and changes them, with numpy alone."""

import numpy as np
from numpy.typing import NDArray

from rollflow.sinks.replay.chunk_table import Ints

_TOP = 1024  # most sums in the topmost level, which a draw goes through as a whole

Floats = NDArray[np.float64]


class SumTree:
    """Values f64[size], none below 0, with a binary tree of their sums up to a level of at most 1024.

    Sums are worked out from the two below each time, so that no error piles up.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        leaves = 1 << max(size - 1, 1).bit_length()
        self._levels = [np.zeros(leaves)]  # from the values up
        while len(self._levels[-1]) > _TOP:
            self._levels.append(np.zeros(len(self._levels[-1]) // 2))

    @property
    def values(self) -> Floats:
        """The values f64[size]; not to be written to."""
        return self._levels[0][: self.size]

    @property
    def total(self) -> float:
        """The sum of all values."""
        return float(self._levels[-1].sum())

    def set(self, places: Ints, values: Floats | float) -> None:
        """Set the values at places i64[B]; of a place that comes twice, the last counts."""
        self._levels[0][places] = values
        for lower, upper in zip(self._levels, self._levels[1:], strict=False):
            places = places >> 1
            pairs = lower.reshape(-1, 2).take(places, axis=0)
            upper[places] = pairs[:, 0] + pairs[:, 1]

    def set_range(self, begin: int, values: Floats) -> None:
        """Set the values f64[n] at the places from `begin` on."""
        stop = begin + len(values)
        self._levels[0][begin:stop] = values
        for lower, upper in zip(self._levels, self._levels[1:], strict=False):
            begin, stop = begin >> 1, (stop + 1) >> 1
            pairs = lower[2 * begin : 2 * stop]
            np.add(pairs[::2], pairs[1::2], out=upper[begin:stop])

    def draw(self, count: int, generator: np.random.Generator) -> Ints:
        """Places i64[count], drawn with replacement in proportion to the values, which are not all 0."""
        top = np.cumsum(self._levels[-1])
        rest = generator.random(count) * top[-1]
        places: Ints = np.searchsorted(top, rest, side="right")
        np.minimum(places, len(top) - 1, out=places)
        rest -= top[places] - self._levels[-1][places]
        for level in reversed(self._levels[:-1]):
            places += places
            left = level.take(places)
            goes_right = rest >= left
            left *= goes_right
            rest -= left
            places += goes_right
        is_missed = self._levels[0].take(places) <= 0  # by rounding, at the edge of a sum
        if is_missed.any():
            places[is_missed] = self.draw(int(is_missed.sum()), generator)
        return places
