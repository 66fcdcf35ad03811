"""What is known of a lane on another host."""

from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from rollflow.nodes.remote.remote_host import RemoteHost


class State(Enum):
    """What a lane's host is at."""

    RESETTING = auto()
    STEPPING = auto()
    READY = auto()  # nothing: the lane is somewhere else in the ring
    LATE = auto()  # still at what nobody waits for any more
    LOST = auto()  # to begin anew at `due`
    GONE = auto()


@dataclass(slots=True)
class Record:
    """One lane.

    lane         what goes round for it
    is_waited    whether it has been handed over and not come back
    has_left     whether it has set out on its last round
    """

    lane: Any
    host: RemoteHost
    num_slots: int
    first_slot: int
    state: State = State.READY
    is_waited: bool = False
    has_left: bool = False
    starts: int = 0
    failures: int = 0  # in a row
    reason: str = ""  # of the last one
    due: float = 0.0
    steps: int = 0  # since the last one

    @property
    def slots(self) -> str:
        """Its slots, in words."""
        last = self.first_slot + self.num_slots - 1
        return f"slot {last}" if self.num_slots == 1 else f"slots {self.first_slot} to {last}"
