"""Loop that owns the sockets of one end of a wire: it accepts, dials, reads, writes and keeps time."""

import errno
import logging
import os
import select
import socket
import ssl
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, Generic, Protocol, TypeVar

from rollflow.stream import wire
from rollflow.stream.data.closing import closing_on_error
from rollflow.stream.data.errors import WireError
from rollflow.stream.data.system import at_fork, require
from rollflow.stream.graph.wakeup import Wakeup
from rollflow.stream.net.descriptor_transport import DescriptorTransport
from rollflow.stream.net.dialler import Dialled, Dialler, problem_of
from rollflow.stream.net.transport import TlsTransport, Transport

logger = logging.getLogger(__name__)

_MANY, _LOOK_S = 64, 2e-5
_PAUSE_S = 0.25  # until it is tried again whether there are descriptors for more connections
# Codes of errors after which the other end may come back, and of those after which an address is dialled again.
COMES_BACK = ("lost", "silent", "undelivered")
REDIALLED = (*COMES_BACK, "handshake", "busy", "session")


def look_s(count: int) -> float:
    """Seconds until so many things are looked at again: 0 for few; for many, so long that it takes a small share."""
    return 0.0 if count < _MANY else count * _LOOK_S


_MOST_QUOTED = 300  # characters of what the other end says

C = TypeVar("C", bound=wire.Connection)


@dataclass(slots=True, eq=False)
class Peer(Generic[C]):
    """Connection, and the transport that carries it.

    where      the other end, for people
    partner    the other end, as the handler knows it; None: it has not been taken in
    dialled    the address that it was reached at by a `Dialler`
    mask       events of the socket that are waited for; 0: it is in no loop
    """

    transport: Transport
    connection: C
    where: str
    partner: Any = field(default=None, kw_only=True)
    dialled: Dialled | None = field(default=None, kw_only=True)
    mask: int = field(default=0, kw_only=True)

    def fileno(self) -> int:
        """The socket's descriptor; -1 once it is closed."""
        return self.transport.fileno()


P = TypeVar("P", bound=Peer[Any])
Told = TypeVar("Told", bound=Peer[Any], contravariant=True)
_listening: "weakref.WeakSet[SocketLoop[Any]]" = weakref.WeakSet()


def _give_up_all() -> None:
    """Put /dev/null in place of all sockets of loops that listen, in a process that was forked off.

    Open there, they would keep the address taken and connections alive after the loop's process has ended.
    """
    fds = [each.fileno() for loop in list(_listening) for each in (*loop._listened.values(), *loop.peers)]
    for fd in [each for each in fds if each >= 0]:
        nothing = os.open(os.devnull, os.O_RDWR)
        os.dup2(nothing, fd, inheritable=False)
        os.close(nothing)


at_fork(after_in_child=_give_up_all)


class SocketHandler(Protocol[Told]):
    """Decisions of a protocol, for the loop that owns its sockets."""

    def connection(self, now: float) -> wire.Connection:
        """This end of a connection by a socket that was accepted, or that has been dialled."""
        ...

    def handle(self, peer: Told, event: wire.Message, now: float) -> None:
        """Take what a connection has come to; if it broke, `fail` does."""
        ...

    def fail(self, peer: Told, error: Exception, now: float) -> None:
        """Take the error that a connection broke with, or that `handle` raised; the peer is dropped next.

        What it raises ends the loop's method.
        """
        ...


