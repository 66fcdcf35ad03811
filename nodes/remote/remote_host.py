"""Hosts that a gateway has taken in, and what is told of them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rollflow.nodes.remote.dialler import Dialled
from rollflow.nodes.workers.lane_link import Elsewhere
from rollflow.stream.wire import Answer, GatewayConnection, GatewaySession


class RemoteHost:
    """A host that has been taken in.

    name          as it calls itself, and where it is
    session       what outlives its connections
    connection    the newest
    dialled       the address that it was reached at; None: it dialled itself
    lost_at       since when it has none; None: it has one
    reason        why it was lost
    """

    def __init__(
        self, name: str, session: GatewaySession, connection: GatewayConnection, dialled: Dialled | None = None
    ) -> None:
        self.name = name
        self.session = session
        self.connection = connection
        self.dialled = dialled
        self.lost_at: float | None = None
        self.reason = ""


@dataclass(frozen=True, slots=True)
class Joined:
    """A host has come, with new lanes."""

    host: RemoteHost


@dataclass(frozen=True, slots=True)
class Answered:
    """A host has answered."""

    answer: Answer


@dataclass(frozen=True, slots=True)
class Back:
    """A host that had lost its connection has another one."""

    host: RemoteHost


@dataclass(frozen=True, slots=True)
class Left:
    """A host has gone for good, its lanes with it."""

    host: RemoteHost
    reason: str


@dataclass(frozen=True, slots=True)
class Told:
    """A host has said how far it is; it may do so again once it is given a credit."""

    host: RemoteHost
    metrics: Mapping[str, Any]


News = Told | Joined | Answered | Back | Left


def vectors_on(host: RemoteHost) -> list[Any]:
    """What is known here of a host's environments of one agent, lane by lane."""
    hello = host.session.hello
    told = {
        "observation_space": hello.observation_space,
        "action_space": hello.action_space,
        "autoreset_mode": hello.autoreset,
    }
    return [Elsewhere({**told, "num_envs": slots}) for slots in hello.slots]
