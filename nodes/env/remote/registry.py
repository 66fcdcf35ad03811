"""Registry of the hosts that a gateway has taken in, and of the numbers of their lanes."""

import logging
from collections import deque

from rollflow.nodes.env.remote.remote_host import HostAway, HostEvent, HostJoined, HostLeft, HostReconnected, RemoteHost
from rollflow.stream.data.errors import WireError
from rollflow.stream.net.backoff import Reminder
from rollflow.stream.wire import GatewayConnection, GatewaySession, Hello
from rollflow.stream.wire.codec.field import shown
from rollflow.stream.wire.codec.spaces import read_space

logger = logging.getLogger(__name__)

REDIAL_S = 1.0  # a live host dials at once, and again after 0.1 s
OTHER_NAME_S = 5.0  # as long as a host pauses at most before it dials again
# Role of a host -> remote hosts of a rollout that take it, and what such a host is.
_WANTED = {
    "env": ("RemoteEnvs of a Rollout", "EnvHost or rollflow env-host with environments of one agent"),
    "agents": ("RemoteEnvs of a MultiAgentRollout", "EnvHost or rollflow env-host with environments of several agents"),
    "rollout": ("RemoteRollouts of a Rollout", "RolloutHost or rollflow rollout-host with environments of one agent"),
    "agent_rollout": (
        "RemoteRollouts of a MultiAgentRollout",
        "RolloutHost or rollflow rollout-host with environments of several agents",
    ),
}


class Registry:
    """Registry of hosts.

        role         of the hosts
        max_hosts    number of hosts beyond which more are refused

        hosts        hosts that are there, or may come back, by the token of their session
        news         what has happened, oldest first

    Every host's lanes get numbers that were never used before; their spaces must be those of the first host.
    """

    def __init__(self, role: str, max_hosts: int) -> None:
        self.hosts: dict[bytes, RemoteHost] = {}
        self.news: deque[HostEvent] = deque()
        self._role, self._max_hosts = role, max_hosts
        self._first: Hello | None = None
        self._next_lane = self._next_slot = 0
        self._host_of: dict[int, RemoteHost] = {}

    def host_of(self, lane: int) -> RemoteHost:
        """The host that a lane is, or was, on."""
        return self._host_of[lane]

    def session_for(self, hello: Hello) -> GatewaySession:
        """Session for a new host, for `join`. Raises WireError where the host can't be taken."""
        self._check(hello)
        lanes = range(self._next_lane, self._next_lane + len(hello.slots))
        return GatewaySession(hello.session, hello, lanes, hello.first_slots(self._next_slot))

    def join(self, host: RemoteHost) -> None:
        """Add a new host, with the session of the last `session_for`; it may take a lost host's place."""
        session = host.session
        self._next_lane += len(session.lanes)
        self._next_slot += session.hello.num_envs
        self._first = self._first or session.hello
        self.hosts[session.token] = host
        self._host_of.update(dict.fromkeys(session.lanes, host))
        self.news.append(HostJoined(host))
        logger.info("host %s has joined with %d environments", host.name, session.hello.num_envs)
        self._replace_lost(host.joined_at)

    def lose(self, host: RemoteHost, error: WireError, now: float, grace_s: float) -> None:
        """Note that a host has lost its connection and may come back."""
        host.lost_at, host.reason = now, str(error)
        host.heard_at = host.connection.heard_at  # the loss may have been noticed late
        host.reminder = Reminder(now)
        logger.warning("host %s is lost: %s; it has %g s to come back", host.name, error, grace_s)

    def take_back(self, host: RemoteHost, connection: GatewayConnection, now: float) -> None:
        """Note that a host has another connection."""
        gone = "" if host.lost_at is None else f" after {now - host.lost_at:.1f} s"
        host.connection, host.lost_at, host.is_away = connection, None, False
        self.news.append(HostReconnected(host))
        logger.warning("host %s is connected again%s", host.name, gone)

    def leave(self, host: RemoteHost, reason: str) -> None:
        """Remove a host that has gone for good, if it is still here."""
        if self.hosts.pop(host.session.token, None) is not None:
            host.is_away = False
            logger.warning("host %s has left: %s", host.name, reason)
            self.news.append(HostLeft(host, reason))

    def tick(self, now: float, grace_s: float) -> None:
        """Remove lost hosts that were replaced, or were not back in time; tell and log that the others are awaited."""
        self._replace_lost(now)
        for host in self._lost():
            assert host.lost_at is not None
            gone_s = now - host.lost_at
            if gone_s >= grace_s:
                self.leave(host, f"{host.reason}, and not back within {grace_s:g} s")
                continue
            if gone_s >= REDIAL_S and not host.is_away:
                host.is_away = True
                self.news.append(HostAway(host))
            if host.reminder.is_due(now):
                logger.warning(
                    "host %s is lost since %.0f s: %s; waited for %.0f s more (Limits.grace_s), or until another joins",
                    host.name,
                    gone_s,
                    host.reason,
                    grace_s - gone_s,
                )

    def _lost(self) -> list[RemoteHost]:
        """Hosts without a connection, the longest lost first."""
        lost = [host for host in self.hosts.values() if host.lost_at is not None]
        return sorted(lost, key=lambda host: host.lost_at or 0.0)

    def _replace_lost(self, now: float) -> None:
        """Have each host that joined since take the place of a lost one: the lost one leaves.

        A host of the lost one's name does so at once, or where there is no room for both. One of another name does so
        once the lost one has had the time to dial again.
        """
        for lost in self._lost():
            assert lost.lost_at is not None
            is_crowded = len(self.hosts) > self._max_hosts
            newcomer = self._newcomer_since(lost, any_name=now - lost.lost_at >= OTHER_NAME_S or is_crowded)
            if newcomer is not None:
                newcomer.has_place = True
                logger.warning("host %s has joined in place of %s, which is lost", newcomer.name, lost.name)
                self.leave(lost, f"{lost.reason}, and host {newcomer.name} has come in its place")

    def _newcomer_since(self, lost: RemoteHost, *, any_name: bool) -> RemoteHost | None:
        """Host that has joined since something last came from a lost one, and has taken no place."""
        newcomers = [
            host
            for host in self.hosts.values()
            if host.lost_at is None and not host.has_place and host.joined_at >= lost.heard_at and host is not lost
        ]
        named = [host for host in newcomers if host.session.hello.name == lost.session.hello.name]
        return next(iter(named or (newcomers if any_name else ())), None)

    def _check(self, hello: Hello) -> None:
        if hello.role != self._role:
            here, wanted = _WANTED[self._role]
            is_for = f"; this host is for {_WANTED[hello.role][0]}" if hello.role in _WANTED else ""
            raise WireError(
                f"hello.role is '{hello.role}', expected '{self._role}': here are {here}, for {wanted}{is_for}", "role"
            )
        if hello.busy:
            raise WireError(f"host {hello.name!r} is busy with another gateway, expected it to be free", "busy")
        if (count := len(self.hosts) - len(self._lost())) >= self._max_hosts:
            raise WireError(f"{count} hosts are here already, expected no more", "busy")
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
