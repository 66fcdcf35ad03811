"""Takes hosts in, keeps their connections, and hands over what they answer."""

import logging
import secrets
import select
import socket
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic

from rollflow.nodes.remote.dialler import Dialled, Dialler
from rollflow.nodes.remote.lines import Entrance, Line, Lines, quoted
from rollflow.nodes.remote.registry import Registry
from rollflow.nodes.remote.remote_envs import RemoteHosts
from rollflow.nodes.remote.remote_host import Answered, Back, News, RemoteHost, Told
from rollflow.nodes.remote.software import software
from rollflow.nodes.remote.transport import transport_for
from rollflow.stream.bell import Bell
from rollflow.stream.errors import WireError
from rollflow.stream.wire import (
    NONCE_BYTES,
    Broken,
    Cut,
    Event,
    GatewayConnection,
    Goodbye,
    Hello,
    Metrics,
    Request,
    Settings,
    States,
    Weights,
)

logger = logging.getLogger(__name__)

_TEND_S = 0.25  # how long nobody may look at the sockets
_MOST_STRANGERS = 256  # connections that have not proved themselves yet
_GOODBYE_S = 1.0
_MUCH = 1 << 16  # bytes that wait for a host
_COMES_BACK = ("lost", "silent", "undelivered")  # codes of errors after which a host is waited for


@dataclass(slots=True, eq=False)
class _Peer(Line[GatewayConnection]):
    """A connection, and whose it is."""

    host: RemoteHost | None = None
    dialled: Dialled | None = None


