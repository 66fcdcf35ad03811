"""Gateway of a rollout: it takes hosts in, keeps their connections, and hands over their answers."""

import logging
import select
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, Literal, NamedTuple

from rollflow.nodes.env.remote.remote_envs import RemoteHosts
from rollflow.stream import wire
from rollflow.stream.data.errors import WireError
from rollflow.stream.data.space import leaves_within
from rollflow.stream.data.system import require
from rollflow.stream.net import backoff
from rollflow.stream.net.backoff import WaitReminder
from rollflow.stream.net.dialler import Dialled
from rollflow.stream.net.socket_loop import COMES_BACK, Peer, SocketLoop, quoted
from rollflow.stream.wire.codec.field import shown
from rollflow.stream.wire.codec.spaces import read_space

logger = logging.getLogger(__name__)

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


_TEND_S = 0.25  # how long nobody may look at the sockets
_MOST_STRANGERS = 256  # connections that have not proved themselves yet
_GOODBYE_S = 1.0
_MUCH = 1 << 16  # bytes that wait for a host
HostNews = wire.Weights | wire.States | wire.Settings | wire.Cut  # that hosts don't answer


@dataclass(slots=True, eq=False)
class RemoteHost:
    """A host that has been taken in.

    name          as it calls itself, and where it is
    session       what outlives its connections
    connection    the newest
    dialled       the address that it was reached at; None: it dialled itself
    lost_at       since when it has none; None: it has one
    is_away       whether it has been lost for longer than a live host needs to dial again
    reason        why it was lost
    reminder      when to log again that it is waited for
    has_drained   whether it has left with nothing under way: it has made no step that it has not given
    told          what it has been told through its connection, as the node keeps it
    """

    name: str
    session: wire.GatewaySession
    connection: wire.GatewayConnection
    dialled: Dialled | None = None
    lost_at: float | None = None
    is_away: bool = False
    reason: str = ""
    reminder: WaitReminder = field(default_factory=WaitReminder)
    has_drained: bool = False
    told: dict[Any, Any] = field(default_factory=dict)


class HostEvent(NamedTuple):
    """Event of a host that a gateway has taken in.

    kind     "joined": it has come, with new lanes
             "answered": `what` is its answer
             "progressed": `what` is a dict of how far it is
             "away": it has lost its connection and did not dial again at once: its process or network may be gone
             "reconnected": it had lost its connection, and has another one
             "left": it has gone for good, its lanes with it; `what` is the reason
    """

    kind: Literal["joined", "answered", "progressed", "away", "reconnected", "left"]
    host: RemoteHost
    what: Any = None


def _difference(name: str, mine: Any, other: Any) -> tuple[str, Any, Any]:
    """The first part of a space that differs from another's, by its path; the whole if their structures differ."""
    for one, another in zip(leaves_within(mine, name), leaves_within(other, name), strict=False):
        if one.path != another.path:
            break
        if one.space != another.space:
            return one.path, one.space, another.space
    return name, mine, other


def _shortened(space: Any) -> str:
    """A space's text with its middle left out if it is long: shape and dtype are at its end."""
    text = " ".join(str(space).split())
    return text if len(text) <= 80 else f"{text[:38]} ... {text[-37:]}"


HostPeer = Peer[wire.GatewayConnection]  # whose partner is a `RemoteHost`


