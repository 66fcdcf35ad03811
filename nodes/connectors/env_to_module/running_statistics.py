"""Count, mean and variance of rows that come by, which merge into those of all rows (Chan et al. 1983)."""

from collections.abc import Iterable, Mapping
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


class RunningStatistics:
    """Over rows of D numbers each, in f64.

    count    rows seen
    mean     f64[D]
    m2       f64[D]  sum of squared distances from the mean
    """

    __slots__ = ("count", "m2", "mean")

    def __init__(self, size: int) -> None:
        self.count = 0
        self.mean: Floats = np.zeros(size)
        self.m2: Floats = np.zeros(size)

    def push(self, rows: Floats) -> tuple[Floats, Floats]:
        """Take f64[N, D] row by row; mean and deviation as they stood after each of them, f64[N, D] both."""
        center = self.mean if self.count else rows[0]
        # Sums around a center close to the mean lose no digits to large offsets.
        away = rows - center
        counts = self.count + np.arange(1, len(rows) + 1)[:, None]
        sums = np.cumsum(away, axis=0)
        means = center + sums / counts
        m2s = np.maximum(self.m2 + np.cumsum(away * away, axis=0) - sums * sums / counts, 0.0)
        self.count += len(rows)
        self.mean, self.m2 = means[-1], m2s[-1]
        return means, _deviation(m2s, counts)

    @property
    def deviation(self) -> Floats:
        """f64[D]: the sample's standard deviation; 0 before the second row."""
        return _deviation(self.m2, np.array(self.count))

    @classmethod
    def merged(cls, several: Iterable["RunningStatistics"], size: int) -> Self:
        """Those of all rows that any of them has seen, in whatever order they come, to the last digits' rounding."""
        total = cls(size)
        # By content, so that the order they come in does not show even in the rounding.
        for each in sorted(several, key=lambda each: (each.count, each.mean.tobytes(), each.m2.tobytes())):
            if not each.count:
                continue
            count = total.count + each.count
            delta = each.mean - total.mean
            total.mean = total.mean + delta * (each.count / count)
            total.m2 = total.m2 + each.m2 + delta * delta * (total.count * each.count / count)
            total.count = count
        return total

    def get_state(self) -> dict[str, Any]:
        """Count, mean and m2, copied."""
        return {"count": self.count, "mean": self.mean.copy(), "m2": self.m2.copy()}

    @classmethod
    def from_state(cls, state: Mapping[str, Any], size: int) -> Self:
        """What `get_state` gave. Raises ValueError for statistics over another number of numbers."""
        made = cls(size)
        made.count = int(state["count"])
        made.mean, made.m2 = np.array(state["mean"], np.float64), np.array(state["m2"], np.float64)
        if made.mean.shape != (size,) or made.m2.shape != (size,):
            raise ValueError(f"mean of shape {list(made.mean.shape)}, expected [{size}]")
        return made


def _deviation(m2: Floats, counts: NDArray[Any]) -> Floats:
    deviation: Floats = np.sqrt(m2 / np.maximum(counts - 1, 1))
    return deviation
