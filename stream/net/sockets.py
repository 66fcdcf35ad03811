"""Peers, which are connections with their sockets, and sockets that accept more of them."""

import logging
import select
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from rollflow.stream.data.system import system_module
from rollflow.stream.net.dialler import Dialled, SocketPoll
from rollflow.stream.net.transport import Transport
from rollflow.stream.wire import Connection, ConnectionPhase, TcpAddress

resource = system_module("resource")

logger = logging.getLogger(__name__)

_PAUSE_S = 0.25  # until it is tried again whether there are descriptors for more connections
_SPARE = 64  # descriptors besides connections
_MOST_QUOTED = 300  # characters of what the other end says

C = TypeVar("C", bound=Connection)


@dataclass(slots=True, eq=False)
class Peer(Generic[C]):
    """Connection, and the transport that carries it.

    where      the other end, for people
    dialled    the address that it was reached at by a `Dialler`
    mask       events of the socket that are waited for; 0: it is not in a `PeerSet`
    """

    transport: Transport
    connection: C
    where: str
    dialled: Dialled | None = field(default=None, kw_only=True)
    mask: int = field(default=0, kw_only=True)

    def fileno(self) -> int:
        """The socket's descriptor; -1 once it is closed."""
        return self.transport.fileno()


P = TypeVar("P", bound=Peer[Any])


class PeerSet(Generic[P]):
    """Peers, oldest first. Once there is a set, rollflow's warnings carry the time: see `add_times`.

    poll    waits for their sockets
    """

    def __init__(self, poll: SocketPoll) -> None:
        add_times()
        self._poll = poll
        self._by_fd: dict[int, P] = {}
        self._by_connection: dict[int, P] = {}
        self._strangers: list[P] = []  # that had not proved themselves when somebody last came or went

    def __iter__(self) -> Iterator[P]:
        """Peers that there are now; they may be dropped meanwhile."""
        return iter(list(self._by_fd.values()))

    def __len__(self) -> int:
        return len(self._by_fd)

    def at(self, fd: int) -> P | None:
        """The peer on a descriptor."""
        return self._by_fd.get(fd)

    def of(self, connection: Connection) -> P | None:
        """The peer of a connection, until it is dropped."""
        return self._by_connection.get(id(connection))

    def add(self, peer: P) -> None:
        """Take a peer, and begin with what there is to send."""
        peer.mask = select.POLLIN
        self._strangers = [*self._in_handshake(), peer]
        self._by_fd[peer.fileno()] = self._by_connection[id(peer.connection)] = peer
        self._poll.register(peer.fileno(), peer.mask)
        self.write(peer)

    def write(self, peer: P) -> None:
        """Send what there is to send, as much as the socket takes, and wait for it to take the rest."""
        if not peer.mask:
            return
        peer.transport.write()
        mask = select.POLLIN | (select.POLLOUT if peer.transport.waits_to_write else 0)
        if mask != peer.mask:  # reading sends as well where bytes are encrypted: what was waited for says nothing
            peer.mask = mask
            self._poll.modify(peer.fileno(), mask)

    def drop(self, peer: P, until: Callable[[], float] | None = None) -> bool:
        """Send what may be a last word, and close, as `Transport.close` does; False: that has been done before."""
        if not peer.mask:
            return False
        peer.transport.write()
        peer.mask = 0
        self._strangers = self._in_handshake()
        del self._by_connection[id(peer.connection)]
        del self._by_fd[peer.fileno()]
        self._poll.unregister(peer.fileno())
        peer.transport.close(until)
        return True

    def crowd_out(self, most: int) -> P | None:
        """Refuse the oldest peer that is still in the handshake, where there are so many; it is to be dropped."""
        strangers = self._in_handshake()
        if len(strangers) < most:
            return None
        oldest = strangers[0]  # it has had the most time
        oldest.connection.refuse("busy", f"{most} connections have not proved themselves, expected fewer")
        return oldest

    def _in_handshake(self) -> list[P]:
        """Peers that have not proved themselves, the oldest first."""
        return [peer for peer in self._strangers if peer.mask and peer.connection.phase is ConnectionPhase.HANDSHAKE]

    def close(self) -> None:
        """Close the sockets, whatever there is still to send."""
        for peer in self._by_fd.values():
            peer.transport.close()


