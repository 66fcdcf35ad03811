"""Waiting: pauses before another attempt, limits, and times of log lines about something awaited."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import inf
from time import monotonic
from typing import Any

_LONGEST_SILENCE_S = 300.0
_MOST_DOUBLINGS = 16  # 2 ** failures must stay a float


@dataclass(frozen=True, slots=True)
class WaitTimes:
    """Times, in seconds, after which something is attempted again, said, or given up.

    first_pause_s     before the attempt after one failure
    first_word_s      until a log line says what is awaited
    worker_pause_s    between two attempts to start a lane's environments, at most
    host_pause_s      between two attempts of a host to reach its gateway, at most
    reach_s           that a connection may take to come about
    redial_s          until a host that has not dialled again is away: a live one does so at once, and after 0.1 s
    look_s            between two looks at whether dialling is given up
    close_s           that a thread or worker process has to end, before it is left behind or killed
    clock             by which waits are timed, and lanes late
    """

    first_pause_s: float = 0.1
    first_word_s: float = 5.0
    worker_pause_s: float = 30.0
    host_pause_s: float = 5.0
    reach_s: float = 10.0
    redial_s: float = 1.0
    look_s: float = 1.0
    close_s: float = 5.0
    clock: Callable[[], float] = monotonic


times = WaitTimes()  # of all waits in this process


@contextmanager
def waiting(**other: Any) -> Iterator[None]:
    """Block in which the waits of this process take some other `WaitTimes`."""
    global times
    before = times
    times = replace(times, **other)
    try:
        yield
    finally:
        times = before


def pause_s(failures: int, longest_s: float) -> float:
    """Seconds to wait after so many failures in a row: twice as long each time, up to `longest_s`."""
    return min(times.first_pause_s * 2.0 ** min(failures - 1, _MOST_DOUBLINGS), longest_s)


class WaitReminder:
    """Wait for something, from now on, with log lines at intervals that double.

    limit    seconds; None: for ever
    """

    def __init__(self, limit: float | None = None) -> None:
        self.limit = limit
        self._began = self._since = times.clock()
        self._interval_s = times.first_word_s
        self._due = self._began + self._interval_s

    def restart(self) -> None:
        """Begin the limit anew."""
        self._since = times.clock()

    def shorten(self, limit: float) -> None:
        """Have the limit be reached within so many seconds, if it would not."""
        self.limit = times.clock() - self._since + min(self.left_s, limit)

    @property
    def is_long(self) -> bool:
        """True if a log line is to be written now; the next one is due after twice as long."""
        if (now := times.clock()) < self._due:
            return False
        self._interval_s = min(2 * self._interval_s, _LONGEST_SILENCE_S)
        self._due = now + self._interval_s
        return True

    @property
    def waited_s(self) -> float:
        """Seconds since the wait began first."""
        return times.clock() - self._began

    @property
    def left_s(self) -> float:
        """Seconds until the limit is reached."""
        return inf if self.limit is None else max(0.0, self._since + self.limit - times.clock())

    @property
    def is_over(self) -> bool:
        """True once the limit is reached."""
        return not self.left_s

    @property
    def left(self) -> float:
        """Seconds until it is over, or a line is due."""
        return max(0.01, min(self.left_s, self._due - times.clock()))
