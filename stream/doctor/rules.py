"""Rules of the stall doctor: when a wait is a stall, and how long every kind of call may take."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from time import monotonic
from typing import Literal, Protocol

from rollflow.stream.doctor.waits import Wait

OnStall = Literal["log", "raise"]
AGAIN_S = (60.0, 300.0, 1800.0)  # of standing still, when a message is repeated; then every last of these
_LOOK_S = 0.5
_LATE_S = 1.0  # that a look may come late before all waits begin anew
_CALLS = 10  # that a call's own times count from
_TIMES = 10.0  # a stall takes so many times what all but one in a hundred calls take
_FIRST_S = 30.0  # that a first call has: a reset, a step or a pass may have to load or to build something
_COMPILE_S = 300.0  # that each of the first calls has that may compile
_SINK_S = 30.0
_KEPT = 256  # long calls of a party


class Clock(Protocol):
    """Source of time."""

    def now(self) -> float:
        """Seconds since some moment."""
        ...


class SystemClock:
    """The clock of this machine, which stands still while the machine is suspended."""

    def now(self) -> float:
        """Seconds since some moment."""
        return monotonic()


@dataclass(frozen=True, slots=True)
class StallRules:
    """When and how the doctor speaks.

        after       seconds for which nothing leaves the graph; None: the doctor is off
        on_stall    "log", or "raise": the run ends with a StallError
        clock       source of time

    Raises ValueError for a number of seconds that is not above 0, and another word.
    """

    after: float | None = 5.0
    on_stall: OnStall = "log"
    clock: Clock = field(default_factory=SystemClock)

    def __post_init__(self) -> None:
        after = self.after
        if after is not None and (isinstance(after, bool) or not isinstance(after, int | float) or not after > 0):
            raise ValueError(f"stall_after is {after!r}, expected a number of seconds above 0, or None")
        if self.on_stall not in ("log", "raise"):
            raise ValueError(f"on_stall is {self.on_stall!r}, expected 'log' or 'raise'")
        if self.on_stall == "raise" and after is None:
            raise ValueError("on_stall is 'raise' and stall_after is None: expected a number of seconds")

    @property
    def look_s(self) -> float:
        """Seconds between two looks."""
        return _LOOK_S if self.after is None else min(_LOOK_S, self.after / 10)

    def is_late(self, elapsed_s: float) -> bool:
        """True if a look comes so late that the machine, or this process, must have stood still itself."""
        return elapsed_s > self.look_s + _LATE_S


class CallTimes:
    """Long calls of the parties, as seen by looks: a call that lasts less than a look is short, and not seen.

    That is enough: a short call's time never raises a limit above `after`.
    """

    def __init__(self) -> None:
        self._longest: dict[tuple[str, str], list[float]] = {}

    def add(self, wait: Wait, seconds: float) -> None:
        """Note that a call has ended which was seen to last so many seconds."""
        seen = self._longest.setdefault((wait.party, wait.doing), [])
        seen.append(seconds)
        if len(seen) > _KEPT:
            seen.remove(min(seen))

    def p99(self, wait: Wait) -> float:
        """Seconds that all but one in a hundred calls like this one took; 0: less than a look. Of resets the longest.

        Resets are rare among the steps that they are counted with.
        """
        seen = sorted(self._longest.get((wait.party, wait.doing), ()), reverse=True)
        left_out = 0 if wait.limit == "reset" else max(wait.calls, len(seen)) // 100
        return seen[left_out] if left_out < len(seen) else 0.0

    def limit(self, wait: Wait, after: float) -> float:
        """Seconds that this party may take before it is what stalls the run."""
        if wait.kind == "lost":
            return max(after, _FIRST_S)
        if wait.kind != "call":
            return after
        usual = max(after, _TIMES * self.p99(wait))
        if wait.limit == "sink":
            return max(usual, _SINK_S) if wait.calls >= _CALLS else inf
        if wait.limit == "compile" and wait.calls < _CALLS:
            return max(usual, _COMPILE_S)
        return usual if wait.calls else max(usual, _FIRST_S)


def median(seconds: Sequence[float]) -> float:
    """The middle one; 0 where there is none."""
    ordered = sorted(seconds)
    return ordered[len(ordered) // 2] if ordered else 0.0
