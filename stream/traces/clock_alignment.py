"""ClockAlignment: how far the clock of another process is from the one here, by round trips between the two."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

_DRIFT = 1e-5  # by which two clocks may go apart: 10 microseconds in a second


class RoundTrip(NamedTuple):
    """Times of a question and its answer, in ns: two on the clock here, and between them two on the clock there.

    asked    when the question was sent, here
    came     when it came, there
    sent     when the answer was sent, there
    heard    when the answer came, here
    """

    asked: int
    came: int
    sent: int
    heard: int

    @property
    def offset_ns(self) -> int:
        """What is to be added to a time there to have it here, if both ways took equally long."""
        return ((self.asked - self.came) + (self.heard - self.sent)) // 2

    @property
    def uncertainty_ns(self) -> int:
        """By how much that may be wrong: half of the time that both ways took together."""
        return max(0, (self.heard - self.asked) - (self.sent - self.came) + 1) // 2


class ClockAlignment:
    """Alignment of a clock elsewhere with the one here, by the shortest round trip.

    An answer comes between its question and its arrival, so a round trip tells the offset to within half of its time.
    Clocks drift apart: a round trip counts for less with every second since it was made, and a longer one takes its
    place in the end.

    offset_ns    what is to be added to a time there to have it here
    """

    def __init__(self) -> None:
        self._best: RoundTrip | None = None

    @property
    def is_known(self) -> bool:
        """True once there was a round trip."""
        return self._best is not None

    @property
    def offset_ns(self) -> int:
        """What is to be added to a time there; only once `is_known`."""
        assert self._best is not None
        return self._best.offset_ns

    def take(self, trip: RoundTrip) -> None:
        """Take a round trip, which counts from now on if no other one is better by now."""
        if self._best is None or trip.uncertainty_ns <= self.uncertainty_ns(trip.heard):
            self._best = trip

    def uncertainty_ns(self, now: int) -> int:
        """By how much a time may be wrong that was aligned now, a time on the clock here."""
        assert self._best is not None
        return self._best.uncertainty_ns + int(max(0, now - self._best.heard) * _DRIFT)

    def here(self, times: NDArray[np.int64]) -> NDArray[np.int64]:
        """Times there, i64[n], as times here, i64[n]."""
        return times + self.offset_ns
