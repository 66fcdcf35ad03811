"""Lane supervisor: which lanes are in flight, late, lost, to begin anew or set aside. It does no I/O.

The nodes do the talking: see `LanesElsewhere`.
"""

import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, NamedTuple

from rollflow.nodes.env.workers.watch import ProgressMark, ProgressWatch
from rollflow.stream.data.errors import EnvError, RollflowError
from rollflow.stream.net import backoff
from rollflow.stream.net.backoff import pause_s
from rollflow.stream.observe.waits import LastError

MAX_FAILURES = 5  # losses in a row that a lane may have; with one more it is set aside


class LanePhase(Enum):
    """State of a lane's environments, which are elsewhere."""

    MAKING = auto()
    MADE = auto()
    RESETTING = auto()
    READY = auto()  # idle: the lane is somewhere else in the ring
    STEPPING = auto()
    LATE = auto()  # its time is over, and its answer is still waited for
    LOST = auto()  # to begin anew at `due`
    ASIDE = auto()  # for good; answers are not heard any more


class RaisedError(NamedTuple):
    """Error that the environments of a lane raised elsewhere, in words.

    where         place that they raised in, such as "in a worker process"
    is_refusal    whether it is one of rollflow's own
    """

    type: str
    text: str
    notes: Sequence[str]
    traceback: str
    where: str = "in a worker process"
    is_refusal: bool = False

    @classmethod
    def of(cls, error: Exception) -> "RaisedError":
        """An error of this worker process."""
        notes, told = list(getattr(error, "__notes__", [])), "".join(traceback.format_exception(error))
        return cls(type(error).__name__, str(error), notes, told, is_refusal=isinstance(error, RollflowError))

    @property
    def line(self) -> str:
        """Its type and text."""
        return f"{self.type}: {self.text}"

    @classmethod
    def in_fields(cls, fields: Mapping[str, Any]) -> "RaisedError":
        """The error that a worker's answer tells of."""
        return cls(*(fields[name] for name in cls._fields))

    def add_notes_to(self, error: Exception, lane: int) -> None:
        """Add the notes and the traceback to an error that is raised here."""
        for note in [*self.notes, f"lane {lane}, {self.where}:\n{self.traceback}"]:
            error.add_note(note)


@dataclass(slots=True, eq=False)
class LaneStatus:
    """One lane whose environments are elsewhere, and its state.

    lane           what goes round: set before the first reset
    is_waited      True while the lane is in flight: it has been handed over and has not come back
    starts         resets of its environments so far
    failures       losses in a row
    whole_steps    vector steps since the last loss
    reason         cause of the last loss
    noted_at       time at which that was noted
    due            time when it begins anew, where it is LOST
    raised         last error of its environments; None: they have never raised
    has_stepped    True once its environments have made a step
    """

    index: int
    phase: LanePhase
    lane: Any = None
    is_waited: bool = False
    starts: int = 0
    failures: int = 0
    whole_steps: int = 0
    reason: str = ""
    noted_at: float = 0.0
    due: float = 0.0
    raised: RaisedError | None = None
    has_stepped: bool = False

    @property
    def is_at_work(self) -> bool:
        """True if it makes steps, or should: its environments are there, and it is neither late nor lost."""
        return self.phase in (LanePhase.READY, LanePhase.STEPPING)

    @property
    def has_no_step(self) -> bool:
        """True where it makes no step that is to be waited for, as the rollout is ending."""
        return False

    def lose(self, reason: str) -> int:
        """End what is open in it, as it is lost: how many transitions are lost."""
        return int(self.lane.lose(reason)) if self.phase is LanePhase.STEPPING else 0

    def lose_idle(self) -> int:
        """The same where it was lost while it was somewhere else in the ring."""
        return int(self.lane.lose(self.reason, is_under_way=False))

    def note(self, reason: str) -> None:
        """Note the cause of a loss, or why the lane is late."""
        self.reason, self.noted_at = reason, backoff.times.clock()

    def made_step(self, fragment_length: int) -> None:
        """Count a vector step: after a fragment of them, losses are forgotten."""
        self.has_stepped = True
        self.whole_steps += 1
        if self.whole_steps >= fragment_length:
            self.failures = 0


