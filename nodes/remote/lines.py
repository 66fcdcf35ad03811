"""Connections and the sockets that they are on, at either end of the wire."""

import logging
import select
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from rollflow.nodes.remote.transport import Transport
from rollflow.stream.wire import Connection, Phase, TcpAddress

logger = logging.getLogger(__name__)

_DEAF_S = 0.25  # until it is tried again whether there are descriptors for more connections
_MOST_QUOTED = 300  # characters of what the other end says

C = TypeVar("C", bound=Connection)


class Poll(Protocol):
    """A poll object of the system's, or an epoll."""

    def register(self, fd: int, eventmask: int = ..., /) -> None:
        """Tell of a descriptor from now on."""
        ...

    def modify(self, fd: int, eventmask: int, /) -> None:
        """Tell of other events."""
        ...

    def unregister(self, fd: int, /) -> None:
        """Tell of a descriptor no more."""
        ...


@dataclass(slots=True, eq=False)
class Line(Generic[C]):
    """A connection, and what carries it.

    where    the other end, for people
    mask     the events of the socket that are waited for; 0: it is not among `Lines`
    """

    transport: Transport
    connection: C
    where: str
    mask: int = 0

    def fileno(self) -> int:
        """The socket's descriptor; -1 once it is closed."""
        return self.transport.fileno()


L = TypeVar("L", bound=Line[Any])


class Lines(Generic[L]):
    """Lines, oldest first.

    poll    is told what to wait for
    """

    def __init__(self, poll: Poll) -> None:
        self._poll = poll
        self._by_fd: dict[int, L] = {}
        self._by_connection: dict[int, L] = {}

    def __iter__(self) -> Iterator[L]:
        """Those that there are now; they may be dropped meanwhile."""
        return iter(list(self._by_fd.values()))

    def at(self, fd: int) -> L | None:
        """The line on a descriptor."""
        return self._by_fd.get(fd)

    def of(self, connection: Connection) -> L | None:
        """The line of a connection, until it is dropped."""
        return self._by_connection.get(id(connection))

    def add(self, line: L) -> None:
        """Have a line, and begin with what there is to send."""
        line.mask = select.POLLIN
        self._by_fd[line.fileno()] = self._by_connection[id(line.connection)] = line
        self._poll.register(line.fileno(), line.mask)
        self.write(line)

    def write(self, line: L) -> None:
        """Send what there is to send, as much as the socket takes, and wait for it to take the rest."""
        if not line.mask:
            return
        line.transport.write()
        mask = select.POLLIN | (select.POLLOUT if line.transport.waits_to_write else 0)
        if mask != line.mask:  # reading sends as well where bytes are encrypted: what was waited for says nothing
            line.mask = mask
            self._poll.modify(line.fileno(), mask)

    def drop(self, line: L) -> bool:
        """Send what may be a last word, and close; False: that has been done before."""
        if not line.mask:
            return False
        line.transport.write()
        line.mask = 0
        del self._by_connection[id(line.connection)]
        del self._by_fd[line.fileno()]
        self._poll.unregister(line.fileno())
        line.transport.close()
        return True

    def crowd_out(self, most: int) -> L | None:
        """Refuse the oldest of those that are still in the handshake, where there are so many: it is to be dropped."""
        strangers = [line for line in self._by_fd.values() if line.connection.phase is Phase.HANDSHAKE]
        if len(strangers) < most:
            return None
        oldest = strangers[0]  # it has had the most time
        oldest.connection.refuse("busy", f"{most} connections have not proved themselves, expected fewer")
        return oldest

    def close(self) -> None:
        """Close the sockets, whatever there is still to say."""
        for line in self._by_fd.values():
            line.transport.close()


class Entrance:
    """Sockets that are listened on.

    poll    is told of them
    """

    def __init__(self, sockets: Sequence[socket.socket], poll: Poll) -> None:
        self._listening = {sock.fileno(): sock for sock in sockets}
        self._deaf: dict[int, float] = {}  # not listened to until then
        self._poll = poll
        for fd in self._listening:
            poll.register(fd, select.POLLIN)

    def __contains__(self, fd: int) -> bool:
        return fd in self._listening

    @property
    def due(self) -> float | None:
        """When `listen_again` is to be called; None: it need not be."""
        return min(self._deaf.values(), default=None)

    def accept(self, fd: int, now: float) -> tuple[socket.socket, str] | None:
        """Who has come, and from where; None: nobody, or nobody can be let in now."""
        try:
            sock, where = self._listening[fd].accept()
        except BlockingIOError:
            return None
        except OSError as error:  # no descriptors left, as a rule: to be tried again, but not at once
            logger.warning("a connection can't be taken: %s", error)
            self._poll.unregister(fd)
            self._deaf[fd] = now + _DEAF_S
            return None
        return sock, str(TcpAddress(where[0], where[1])) if isinstance(where, tuple) else "a Unix socket"

    def listen_again(self, now: float) -> None:
        """Listen where it was of no use for a while."""
        for fd in [fd for fd, due in self._deaf.items() if due <= now]:
            del self._deaf[fd]
            self._poll.register(fd, select.POLLIN)

    def close(self) -> None:
        """Wait for nobody any more; the sockets are others' to close."""
        for fd in self._listening.keys() - self._deaf.keys():
            self._poll.unregister(fd)


def quoted(words: object) -> str:
    """What is wrong, as part of a line for people: the words may be a stranger's."""
    return "".join(
        letter if letter.isascii() and letter.isprintable() else letter.encode("unicode_escape").decode()
        for letter in str(words)[:_MOST_QUOTED]
    )
