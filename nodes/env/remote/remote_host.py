"""Hosts that a gateway has taken in, their lanes, events of theirs, and the wait for hosts."""

import logging
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from rollflow.nodes.env.workers.lane_supervisor import LanePhase, LaneStatus
from rollflow.nodes.env.workers.stand_ins import stand_in_for
from rollflow.stream.net.backoff import Reminder, WaitReminder
from rollflow.stream.net.dialler import Dialled
from rollflow.stream.wire import GatewayConnection, GatewaySession

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class RemoteHost:
    """A host that has been taken in.

    name          as it calls itself, and where it is
    session       what outlives its connections
    connection    the newest
    joined_at     when it was taken in, on the clock `monotonic`
    dialled       the address that it was reached at; None: it dialled itself
    lost_at       since when it has none; None: it has one
    is_away       whether it has been lost for longer than a live host needs to dial again
    heard_at      when something last came from it, where it is lost
    reason        why it was lost
    reminder      when to log again that it is waited for
    has_place     whether it is one of the first, or has taken a lost host's place: it takes no other
    has_drained   whether it has left with nothing under way: it has made no step that it has not given
    """

    name: str
    session: GatewaySession
    connection: GatewayConnection
    joined_at: float
    dialled: Dialled | None = None
    lost_at: float | None = None
    is_away: bool = False
    heard_at: float = field(init=False)
    reason: str = ""
    reminder: Reminder = field(init=False)
    has_place: bool = False
    has_drained: bool = False

    def __post_init__(self) -> None:
        self.heard_at, self.reminder = self.joined_at, Reminder(self.joined_at)


@dataclass(slots=True, eq=False, kw_only=True)
class RemoteLane(LaneStatus):
    """One lane on a host.

    has_left    whether it has set out on its last round
    is_absent   whether the reader's rounds go on without it, since its host is away
    """

    host: RemoteHost
    num_slots: int
    first_slot: int
    has_left: bool = False
    is_absent: bool = False

    @property
    def has_no_step(self) -> bool:
        return self.phase is not LanePhase.STEPPING or self.host.lost_at is not None

    def lose(self, reason: str) -> int:
        is_stepping = self.phase is LanePhase.STEPPING
        return int(self.lane.lose(reason, is_under_way=not self.host.has_drained)) if is_stepping else 0

    @property
    def slots(self) -> str:
        """Its slots, in words."""
        last = self.first_slot + self.num_slots - 1
        return f"slot {last}" if self.num_slots == 1 else f"slots {self.first_slot} to {last}"


class HostEvent(NamedTuple):
    """Event of a host that a gateway has taken in.

    kind     "joined": it has come, with new lanes
             "answered": `what` is its answer
             "progressed": `what` is a dict of how far it is; it may say so again once it is given a credit
             "away": it has lost its connection and did not dial again at once: its process or network may be gone
             "reconnected": it had lost its connection, and has another one
             "left": it has gone for good, its lanes with it; `what` is the reason
    """

    kind: Literal["joined", "answered", "progressed", "away", "reconnected", "left"]
    host: RemoteHost
    what: Any = None


def environments_on(host: RemoteHost) -> list[Any]:
    """Stand-ins for a host's environments, lane by lane."""
    hello = host.session.hello  # which has been found to be right
    names = ("observation_space", "action_space", "autoreset", "agents", "parts")
    description = {name: getattr(hello, name) for name in names}
    return [stand_in_for({**description, "num_envs": slots}) for slots in hello.slots]


class HostWait(WaitReminder):
    """A wait for hosts, which begins now.

    has_warned    whether a line has said that hosts are awaited
    """

    has_warned = False

    def warn(self, state: str, where: str) -> None:
        """Log that hosts are awaited: how things stand, and where hosts are expected."""
        self.has_warned = True
        more = "for ever" if self.limit is None else f"for {max(0.0, self.limit - self.waited_s):.0f} s more"
        since = f" since {self.waited_s:.0f} s," if self.waited_s >= 1.0 else ""
        logger.warning("%s: hosts are awaited%s %s (join_timeout), %s", state, since, more, where)

    def remind(self, state: str, where: str) -> None:
        """Log that hosts are awaited, where a line is due."""
        if self.is_long:
            self.warn(state, where)