class SocketLoop(Generic[P]):
    """Sockets, their connections, and what there is to wait for; `send`, a wait, `serve` and `tick` make one round.

    handler          takes what happens
    peer             makes a peer of its transport, its connection, and where and how it was reached
    max_strangers    connections that have not proved themselves; if one more comes, the oldest is refused

    lock       of connections and sockets; the loop's owner may hold it around any method
    wakeup     ends a wait, from any thread
    dialler    of the addresses that `dial` was given
    refusals   why strangers were turned away, for errors
    """

    def __init__(
        self, handler: SocketHandler[P], peer: "type[P] | type[Peer[Any]]" = Peer, *, max_strangers: int = 1
    ) -> None:
        self.lock = threading.RLock()
        self.wakeup = Wakeup()
        self.refusals: deque[str] = deque(maxlen=8)
        self._handler, self._peer = handler, peer
        require("a connection to a host, a trainer or a replay", (select, "poll"))
        # The wait of an epoll takes no longer for more connections, and others can wait for it.
        self._is_epoll = hasattr(select, "epoll")
        self._poll: Any = select.epoll() if self._is_epoll else select.poll()
        self._units = 1.0 if self._is_epoll else 1e3  # of the poll's timeout, in a second
        self._tls: ssl.SSLContext | None = None
        self._shares = False
        self._poll.register(self.wakeup.fileno(), select.POLLIN)
        self._max_strangers, self._looks_at = max_strangers, 0.0
        self._listened: dict[int, socket.socket] = {}  # by descriptor
        self._accepting: set[int] = set()  # descriptors of those that are still listened on
        self._paused: dict[int, float] = {}  # those of them that are not waited for, until when
        self._by_fd: dict[int, P] = {}
        self._by_connection: dict[int, P] = {}
        self._strangers: list[P] = []  # that had not proved themselves when somebody last came or went
        self.dialler = Dialler([], self._poll)

    def fileno(self) -> int:
        """A descriptor that can be read once there is something to do, on systems with `select.epoll`."""
        return int(self._poll.fileno())

    def listen(
        self, sockets: Sequence[socket.socket], tls: ssl.SSLContext | None = None, *, shares: bool = False
    ) -> None:
        """Accept by sockets that are listened on, also beside others. A process that is forked off gives them up.

        shares    whether connections carry descriptors
        """
        self._tls, self._shares = tls, shares
        _listening.add(self)
        for sock in sockets:
            self._listened[sock.fileno()] = sock
            self._accepting.add(sock.fileno())
            self._poll.register(sock.fileno(), select.POLLIN)

    def stop_listening(self) -> None:
        """Accept no more; the sockets are others' to close."""
        for fd in self._accepting - self._paused.keys():
            with suppress(OSError):  # its owner has closed it, and an epoll has forgotten it already
                self._poll.unregister(fd)
        self._accepting.clear()
        self._paused.clear()

    def dial(
        self,
        addresses: Sequence[wire.Address],
        tls: ssl.SSLContext | None = None,
        *,
        shares: bool = False,
        longest_pause_s: float = 5.0,
        on_failure: Callable[[str], None] | None = None,
    ) -> None:
        """Dial addresses, and no others any more, each again whenever its connection is lost: see `Dialler`.

        shares    whether connections carry descriptors

        `tick` begins with that.
        """
        self._tls, self._shares = tls, shares
        self.dialler.close()
        self.dialler = Dialler(addresses, self._poll, longest_pause_s, on_failure)

    @property
    def peers(self) -> list[P]:
        """Peers that there are now, oldest first."""
        return list(self._by_fd.values())

    def peer_of(self, connection: wire.Connection) -> P | None:
        """The peer of a connection, until it is dropped."""
        return self._by_connection.get(id(connection))

    def add(self, peer: P) -> None:
        """Take a peer, and begin with what there is to send."""
        with self.lock:
            peer.mask = select.POLLIN
            self._strangers = [*self._in_handshake(), peer]
            self._by_fd[peer.fileno()] = self._by_connection[id(peer.connection)] = peer
            self._poll.register(peer.fileno(), peer.mask)
            self.write(peer)

    def write(self, peer: P | None) -> None:
        """Send what there is to send, as much as the socket takes, and wait for it to take the rest."""
        with self.lock:
            if peer is None or not peer.mask:
                return
            peer.transport.write()
            mask = select.POLLIN | (select.POLLOUT if peer.transport.waits_to_write else 0)
            if mask != peer.mask:  # reading sends as well where bytes are encrypted: what was waited for says nothing
                peer.mask = mask
                self._poll.modify(peer.fileno(), mask)

    def drop(self, peer: P | None, until: Callable[[], float] | None = None) -> None:
        """Send what may be a last word, and close, as `Transport.close` does; again does nothing."""
        with self.lock:
            if peer is None or not peer.mask:
                return
            peer.transport.write()
            peer.mask = 0
            self._strangers = self._in_handshake()
            del self._by_connection[id(peer.connection)], self._by_fd[peer.fileno()]
            self._poll.unregister(peer.fileno())
            peer.transport.close(until)
            if peer.dialled is not None:
                self.dialler.lost(peer.dialled)

    def fail(self, peer: P, error: Exception, now: float) -> None:
        """Give an error to the handler, and drop the peer."""
        try:
            self._handler.fail(peer, error, now)
            self.drop(peer)
        finally:
            error.__traceback__ = None  # its frames hold the peer, and what was lent through it

    def turn_away(self, peer: P, problem: str) -> None:
        """Log that a peer is refused that has not proved itself, unless it is as the last time, and note why."""
        if peer.dialled is None:
            if (text := f"{peer.where.rpartition(':')[0] or peer.where}: {problem}") not in self.refusals:
                self.refusals.append(text)  # another try has another port
        elif peer.dialled.problem == problem:
            return
        else:
            peer.dialled.problem = problem
        logger.log(refusal_level(peer.connection), "a connection from %s is refused: %s", peer.where, problem)

    def send(self, tell: Callable[[P], None], peers: Iterable[P] | None = None) -> None:
        """Tell open connections what is new, and send what there is to send; if `tell` raises, it fails.

        peers    None: all
        """
        with self.lock:
            for peer in self.peers if peers is None else peers:
                try:
                    if peer.connection.is_open:
                        tell(peer)
                except Exception as error:
                    self.fail(peer, error, monotonic())
                self.write(peer)

    def wait(self, timeout_s: float | None) -> list[tuple[int, int]]:
        """Wait until there is something to do, None: however long; what `serve` takes."""
        ready: list[tuple[int, int]] = self._poll.poll(None if timeout_s is None else timeout_s * self._units)
        return ready

    def wait_until(self, *times: float | None) -> list[tuple[int, int]]:
        """`wait` until the first of these times, on the clock `monotonic`, and until `tick` is due at the latest."""
        with self.lock:
            deadlines = [peer.connection.next_deadline() for peer in self.peers]
        times = (*times, *deadlines, *self._paused.values(), self.dialler.due)
        due = min((time for time in times if time is not None), default=None)
        return self.wait(None if due is None else max(0.0, due - monotonic()))

    def turn(self, *times: float | None) -> float:
        """Wait until the first of these times at the latest, and do what there is to do; the time after the wait."""
        ready = self.wait_until(*times)
        now = monotonic()
        self.serve(ready, now)
        self.tick(now)
        return now

    def serve(self, ready: Iterable[tuple[int, int]], now: float) -> None:
        """Accept, read, and write, by descriptors that a wait gave, each with its events, in their order."""
        for fd, mask in ready:
            peer = self._by_fd.get(fd)
            if peer is not None:
                if mask & ~select.POLLOUT:
                    with self.lock:
                        events = peer.transport.read(now)
                    self._take(peer, events, now)
                self.write(peer)
            elif fd == self.wakeup.fileno():
                self.wakeup.silence()
            elif fd in self._accepting:
                self._accept(fd, now)
            elif fd in self.dialler and (reached := self.dialler.serve(fd, now)) is not None:
                sock, dialled = reached
                self._greet(sock, str(dialled.address), now, dialled)

    def tick(self, now: float) -> None:
        """Do what is due: heartbeats, handshakes that take too long, connections that broke meanwhile, and dialling.

        If there are many connections, they are not looked at each time.
        """
        looks = now >= self._looks_at
        if looks:
            self._looks_at = now + look_s(len(self.peers))
        for peer in self.peers if looks else ():
            deadline = peer.connection.next_deadline()
            if deadline is None or deadline <= now:
                with self.lock:
                    events = peer.connection.tick(now)
                self._take(peer, events, now)
                self.write(peer)
        for fd in [fd for fd, due in self._paused.items() if due <= now]:
            del self._paused[fd]
            self._poll.register(fd, select.POLLIN)
        self.dialler.tick(now)

    def close(self) -> None:
        """Close all sockets but those that are listened on, whatever there is still to send."""
        for peer in self._by_fd.values():
            peer.transport.close()
        self.dialler.close()
        self.wakeup.close()
        if self._is_epoll:
            self._poll.close()

    def _take(self, peer: P, events: Iterable[wire.Event], now: float) -> None:
        """Give the handler events of a connection, and its error if it is broken."""
        try:
            for event in events:
                if isinstance(event, WireError):
                    raise event
                if isinstance(event, wire.Welcome):
                    self.dialler.welcomed(peer.dialled)
                self._handler.handle(peer, event, now)
            if peer.connection.is_open or self.peer_of(peer.connection) is None:
                return
            if peer.connection.error is not None:  # it broke while something was sent
                raise peer.connection.error
        except Exception as error:
            self.fail(peer, error, now)
        else:
            self.drop(peer)

    def _accept(self, fd: int, now: float) -> None:
        """Take a connection by a descriptor that is listened on, unless there is none, or none can be taken now."""
        try:
            sock, where = self._listened[fd].accept()
        except BlockingIOError:
            return
        except OSError as error:  # no descriptors left, as a rule: to be tried again, but not at once
            logger.warning("a connection can't be taken: %s", error)
            with suppress(OSError):  # where its owner has closed it, an epoll has forgotten it already
                self._poll.unregister(fd)
            if self._listened[fd].fileno() >= 0:
                self._paused[fd] = now + _PAUSE_S
            else:
                self._accepting.remove(fd)
            return
        with self.lock:
            strangers = self._in_handshake()
        if len(strangers) >= self._max_strangers:
            text = f"{self._max_strangers} connections have not proved themselves, expected fewer"
            strangers[0].connection.refuse("busy", text)  # it has had the most time
            assert strangers[0].connection.error is not None
            self.fail(strangers[0], strangers[0].connection.error, now)
        name = str(wire.TcpAddress(where[0], where[1])) if isinstance(where, tuple) else "a Unix socket"
        self._greet(sock, name, now, None)

    def _greet(self, sock: socket.socket, where: str, now: float, dialled: Dialled | None) -> None:
        """Add a peer with a connection of the handler's by a socket, which is closed if making them raises.

        There is none if the other end has gone already.
        """
        with closing_on_error(sock.close):
            connection = self._handler.connection(now)
            transport: Transport
            if self._tls is None:
                transport = (DescriptorTransport if self._shares else Transport)(sock, connection)
            else:
                address = None if dialled is None else dialled.address
                try:
                    sock.getpeername()  # while the socket is ours to close
                    transport = TlsTransport(sock, connection, self._tls, dialled=address)
                except OSError as error:
                    if error.errno not in (errno.ENOTCONN, errno.ECONNRESET):
                        raise
                    sock.close()
                    if dialled is not None:
                        dialled.problem = problem_of(error)
                        self.dialler.lost(dialled)
                    return
            peer: Any = self._peer(transport, connection, where, dialled=dialled)
        self.add(peer)

    def _in_handshake(self) -> list[P]:
        """Peers that have not proved themselves, the oldest first."""
        return [
            peer for peer in self._strangers if peer.mask and peer.connection.phase is wire.ConnectionPhase.HANDSHAKE
        ]


def quoted(text: object) -> str:
    """An error text as part of a log line: escaped and cut, for the text may be a stranger's."""
    return "".join(
        letter if letter.isascii() and letter.isprintable() else letter.encode("unicode_escape").decode()
        for letter in str(text)[:_MOST_QUOTED]
    )


def refusal_level(connection: wire.Connection) -> int:
    """Level at which the end of a connection is logged that has not proved itself.

    Whoever closes it without a word has looked whether somebody listens, as a cluster does again and again: DEBUG.
    """
    is_probe = connection.is_new and connection.error is not None and connection.error.code == "lost"
    return logging.DEBUG if is_probe else logging.WARNING
