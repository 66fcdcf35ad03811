"""One lane whose environments are elsewhere: its state, and the errors that they raise there."""

import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, NamedTuple

from rollflow.stream.data.errors import RollflowError
from rollflow.stream.net import backoff

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

    def add_notes_to(self, error: Exception, whose: str) -> None:
        """Add the notes and the traceback to an error that is raised here."""
        for note in [*self.notes, f"{whose}, {self.where}:\n{self.traceback}"]:
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
    due            time when it begins anew, if it is LOST
    raised         last error of its environments; None: they have never raised
    has_stepped    True once its environments have made a step, as far as answers say
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
    def name(self) -> str:
        """The lane or the slots, for texts."""
        return f"lane {self.index}"

    @property
    def is_at_work(self) -> bool:
        """True if it makes steps, or should: its environments are there, and it is neither late nor lost."""
        return self.phase in (LanePhase.READY, LanePhase.STEPPING)

    @property
    def has_made_steps(self) -> bool:
        """True once its environments have made a step."""
        return self.has_stepped

    @property
    def has_no_step(self) -> bool:
        """True if it makes no step that is to be waited for, as the rollout is ending."""
        return False

    def lose(self, reason: str) -> int:
        """End what is open in it, as it is lost: how many transitions are lost."""
        return int(self.lane.lose(reason)) if self.phase is LanePhase.STEPPING else 0

    def lose_idle(self) -> int:
        """The same if it was lost while it was somewhere else in the ring."""
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
