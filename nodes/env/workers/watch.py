"""Activity of lanes that somebody else works on, and their deadlines: how long a step or a reset may take."""

import math
from collections.abc import Callable
from enum import Enum, auto
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollflow.stream.net import backoff
from rollflow.stream.observe.waits import Wait

COUNTER_BYTES = 192  # of a lane: four counters of an `ActivityFlag`, and then those of a whole rollout


class Activity(Enum):
    """Kinds of work that take time."""

    STEP = auto()
    RESET = auto()
    BOTH = auto()  # a step, and resets within it that nobody can tell from it


class ActivityFlag:
    """Says whether a lane's environments are being reset; told by whoever steps them, also from another process.

    memory    i64[4], or longer, all 0 at first: how often a reset within a step has begun or ended; whether none can be
              told from the step; the thread that steps; of lanes that take turns in a thread, whether it is this one's
              turn. None: memory of this process alone
    """

    def __init__(self, memory: NDArray[np.int64] | None = None) -> None:
        self.memory: NDArray[Any] = np.zeros(4, np.int64) if memory is None else memory

    def turn(self) -> None:
        """A reset within a step begins, or has ended."""
        self.memory[0] += 1

    def set_blended(self, is_blended: bool) -> None:
        """Say whether these environments reset if nobody can tell it from their step."""
        self.memory[1] = is_blended

    def set_thread(self, native_id: int) -> None:
        """Say which thread of its process steps them."""
        self.memory[2] = native_id

    def set_at_work(self, is_at_work: bool) -> None:
        """Say whether a thread that serves several lanes is at this one."""
        self.memory[3] = is_at_work

    @property
    def is_at_work(self) -> bool:
        """True while a thread that serves several lanes is at this one."""
        return bool(self.memory[3])

    @property
    def thread(self) -> int:
        """The native id of the thread that steps them; 0: it has not said so yet."""
        return int(self.memory[2])

    @property
    def turns(self) -> int:
        """Count of resets that have begun, and of those that have ended."""
        return int(self.memory[0])

    @property
    def doing(self) -> Activity:
        """Activity of the environments, while they are stepped."""
        if self.memory[0] % 2:
            return Activity.RESET
        return Activity.BOTH if self.memory[1] else Activity.STEP


_DOING = {Activity.STEP: "is in step()", Activity.RESET: "is in reset()", Activity.BOTH: "is in step() or reset()"}
ProgressMark = tuple[int, Activity]  # how often a lane has got on with something, and its activity


def call_under_way(lane: Any, progress: ProgressMark, **more: Any) -> Wait:
    """The wait for the call that a lane is at, with what else is known of it.

    Its `calls` are vector steps, resets without the first one, or, of a whole rollout, the count of its progress.
    """
    turns, activity = progress
    steps = getattr(lane, "vector_steps", 0)
    calls = turns // 2 if activity is Activity.RESET else steps if isinstance(steps, int) else turns
    limit = None if activity is Activity.STEP else "reset"
    given = {"party": "", "doing": _DOING[activity], "mark": turns, "calls": calls, "limit": limit}
    return Wait(kind="call", **given | more)  # type: ignore[arg-type]


_LOOKS = 8  # at a lane, within the shorter of its two times


class ProgressWatch:
    """Deadlines of lanes that somebody else works on: in threads, in worker processes, on other hosts.

    step_timeout     seconds that a vector step may take; None: for ever
    reset_timeout    seconds that a reset may take, the first one with the making of the environments and the start of a
                     process for them; None: for ever
    at               gives a lane's progress: a count, and its activity
    suffix           what a step's time includes, added to the text of a late step

    Every reset has its own time, also one within a step, and after it the step's time begins anew. If resets can't
    be told from the step that they are in, it has both times together.

    Lanes are looked at eight times within the shorter of the two times, and their activity then counts from its first
    look. So a lane may be found late by an eighth of that time too late, but never too early.
    """

    def __init__(
        self,
        step_timeout: float | None,
        reset_timeout: float | None,
        at: Callable[[int], ProgressMark],
        *,
        suffix: str = "",
    ) -> None:
        times = step_timeout, reset_timeout
        limits = [seconds for seconds in times if seconds is not None]
        both = sum(limits) if len(limits) == len(times) else None
        self._seconds = {Activity.STEP: step_timeout, Activity.RESET: reset_timeout, Activity.BOTH: both}
        self._pause = min(limits) / _LOOKS if limits else None  # seconds between two looks; None: there are none
        self._at, self._suffix = at, suffix
        self._seen: dict[int, ProgressMark] = {}
        self.began: dict[int, float] = {}  # lane -> when it began what it is at, on the clock of `WaitTimes`
        self._until: dict[int, float] = {}  # the same of when it is late, for lanes that are waited for
        self._next_look = math.inf  # at all lanes

    def begin(self, lane: int) -> None:
        """The lane's environments are at something new."""
        seen = self._seen[lane] = self._at(lane)
        now = self.began[lane] = backoff.times.clock()
        if self._pause is not None:
            seconds = self._seconds[seen[1]]
            self._until[lane] = math.inf if seconds is None else now + seconds
            self._next_look = min(self._next_look, now + self._pause)

    def end(self, lane: int) -> None:
        """They have answered, or are not waited for any more."""
        self._until.pop(lane, None)

    @property
    def left(self) -> float | None:
        """Seconds until the lanes are to be looked at; None if there are none."""
        return max(0.0, self._next_look - backoff.times.clock()) if self._until else None

    @property
    def is_due(self) -> bool:
        """True if `overdue` is to look at the lanes."""
        return backoff.times.clock() >= self._next_look

    def overdue(self) -> dict[int, str]:
        """The lanes whose time is over, with what they were late with; they are looked at, if that is due."""
        late: dict[int, str] = {}
        now = backoff.times.clock()
        if now < self._next_look or self._pause is None:
            return late
        for lane, until in list(self._until.items()):
            seen = self._at(lane)
            if seen != self._seen[lane]:
                self.begin(lane)
            elif now >= until:
                late[lane] = f"no answer to a {self._text_of(seen[1])}"
        self._next_look = min([now + self._pause, *self._until.values()])
        return late

    def _text_of(self, activity: Activity) -> str:
        seconds = self._seconds[activity]
        if activity is Activity.BOTH:
            return f"step within {seconds} s, its timeouts of step and reset together: it may have reset as well"
        return f"reset within {seconds} s" if activity is Activity.RESET else f"step within {seconds} s{self._suffix}"
