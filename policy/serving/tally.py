"""Counts of what a server does, as Prometheus reads them."""

import threading
from bisect import bisect_left

BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)


class Count:
    """A number that only grows."""

    def __init__(self) -> None:
        self.value = 0
        self._lock = threading.Lock()

    def add(self, number: int = 1) -> None:
        """Add to it, from any thread."""
        with self._lock:
            self.value += number


class Histogram:
    """Values by bucket, with their sum; written by one thread.

    bounds    upper bounds of the buckets, ascending; a value above all of them counts in the last, `+Inf`
    """

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.buckets = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, value: float) -> None:
        """Count a value."""
        self.buckets[bisect_left(self.bounds, value)] += 1
        self.total += value


class Tally:
    """What one version of a served policy has done."""

    def __init__(self) -> None:
        self.acted, self.failed, self.refused = Count(), Count(), Count()
        self.batch_sizes, self.batch_seconds = Histogram(BATCH_SIZES), Histogram(SECONDS)

    def note_batch(self, size: int, seconds: float) -> None:
        """Count a forward pass over `size` requests."""
        self.acted.add(size)
        self.batch_sizes.add(size)
        self.batch_seconds.add(seconds)
