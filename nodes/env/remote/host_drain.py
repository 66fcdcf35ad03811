"""Drain of a host: the time that it has to hand over what its lanes have made, and what the log says of it."""

import logging
from time import monotonic

from rollflow.nodes.env.remote.lane_work import LaneWork
from rollflow.stream.net.backoff import Reminder

logger = logging.getLogger(__name__)


class Drain:
    """Time, from now on, in which a host that is told to end hands over what it has.

    name       of the host
    work       of its lanes
    grace_s    seconds that it has
    """

    def __init__(self, name: str, work: LaneWork, grace_s: float) -> None:
        self._name, self._work = name, work
        self._began = monotonic()
        self._reminder = Reminder(self._began)
        self._has_begun = False
        self._until = self._began + grace_s

    def shorten(self, grace_s: float) -> None:
        """Have it end within so many seconds, if it would not."""
        self._until = min(self._until, monotonic() + grace_s)

    def until(self) -> float:
        """When it is over, on the clock `monotonic`."""
        return self._until

    @property
    def left_s(self) -> float:
        """Seconds that are left."""
        return max(0.0, self._until - monotonic())

    @property
    def due(self) -> float:
        """Time at which it is over, or the log is to say something."""
        now = monotonic()
        return min(self._until, now + self._reminder.left_s(now))

    def begin(self) -> bool:
        """Log that it begins; False: it has begun before."""
        if self._has_begun:
            return False
        self._has_begun = True
        logger.warning("host %s drains, for %.1f s at most: %s", self._name, self.left_s, self._state)
        return True

    def goes_on(self) -> bool:
        """True while there is time; the log says now and then how far the host is."""
        if self._reminder.is_due(monotonic()):
            logger.warning("host %s drains, for %.1f s more: %s", self._name, self.left_s, self._state)
        return self.left_s > 0

    def log_end(self) -> None:
        """Log how it has ended."""
        took_s = monotonic() - self._began
        logger.warning("host %s has drained for %.1f s: %s", self._name, took_s, self._state)

    @property
    def _state(self) -> str:
        busy, count = self._work.busy, len(self._work.lanes)
        done = f"{count - len(busy)} of {count} lanes are done"
        return f"{done}, still at something: {', '.join(map(str, busy))}" if busy else done
