"""Hosts that a gateway has taken in, their lanes, events of theirs, and the wait for hosts."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rollflow.nodes.env.workers.env_link import RemoteVectorEnv
from rollflow.nodes.env.workers.lane_supervisor import LaneStatus
from rollflow.stream.net.backoff import Reminder, WaitReminder
from rollflow.stream.net.dialler import Dialled
from rollflow.stream.wire import Answer, GatewayConnection, GatewaySession

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


@dataclass(slots=True, eq=False)
class RemoteLane:
    """One lane on a host.

    status      as its supervisor has it
    lane        as it goes round
    has_left    whether it has set out on its last round
    is_absent   whether the reader's rounds go on without it, since its host is away
    """

    status: LaneStatus
    lane: Any
    host: RemoteHost
    num_slots: int
    first_slot: int
    has_left: bool = False
    is_absent: bool = False

    @property
    def slots(self) -> str:
        """Its slots, in words."""
        last = self.first_slot + self.num_slots - 1
        return f"slot {last}" if self.num_slots == 1 else f"slots {self.first_slot} to {last}"


class HostJoined(NamedTuple):
    """A host has come, with new lanes."""

    host: RemoteHost


class HostAnswered(NamedTuple):
    """A host has answered."""

    answer: Answer


class HostReconnected(NamedTuple):
    """A host that had lost its connection has another one."""

    host: RemoteHost


class HostAway(NamedTuple):
    """A host that has lost its connection did not dial again at once: its process, or its network, may be gone."""

    host: RemoteHost


class HostLeft(NamedTuple):
    """A host has gone for good, its lanes with it."""

    host: RemoteHost
    reason: str


class HostProgressed(NamedTuple):
    """A host has said how far it is; it may do so again once it is given a credit."""

    host: RemoteHost
    metrics: Mapping[str, Any]


HostEvent = HostProgressed | HostJoined | HostAnswered | HostReconnected | HostAway | HostLeft


def vectors_on(host: RemoteHost) -> list[Any]:
    """Stand-ins for a host's environments with one agent, lane by lane."""
    hello = host.session.hello
    names = ("observation_space", "action_space", "autoreset")
    description = {name: getattr(hello, name) for name in names}
    return [RemoteVectorEnv({**description, "num_envs": slots}) for slots in hello.slots]


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
