"""How long environments that can be looked at may take for a step or a reset before they are taken for hung."""

import math
from collections.abc import Callable
from time import monotonic

from rollflow.nodes.workers.deadlines import Deadlines
from rollflow.nodes.workers.phase import Doing

At = tuple[int, Doing]  # how often a lane has got on with something, and what it is at


class Watch:
    """Deadlines of lanes that somebody else works on, in threads or processes of this host.

    step_timeout     seconds that a vector step may take; None: for ever
    reset_timeout    seconds that a reset may take, the first one with the making of the environments and the start of a
                     process for them; None: for ever
    at               what a lane is at

    Every reset has its own time, also one within a step, and after it the step's time begins anew. Where resets can't
    be told from the step that they are in, it has both times together.

    A lane is looked at whenever the shorter of the two times has gone by, and what it is at then counts from its first
    look: so much later than its time is over it may be found late, but never earlier.
    """

    def __init__(self, step_timeout: float | None, reset_timeout: float | None, at: Callable[[int], At]) -> None:
        times = step_timeout, reset_timeout
        given = [seconds for seconds in times if seconds is not None]
        both = sum(given) if len(given) == len(times) else None
        self._seconds = {Doing.STEP: step_timeout, Doing.RESET: reset_timeout, Doing.BOTH: both}
        self._pauses = {doing: _pause(seconds, min(given, default=None)) for doing, seconds in self._seconds.items()}
        self._at = at
        self._looks = Deadlines()
        self._seen: dict[int, At] = {}
        self._until: dict[int, float] = {}

    def begin(self, lane: int) -> None:
        """The lane's environments are at something new."""
        seen = self._seen[lane] = self._at(lane)
        pause, seconds = self._pauses[seen[1]], self._seconds[seen[1]]
        if pause is None:
            self._looks.end(lane)
            return
        self._looks.begin(lane, pause)
        self._until[lane] = math.inf if seconds is None else monotonic() + seconds

    def end(self, lane: int) -> None:
        """They have answered, or are not waited for any more."""
        self._looks.end(lane)

    @property
    def left(self) -> float | None:
        """Seconds until a lane is to be looked at; None where there is none."""
        return self._looks.left

    def overdue(self) -> dict[int, str]:
        """The lanes whose time is over, with what they were late with; those that are due are looked at."""
        late: dict[int, str] = {}
        for lane in self._looks.due():
            seen = self._at(lane)
            if seen != self._seen[lane]:
                self.begin(lane)
            elif monotonic() < self._until[lane] - 1e-6:  # a sum of pauses may be that much shorter
                pause = self._pauses[seen[1]]
                assert pause is not None
                self._looks.begin(lane, pause)
            else:
                late[lane] = f"no answer to a {self._told(seen[1])}"
        return late

    def _told(self, doing: Doing) -> str:
        seconds = self._seconds[doing]
        if doing is Doing.BOTH:
            return f"step within {seconds} s, step_timeout and reset_timeout together: it may have reset as well"
        return f"{'reset' if doing is Doing.RESET else 'step'} within {seconds} s"


def _pause(seconds: float | None, shortest: float | None) -> float | None:
    """How long after a look the next one is due: a part of what there is to wait, so that the last is in time."""
    if seconds is None or not shortest:
        return shortest
    return seconds / math.ceil(seconds / shortest)