class Gateway:
    """Connections of a rollout with hosts.

        envs, role    where they are expected, and what they are to be

        hosts      hosts that are there, or may come back, by the token of their session

    Every host's lanes get numbers that were never used before; their spaces must be those of the first host.

    The thread that runs the rollout calls `service` when `fileno` can be read. While that is busy with something else
    for long, a thread does, so that no host takes this gateway for dead: what came then makes `fileno` readable as
    well. `news` gives what has happened.
    """

    def __init__(self, envs: RemoteHosts, role: str) -> None:
        require("a rollout whose environments are on other hosts", (select, "epoll"))
        envs.take()
        self.hosts: dict[bytes, RemoteHost] = {}
        self._host_of: dict[int, RemoteHost] = {}
        self._news: deque[HostEvent] = deque()
        self._first: wire.Hello | None = None
        self._next_lane = self._next_slot = 0
        self._envs, self._role, self._limits = envs, role, envs.endpoint.limits
        itself = weakref.proxy(self)  # not held by what it holds, it ends when nobody else has it any more
        self._loop: SocketLoop[HostPeer] = SocketLoop(itself, max_strangers=_MOST_STRANGERS)
        self._loop.dial([] if envs.is_listening else envs.addresses, envs.endpoint.tls)
        self._loop.listen(envs.sockets, envs.endpoint.tls)
        self._lock = self._loop.lock
        self._serviced = self._ticked = monotonic()
        self._closing = threading.Event()
        self._ending = weakref.finalize(self, _end, self._closing, self._loop, envs)  # if never closed
        self._tender = threading.Thread(
            target=_tend, args=(weakref.ref(self), self._closing), name="rollflow gateway", daemon=True
        )
        self._tender.start()

    def fileno(self) -> int:
        """Descriptor that can be read once there is something to do for `service`, or something new for `news`."""
        return self._loop.fileno()

    def service(self) -> None:
        """Do what there is to do for the sockets, without waiting."""
        with self._lock:
            if self._closing.is_set():
                return
            self._serviced = now = monotonic()
            self._loop.serve(self._loop.wait(0), now)
            if now - self._ticked >= _TEND_S / 2:
                self._ticked = now
                self._loop.tick(now)
                self._tick(now)

    def wait(self, timeout: float | None) -> None:
        """Wait until there is something to do for `service`; it may be called without."""
        self._loop.wait(_TEND_S if timeout is None else min(max(timeout, 0.0), _TEND_S))

    def news(self) -> Iterator[HostEvent]:
        """Events since the last call, oldest first."""
        while self._news:
            yield self._news.popleft()

    def host_of(self, lane: int) -> RemoteHost:
        """The host that a lane is, or was, on."""
        return self._host_of[lane]

    def ask(self, request: wire.Request) -> None:
        """Ask the host of a lane for something; it may take more than one connection.

        A host that takes no frame as large has to leave. Raises WireError for what can't be asked of any.
        """
        with self._lock:
            host = self.host_of(request.lane)
            self._send(host, host.connection.ask, request)

    def tell(self, host: RemoteHost, news: HostNews, through: wire.GatewayConnection) -> bool:
        """Tell a host something that needs no answer; False: it could not be told, since that connection is lost.

        Arrays must stay as they are until sent. A host that takes no frame as large has to leave. From any thread.
        """
        with self._lock:
            if host.connection is not through or host.lost_at is not None or not through.is_open:
                return False
            is_told = self._send(host, host.connection.tell, news)
            if not is_told:
                self._loop.wakeup.ring()
            return is_told

    def is_behind(self, host: RemoteHost) -> bool:
        """True if much of what a host was told or asked is still on its way into the socket."""
        return host.connection.undelivered > _MUCH

    def expel(self, host: RemoteHost, error: WireError) -> None:
        """Have a host leave that has sent what it must not."""
        with self._lock:
            host.connection.refuse(error.code, str(error))
            self._loop.drop(self._loop.peer_of(host.connection))
            self._leave(host, str(error))

    def wake(self) -> None:
        """Make `fileno` readable. From any thread."""
        self._loop.wakeup.ring()

    def close(self, reason: str = "the rollout has ended") -> None:
        """Say goodbye to all hosts, and close every socket."""
        self._closing.set()
        self._tender.join()
        with self._lock:
            if not self._ending.alive:
                return
            for peer in self._loop.peers:
                peer.connection.goodbye(reason)
                self._loop.write(peer)
            until = monotonic() + _GOODBYE_S
            while (left := until - monotonic()) > 0 and any(peer.partner is not None for peer in self._loop.peers):
                self._loop.serve(self._loop.wait(left), monotonic())  # until they close: so nothing is lost
            for peer in self._loop.peers:
                self._loop.drop(peer)
            self._ending()

    def describe(self) -> str:
        """The hosts, for `explain()`."""
        names = sorted(host.name for host in list(self.hosts.values()))
        shown = ", ".join(names[:4]) + (", …" if len(names) > 4 else "")
        return f"{len(names)} host{'' if len(names) == 1 else 's'}: {shown}"

    def waited_for(self) -> str:
        """Where hosts are expected, and what came of those that tried, for errors."""
        started = () if self._envs.supply is None else self._envs.supply.problems
        parts = [
            ", ".join(map(str, self._envs.addresses)),
            *self._loop.dialler.problems,
            *self._loop.refusals,
            *started,
        ]
        return f"{'listening on' if self._envs.is_listening else 'dialling'} {'; '.join(parts)}"

    def _send(self, host: RemoteHost, say: Callable[[Any], None], message: Any) -> bool:
        """Have a host's connection say something; False: it could not."""
        try:
            say(message)
        except WireError as error:
            peer = self._loop.peer_of(host.connection)
            if error.code == "undelivered" and peer is not None:  # the connection is broken, and the next one asks
                self._loop.fail(peer, error, monotonic())
            elif error.code == "frame":
                self.expel(host, error)
            else:
                raise
            return False
        self._loop.write(self._loop.peer_of(host.connection))
        return True

    def tend(self) -> None:
        """Look after the sockets if nobody has for a while."""
        if monotonic() - self._serviced >= _TEND_S:
            self.service()
            if self._news:
                self._loop.wakeup.ring()

    # What the loop asks for

    def connection(self, now: float) -> wire.GatewayConnection:
        """This end of a connection with a host."""
        return wire.GatewayConnection(secret=self._envs.endpoint.secret, limits=self._limits, now=now)

    def handle(self, peer: HostPeer, event: wire.Message, now: float) -> None:
        """Take a message of a host."""
        match event:
            case wire.Hello():
                self._take_in(peer, event, now)
            case wire.Goodbye():
                self._loop.drop(peer)
                if peer.partner is not None and peer.partner.connection is peer.connection:
                    peer.partner.has_drained = event.drained
                    self._leave(peer.partner, f"said goodbye: {event.reason}")
            case wire.Metrics():
                assert peer.partner is not None
                self._news.append(HostEvent("progressed", peer.partner, event.metrics))
            case _:
                assert peer.partner is not None
                self._news.append(HostEvent("answered", peer.partner, event))

    def fail(self, peer: HostPeer, error: Exception, now: float) -> None:
        """Turn a stranger away, or note that a host is lost; raises what is no error of the wire."""
        if not isinstance(error, WireError):
            raise error
        peer.connection.refuse(error.code, str(error))
        host = peer.partner
        if host is None:
            self._loop.turn_away(peer, quoted(error))
        elif host.connection is peer.connection:
            if error.code in COMES_BACK:
                self._lose(host, error, now)
            else:
                host.lost_at = now
                self._leave(host, str(error))

    def _take_in(self, peer: HostPeer, hello: wire.Hello, now: float) -> None:
        """Take in a host that has proved itself: a new one, or one that comes back. Raises WireError for others."""
        host = self.hosts.get(hello.session)
        if host is not None:
            peer.connection.welcome(host.session)
            old, peer.partner = self._loop.peer_of(host.connection), host
            self._loop.dialler.welcomed(peer.dialled)
            gone = "" if host.lost_at is None else f" after {now - host.lost_at:.1f} s"
            host.connection, host.lost_at, host.is_away, host.told = peer.connection, None, False, {}
            self._news.append(HostEvent("reconnected", host))
            logger.warning("host %s is connected again%s", host.name, gone)
            self._loop.drop(old)
            return
        for before in [each for each in self.hosts.values() if peer.dialled and each.dialled is peer.dialled]:
            self._leave(before, "it was started again")
        self._check(hello)
        lanes = range(self._next_lane, self._next_lane + len(hello.slots))
        session = wire.GatewaySession(hello.session, hello, lanes, hello.first_slots(self._next_slot))
        peer.connection.welcome(session)
        name = f"{quoted(hello.name)} ({peer.where})"
        host = peer.partner = RemoteHost(name, session, peer.connection, dialled=peer.dialled)
        self._next_lane += len(lanes)
        self._next_slot += hello.num_envs
        self._first = self._first or hello
        self.hosts[session.token] = host
        self._host_of.update(dict.fromkeys(lanes, host))
        self._news.append(HostEvent("joined", host))
        logger.info("host %s has joined with %d environments", name, hello.num_envs)
        self._loop.dialler.welcomed(peer.dialled)

    def _lose(self, host: RemoteHost, error: WireError, now: float) -> None:
        """Note that a host has lost its connection and may come back."""
        host.lost_at, host.reason = now, str(error)
        host.reminder = WaitReminder()
        logger.warning("host %s is lost: %s; it has %g s to come back", host.name, error, self._limits.grace_s)

    def _leave(self, host: RemoteHost, reason: str) -> None:
        """Remove a host that has gone for good, if it is still here."""
        if self.hosts.pop(host.session.token, None) is not None:
            host.is_away = False
            logger.warning("host %s has left: %s", host.name, reason)
            self._news.append(HostEvent("left", host, reason))

    def _tick(self, now: float) -> None:
        """Remove lost hosts that were not back in time; tell and log that the others are awaited."""
        grace_s = self._limits.grace_s
        for host in self._lost():
            assert host.lost_at is not None
            gone_s = now - host.lost_at
            if gone_s >= grace_s:
                self._leave(host, f"{host.reason}, and not back within {grace_s:g} s")
                continue
            if gone_s >= backoff.times.redial_s and not host.is_away:
                host.is_away = True
                self._news.append(HostEvent("away", host))
            if host.reminder.is_long:
                logger.warning(
                    "host %s is lost since %.0f s: %s; waited for %.0f s more (Limits.grace_s)",
                    host.name,
                    gone_s,
                    host.reason,
                    grace_s - gone_s,
                )

    def _lost(self) -> list[RemoteHost]:
        """Hosts without a connection."""
        return [host for host in self.hosts.values() if host.lost_at is not None]

    def _check(self, hello: wire.Hello) -> None:
        if hello.role != self._role:
            here, wanted = _WANTED[self._role]
            is_for = f"; this host is for {_WANTED[hello.role][0]}" if hello.role in _WANTED else ""
            raise WireError(
                f"hello.role is '{hello.role}', expected '{self._role}': here are {here}, for {wanted}{is_for}", "role"
            )
        if hello.busy:
            raise WireError(f"host {hello.name!r} is busy with another gateway, expected it to be free", "busy")
        if (count := len(self.hosts) - len(self._lost())) >= self._envs.max_hosts:
            raise WireError(f"{count} hosts are here already, expected no more", "busy")
        first = self._first
        if first is None:
            return
        for name in ("observation_space", "action_space"):
            if getattr(hello, name) != getattr(first, name):
                path, mine, other = _difference(
                    name, *(read_space(getattr(each, name), name) for each in (hello, first))
                )
                is_mine = f"hello.{path} of host {hello.name!r} is {_shortened(mine)}"
                raise WireError(f"{is_mine}, expected that of host {first.name!r}, {_shortened(other)}", "spaces")
        if (hello.agents, hello.parts) != (first.agents, first.parts):
            raise WireError(
                f"hello.agents is {shown(hello.agents)} in parts {shown(hello.parts)}, expected those of host "
                f"{first.name!r}, {shown(first.agents)} in {shown(first.parts)}",
                "spaces",
            )


def _tend(gateway: "weakref.ref[Gateway]", closing: threading.Event) -> None:
    """Look after a gateway's sockets for as long as there is one."""
    while not closing.wait(_TEND_S):
        there = gateway()
        if there is None:
            return
        there.tend()
        del there


def _end(closing: threading.Event, loop: SocketLoop[HostPeer], envs: RemoteHosts) -> None:
    """Close what is open."""
    closing.set()
    loop.close()
    envs.close()