class Gateway:
    """Where hosts come in.

        envs, role    where they are expected, and what they are to be

    Whoever runs the rollout looks after the sockets by `service`, when `fileno` can be read. While it is busy with
    something else for long, a thread does, so that nobody takes this gateway for dead: what came then is told by
    `fileno` as well. `news` gives what has happened.
    """

    def __init__(self, envs: RemoteHosts, role: str) -> None:
        envs.take()
        self._registry = Registry(role, envs.max_hosts)
        self.refusals: deque[str] = deque(maxlen=8)  # why strangers were turned away, for errors
        self._envs = envs
        self._lock = threading.RLock()
        self._bell = Bell()
        self._epoll = select.epoll()
        self._epoll.register(self._bell.fileno(), select.EPOLLIN)
        self._peers: Lines[_Peer] = Lines(self._epoll)
        self._entrance = Entrance(envs.sockets, self._epoll)
        # A gateway must not be held by what it holds: it ends when nobody else has it any more.
        itself = weakref.ref(self)
        self._dialler = Dialler(
            [] if envs.is_listening else envs.addresses,
            self._epoll,
            lambda sock, dialled: _reached(itself, sock, dialled),
        )
        self._serviced = self._ticked = monotonic()
        self._closing = threading.Event()
        open_now = self._closing, envs, self._peers, self._dialler, self._epoll, self._bell
        self._ending = weakref.finalize(self, _end, *open_now)  # also where nobody ever closes it
        self._tender = threading.Thread(
            target=_tend, args=(weakref.ref(self), self._closing), name="rollflow gateway", daemon=True
        )
        self._tender.start()

    @property
    def hosts(self) -> Mapping[bytes, RemoteHost]:
        """Those that are there, or may come back, by the token of their session."""
        return self._registry.hosts

    def fileno(self) -> int:
        """Can be read once there is something to do for `service`, or something new for `news`."""
        return self._epoll.fileno()

    def service(self) -> None:
        """Do what there is to do for the sockets, without waiting."""
        with self._lock:
            if self._closing.is_set():
                return
            self._serviced = now = monotonic()
            for fd, events in self._epoll.poll(0):
                self._serve(fd, events, now)
            if now - self._ticked >= _TEND_S / 2:
                self._ticked = now
                self._tick(now)

    def wait(self, timeout: float | None) -> None:
        """Wait until there is something to do for `service`; it may be called without."""
        self._epoll.poll(_TEND_S if timeout is None else min(max(timeout, 0.0), _TEND_S))

    def news(self) -> Iterator[News]:
        """What has happened since, oldest first."""
        while self._registry.news:
            yield self._registry.news.popleft()

    def ask(self, request: Request) -> None:
        """Ask the host of a lane for something; it may take more than one connection.

        A host that takes no frame as large has to leave. Raises WireError for what can't be asked of any.
        """
        with self._lock:
            host = self.host_of(request.lane)
            try:
                host.connection.ask(request)
            except WireError as error:
                self._could_not_ask(host, error)
            self._write(host.connection)

    def tell(self, host: RemoteHost, news: Weights | States | Settings | Cut, through: GatewayConnection) -> bool:
        """Tell a host something that needs no answer; whether it could be told: not where that connection is lost.

        Arrays must stay as they are until sent. A host that takes no frame as large has to leave. From any thread.
        """
        with self._lock:
            if host.connection is not through or host.lost_at is not None or not through.is_open:
                return False
            try:
                host.connection.tell(news)
            except WireError as error:
                self._could_not_ask(host, error)
                self._bell.ring()
                return False
            self._write(host.connection)
            return True

    def is_behind(self, host: RemoteHost) -> bool:
        """Whether much of what a host was told or asked is still on its way into the socket."""
        return host.connection.undelivered > _MUCH

    def give_credit(self, host: RemoteHost) -> None:
        """Let a host say again how far it is."""
        with self._lock, suppress(WireError):  # its connection is lost: the next one begins with a credit
            host.connection.give(1)
            self._write(host.connection)

    def expel(self, host: RemoteHost, error: WireError) -> None:
        """Have a host leave that has sent what it must not."""
        with self._lock:
            self._refuse(host, error)

    def wake(self) -> None:
        """Have `fileno` say that there is something to do. From any thread."""
        self._bell.ring()

    def next_number(self, lane: int) -> int:
        """The number of a lane's next request."""
        return self.host_of(lane).session.next_number(lane)

    def host_of(self, lane: int) -> RemoteHost:
        """The host that a lane is, or was, on."""
        return self._registry.host_of(lane)

    def close(self, reason: str = "the rollout has ended") -> None:
        """Say goodbye to all hosts, and close every socket."""
        self._closing.set()
        self._tender.join()
        with self._lock:
            if not self._ending.alive:
                return
            for peer in self._peers:
                peer.connection.goodbye(reason)
                self._peers.write(peer)
            self._await_goodbyes(monotonic() + _GOODBYE_S)
            for peer in self._peers:
                self._drop(peer)
            self._ending()

    def describe(self) -> str:
        """Who is there, for `explain()`."""
        names = sorted(host.name for host in list(self.hosts.values()))
        shown = ", ".join(names[:4]) + (", …" if len(names) > 4 else "")
        return f"{len(names)} host{'' if len(names) == 1 else 's'}: {shown}"

    def waited_for(self) -> str:
        """Where hosts are expected, and what came of those that tried, for errors."""
        told = [", ".join(map(str, self._envs.addresses)), *self._dialler.problems, *self.refusals]
        return f"{'listening on' if self._envs.is_listening else 'dialling'} {'; '.join(told)}"

    def _could_not_ask(self, host: RemoteHost, error: WireError) -> None:
        peer = self._peers.of(host.connection)
        if error.code == "undelivered" and peer is not None:  # the connection is broken, and the next one asks
            self._broken(peer, error, monotonic())
        elif error.code == "frame":
            self._refuse(host, error)
        else:
            raise error

    def _refuse(self, host: RemoteHost, error: WireError) -> None:
        host.connection.refuse(error.code, str(error))
        peer = self._peers.of(host.connection)
        if peer is not None:
            self._drop(peer)
        self._registry.leave(host, str(error))

    # Sockets

    def _serve(self, fd: int, events: int, now: float) -> None:
        peer = self._peers.at(fd)
        if peer is not None:
            if events & ~select.EPOLLOUT:
                self._take(peer, peer.transport.read(now), now)
            self._peers.write(peer)
        elif fd in self._entrance:
            self._accept(fd, now)
        elif fd in self._dialler:
            self._dialler.serve(fd, now)
        elif fd == self._bell.fileno():
            self._bell.silence()

    def _tick(self, now: float) -> None:
        """Do what is due."""
        for peer in self._peers:
            deadline = peer.connection.next_deadline()
            if deadline is not None and deadline <= now:
                self._take(peer, peer.connection.tick(now), now)
                self._peers.write(peer)
        self._registry.leave_overdue(now, self._envs.limits.grace_s)
        self._entrance.listen_again(now)
        self._dialler.tick(now)

    def tend(self) -> None:
        """Look after the sockets if nobody has for a while."""
        if monotonic() - self._serviced >= _TEND_S:
            self.service()
            if self._registry.news:
                self._bell.ring()

    def _accept(self, fd: int, now: float) -> None:
        arrived = self._entrance.accept(fd, now)
        if arrived is None:
            return
        crowded_out = self._peers.crowd_out(_MOST_STRANGERS)
        if crowded_out is not None:
            assert crowded_out.connection.error is not None
            self._broken(crowded_out, crowded_out.connection.error, now)
        self.greet(*arrived, now)

    def greet(self, sock: socket.socket, where: str, now: float, dialled: Dialled | None = None) -> None:
        """Take over a socket with a host at its other end."""
        connection = GatewayConnection(
            software=software(),
            nonce=secrets.token_bytes(NONCE_BYTES),
            secret=self._envs.secret,
            limits=self._envs.limits,
            now=now,
        )
        transport = transport_for(
            sock, connection, self._envs.tls, dialled=None if dialled is None else dialled.address
        )
        self._peers.add(_Peer(transport, connection, where, dialled=dialled))

    def _write(self, connection: GatewayConnection) -> None:
        peer = self._peers.of(connection)
        if peer is not None:
            self._peers.write(peer)

    def _drop(self, peer: _Peer) -> None:
        """Be done with a connection."""
        if self._peers.drop(peer) and peer.dialled is not None:
            self._dialler.lost(peer.dialled)

    def _await_goodbyes(self, until: float) -> None:
        """Wait for the other ends to close, so that nothing that was said to them is lost."""
        while (left := until - monotonic()) > 0 and any(peer.host is not None for peer in self._peers):
            for fd, events in self._epoll.poll(left):
                self._serve(fd, events, monotonic())

    # Hosts

    def _take(self, peer: _Peer, events: list[Event], now: float) -> None:
        for event in events:
            match event:
                case Hello():
                    self._take_in(peer, event, now)
                case Broken():
                    self._broken(peer, event.error, now)
                case Goodbye():
                    self._drop(peer)
                    if peer.host is not None and peer.host.connection is peer.connection:
                        self._registry.leave(peer.host, f"said goodbye: {event.reason}")
                case Metrics():
                    assert peer.host is not None
                    self._registry.news.append(Told(peer.host, event.metrics))
                case _:
                    self._registry.news.append(Answered(event))  # type: ignore[arg-type]
        if not peer.connection.is_open and self._peers.of(peer.connection) is not None:
            if peer.connection.error is not None:  # it broke while something was sent
                self._broken(peer, peer.connection.error, now)
            self._drop(peer)

    def _take_in(self, peer: _Peer, hello: Hello, now: float) -> None:
        """A host has proved itself: it comes back, or is new, or is turned away."""
        try:
            known = self.hosts.get(hello.session)
            if known is not None:
                self._take_back(peer, known)
                return
            for host in [each for each in self.hosts.values() if peer.dialled and each.dialled is peer.dialled]:
                self._registry.leave(host, "it was started again")
            session = self._registry.session_for(hello)
            peer.connection.welcome(session, credits=1)
        except WireError as error:
            peer.connection.refuse(error.code, str(error))
            self._broken(peer, error, now)
            return
        peer.host = RemoteHost(f"{quoted(hello.name)} ({peer.where})", session, peer.connection, peer.dialled)
        self._dialler.welcomed(peer.dialled)
        self._registry.join(peer.host)

    def _take_back(self, peer: _Peer, host: RemoteHost) -> None:
        peer.connection.welcome(host.session, credits=1)
        old = self._peers.of(host.connection)
        peer.host, host.connection, host.lost_at = host, peer.connection, None
        self._dialler.welcomed(peer.dialled)
        self._registry.news.append(Back(host))
        if old is not None:
            self._drop(old)
        logger.warning("host %s is back", host.name)

    def _broken(self, peer: _Peer, error: WireError, now: float) -> None:
        self._drop(peer)
        host = peer.host
        if host is None:
            self._turned_away(peer, quoted(error))
        elif host.connection is peer.connection:
            host.lost_at, host.reason = now, str(error)
            if error.code in _COMES_BACK:
                logger.warning("host %s is lost: %s; waited for %g s", host.name, error, self._envs.limits.grace_s)
            else:
                self._registry.leave(host, str(error))

    def _turned_away(self, peer: _Peer, told: str) -> None:
        if peer.dialled is None:
            if (text := f"{peer.where.rpartition(':')[0] or peer.where}: {told}") not in self.refusals:
                self.refusals.append(text)  # another try has another port
        elif peer.dialled.problem == told:
            return  # as it was the last time
        else:
            peer.dialled.problem = told
        logger.warning("a connection from %s is refused: %s", peer.where, told)


def _reached(gateway: "weakref.ref[Gateway]", sock: socket.socket, dialled: Dialled) -> None:
    there = gateway()
    assert there is not None
    there.greet(sock, str(dialled.address), monotonic(), dialled)


def _tend(gateway: "weakref.ref[Gateway]", closing: threading.Event) -> None:
    """Look after a gateway's sockets for as long as there is one."""
    while not closing.wait(_TEND_S):
        there = gateway()
        if there is None:
            return
        there.tend()
        del there


def _end(
    closing: threading.Event,
    envs: RemoteHosts,
    peers: Lines[_Peer],
    dialler: Dialler,
    epoll: select.epoll,
    bell: Bell,
) -> None:
    """Close what is open."""
    closing.set()
    peers.close()
    dialler.close()
    envs.close()
    epoll.close()
    bell.close()
