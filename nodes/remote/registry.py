"""The hosts that a gateway has taken in, the numbers of their lanes, and what has become of them."""

import logging
from collections import deque

from rollflow.nodes.remote.remote_host import Joined, Left, News, RemoteHost
from rollflow.stream.errors import WireError
from rollflow.stream.wire import GatewaySession, Hello
from rollflow.stream.wire.field import shown
from rollflow.stream.wire.spaces import read_space

logger = logging.getLogger(__name__)

_WANTED = {
    "env": "RemoteEnvs, for EnvHost or rollflow env-host with environments of one agent",
    "agents": "RemoteEnvs of a MultiAgentRollout, for EnvHost or rollflow env-host with environments of several agents",
    "rollout": "RemoteRollouts, for RolloutHost or rollflow rollout-host",
}


class Registry:
    """Takes down which hosts there are.

        role         of the hosts
        max_hosts    more are refused

        hosts        those that are there, or may come back, by the token of their session
        news         what has happened, oldest first

    Every host's lanes get numbers that were never used before; their spaces must be those of the first host.
    """

    def __init__(self, role: str, max_hosts: int) -> None:
        self.hosts: dict[bytes, RemoteHost] = {}
        self.news: deque[News] = deque()
        self._role, self._max_hosts = role, max_hosts
        self._first: Hello | None = None
        self._next_lane = self._next_slot = 0
        self._host_of: dict[int, RemoteHost] = {}

    def host_of(self, lane: int) -> RemoteHost:
        """The host that a lane is, or was, on."""
        return self._host_of[lane]

    def session_for(self, hello: Hello) -> GatewaySession:
        """A session for a new host, which is to `join` if it gets so far. Raises WireError where it can't be taken."""
        self._check(hello)
        lanes = range(self._next_lane, self._next_lane + len(hello.slots))
        return GatewaySession(hello.session, hello, lanes, hello.first_slots(self._next_slot))

    def join(self, host: RemoteHost) -> None:
        """Take down a new host, with the session that it was given last."""
        session = host.session
        self._next_lane += len(session.lanes)
        self._next_slot += session.hello.num_envs
        self._first = self._first or session.hello
        self.hosts[session.token] = host
        self._host_of.update(dict.fromkeys(session.lanes, host))
        self.news.append(Joined(host))
        logger.info("host %s has joined with %d environments", host.name, session.hello.num_envs)

    def leave(self, host: RemoteHost, reason: str) -> None:
        """Take down that a host has gone for good; it may have before."""
        if self.hosts.pop(host.session.token, None) is not None:
            logger.warning("host %s has left: %s", host.name, reason)
            self.news.append(Left(host, reason))

    def leave_overdue(self, now: float, grace_s: float) -> None:
        """Have those leave that have been lost for too long."""
        for host in list(self.hosts.values()):
            if host.lost_at is not None and now - host.lost_at >= grace_s:
                self.leave(host, f"{host.reason}, and not back within {grace_s:g} s")

    def _check(self, hello: Hello) -> None:
        if hello.role != self._role:
            raise WireError(
                f"hello.role is '{hello.role}', expected '{self._role}': here are {_WANTED[self._role]}", "role"
            )
        if hello.busy:
            raise WireError(f"host {hello.name!r} is busy with another gateway, expected it to be free", "busy")
        if len(self.hosts) >= self._max_hosts:
            raise WireError(f"{len(self.hosts)} hosts are here already, expected no more", "busy")
        first = self._first
        if first is None:
            return
        for name in ("observation_space", "action_space"):
            if getattr(hello, name) != getattr(first, name):
                mine, other = (read_space(getattr(each, name), name) for each in (hello, first))
                raise WireError(f"hello.{name} is {mine}, expected that of host {first.name!r}, {other}", "spaces")
        if (hello.agents, hello.parts) != (first.agents, first.parts):
            raise WireError(
                f"hello.agents is {shown(hello.agents)} in parts {shown(hello.parts)}, expected those of host "
                f"{first.name!r}, {shown(first.agents)} in {shown(first.parts)}",
                "spaces",
            )