class LaneSupervisor:
    """State machine of all lanes of a node that steps them elsewhere.

        progress                       gives the count by which a lane shows that it gets on, and its activity
        step_timeout, reset_timeout    seconds until a lane is late; None: never. See `ProgressWatch`
        suffix                         what a step's time includes, in the texts of late lanes

        remotes        lanes, by number
        deadlines      of the lanes that are waited for
        in_flight      lanes that are waited for, and whatever else is
        lost_steps     transitions that were under way when their lanes were lost
        set_aside_texts    of every lane that was lost too many times in a row: a sentence that says so, and why
        is_draining    True once no more steps are asked for: then no lane begins anew

    Each loss in a row doubles the pause before the lane begins anew; vector steps of a whole fragment forgive them.
    """

    in_flight = lost_steps = 0
    is_draining = False

    def __init__(
        self,
        progress: Callable[[int], ProgressMark],
        *,
        step_timeout: float | None = 60.0,
        reset_timeout: float | None = 120.0,
        suffix: str = "",
    ) -> None:
        self.remotes: list[Any] = []
        self.set_aside_texts: list[str] = []
        self.reset_timeout = reset_timeout
        self._lost: dict[int, LaneStatus] = {}  # those that are LOST
        self.deadlines = ProgressWatch(step_timeout, reset_timeout, progress, suffix=suffix)

    @property
    def report_notes(self) -> Sequence[str]:
        """Sentences about lanes that were set aside, and why. From any thread."""
        return tuple(self.set_aside_texts)

    @property
    def last_error(self) -> LastError | None:
        """Why a lane was lost, or late, last; None: none ever was. From any thread."""
        lane = max(self.remotes[:], key=lambda each: each.noted_at, default=None)
        if lane is None or not lane.reason:
            return None
        return LastError(f"lane {lane.index}: {lane.reason}", backoff.times.clock() - lane.noted_at)

    # Lanes that come and go

    def wait_for(self, status: LaneStatus) -> None:
        """Put a lane in flight: it has been handed over."""
        assert not status.is_waited
        self.in_flight += 1
        status.is_waited = True

    def begin(self, status: LaneStatus, phase: LanePhase) -> None:
        """Have a lane's environments be at something new, and have its time begin."""
        if status.phase is LanePhase.LOST:
            del self._lost[status.index]
        status.phase = phase
        self.watch(status)

    def watch(self, status: LaneStatus) -> None:
        """Have a lane's time begin, or begin again, where the lane is waited for and not lost."""
        if status.is_waited and status.phase is not LanePhase.LOST:
            self.deadlines.begin(status.index)

    def come_back(self, status: LaneStatus) -> Any:
        """Take a lane out of flight: what goes on in the ring."""
        assert status.is_waited
        self.in_flight -= 1
        status.is_waited = False
        self.deadlines.end(status.index)
        return status.lane

    def give_back(self, status: LaneStatus) -> None:
        """Take a lane out of flight for good: it goes on in the ring once more, and never begins anew."""
        self.set_aside(status)
        if status.is_waited:
            self.come_back(status)

    # Losses

    def fail(self, status: LaneStatus) -> None:
        """Count a loss: the lane is to begin anew after a pause, or, after too many in a row, never."""
        status.failures += 1
        status.whole_steps = 0
        self.deadlines.end(status.index)
        if status.failures > MAX_FAILURES:
            self.set_aside(status)
            text = f"lane {status.index} is set aside, lost {status.failures} times in a row: {status.reason}"
            self.set_aside_texts.append(text)
            return
        status.phase = LanePhase.LOST
        status.due = backoff.times.clock() + pause_s(status.failures, backoff.times.worker_pause_s)
        self._lost[status.index] = status

    def set_aside(self, status: LaneStatus) -> None:
        """Have a lane never begin anew."""
        self._lost.pop(status.index, None)
        self.deadlines.end(status.index)
        status.phase = LanePhase.ASIDE

    # Time

    @property
    def patience(self) -> float | None:
        """Seconds until a lane is to be looked at or begins anew; None where there is none."""
        left = self.deadlines.left
        if self._lost and not self.is_draining:
            begins = max(0.0, min(status.due for status in self._lost.values()) - backoff.times.clock())
            left = begins if left is None else min(left, begins)
        return left

    def due(self) -> Iterator[LaneStatus]:
        """Lost lanes whose pause is over; none while the rollout is drained. To begin one may begin others with it."""
        if not self._lost or self.is_draining:
            return
        now = backoff.times.clock()
        for status in list(self._lost.values()):
            if status.phase is LanePhase.LOST and status.due <= now:
                yield status

    # Errors that end the run

    def check_first_errors(self) -> None:
        """Raise EnvError where the environments of every lane have raised before they made a step: no accident.

        Lanes that were set aside without a loss of their own, as those of hosts that left, don't count.
        """
        lanes = [each for each in self.remotes if each.failures or each.raised or each.phase is not LanePhase.ASIDE]
        raised = [(each.index, each.raised) for each in lanes if each.raised is not None and not each.has_stepped]
        if self.is_draining or len(raised) < len(lanes) or any(each.has_stepped for each in self.remotes):
            return
        reasons = "; ".join(f"lane {index}: {first.type}: {first.text}" for index, first in raised)
        error = EnvError(f"the environments of every lane raised before they had made a step: {reasons}")
        raised[0][1].add_notes_to(error, raised[0][0])
        raise error

    def check_any_left(self) -> None:
        """Raise EnvError where every lane has been set aside."""
        if self.is_draining or not all(each.phase is LanePhase.ASIDE for each in self.remotes):
            return
        reasons = "; ".join(f"lane {each.index}: {each.reason}" for each in self.remotes)
        times = MAX_FAILURES + 1
        raise EnvError(f"every lane was lost {times} times in a row, the last time by: {reasons}").see("worker")