def check_descriptors(connections: int) -> None:
    """Warn where so many connections are expected, and this process may not have as many descriptors."""
    try:
        most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    except OSError:  # this system has no such limit
        return
    if most < connections + _SPARE:
        logger.warning(
            "%d connections are expected, and this process may have %d descriptors; expected %d or more: ulimit -n",
            connections,
            most,
            connections + _SPARE,
        )


class ListeningSockets:
    """Sockets that are listened on.

    poll    waits for them
    """

    def __init__(self, poll: SocketPoll) -> None:
        self._listening: dict[int, socket.socket] = {}
        self._paused: dict[int, float] = {}  # descriptor -> until when it is not waited for
        self._poll = poll

    def add(self, sockets: Sequence[socket.socket]) -> None:
        """Accept by more sockets."""
        for sock in sockets:
            self._listening[sock.fileno()] = sock
            self._poll.register(sock.fileno(), select.POLLIN)

    def __contains__(self, fd: int) -> bool:
        return fd in self._listening

    @property
    def due(self) -> float | None:
        """Time at which `listen_again` is to be called; None: it need not be."""
        return min(self._paused.values(), default=None)

    def accept(self, fd: int, now: float) -> tuple[socket.socket, str] | None:
        """A connected socket, and where its other end is; None: there is none, or none can be taken now."""
        try:
            sock, where = self._listening[fd].accept()
        except BlockingIOError:
            return None
        except OSError as error:  # no descriptors left, as a rule: to be tried again, but not at once
            logger.warning("a connection can't be taken: %s", error)
            if self._listening[fd].fileno() < 0:  # its owner has closed it
                del self._listening[fd]
                with suppress(OSError):  # an epoll has forgotten it already
                    self._poll.unregister(fd)
                return None
            self._poll.unregister(fd)
            self._paused[fd] = now + _PAUSE_S
            return None
        return sock, str(TcpAddress(where[0], where[1])) if isinstance(where, tuple) else "a Unix socket"

    def listen_again(self, now: float) -> None:
        """Wait again for sockets that could not accept for a while."""
        for fd in [fd for fd, due in self._paused.items() if due <= now]:
            del self._paused[fd]
            self._poll.register(fd, select.POLLIN)

    def close(self) -> None:
        """Unregister the sockets. Their owner closes them."""
        for fd in self._listening.keys() - self._paused.keys():
            self._poll.unregister(fd)


def quoted(text: object) -> str:
    """An error text as part of a log line: escaped and cut, for the text may be a stranger's."""
    return "".join(
        letter if letter.isascii() and letter.isprintable() else letter.encode("unicode_escape").decode()
        for letter in str(text)[:_MOST_QUOTED]
    )


def refusal_level(connection: Connection) -> int:
    """Level at which the end of a connection is logged that has not proved itself.

    Whoever closes it without a word has looked whether somebody listens, as a cluster does again and again: DEBUG.
    """
    is_probe = connection.is_new and connection.error is not None and connection.error.code == "lost"
    return logging.DEBUG if is_probe else logging.WARNING


class LastResort(logging.Handler):
    """Handler that writes warnings to stderr, with the time, while nobody else handles them.

    Python's own last resort writes them without the time. `logging.basicConfig` puts both out of work.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.setFormatter(logging.Formatter("%(asctime)s %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record, unless the program has handlers of its own."""
        if logging.getLogger().handlers or len(logging.getLogger("rollflow").handlers) > 1:
            return
        try:
            sys.stderr.write(f"{self.format(record)}\n")
        except Exception:
            self.handleError(record)


def add_times() -> None:
    """Have rollflow's warnings carry the time in a program that has set up no log; done once."""
    log = logging.getLogger("rollflow")
    if not any(isinstance(handler, LastResort) for handler in log.handlers):
        log.addHandler(LastResort())
