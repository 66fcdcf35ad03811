"""Peers, which are connections with their sockets."""

import logging
import select
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from rollflow.stream.net.dialler import Dialled, SocketPoll
from rollflow.stream.net.transport import Transport
from rollflow.stream.wire import Connection, ConnectionPhase

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
    """Peers, oldest first.

    poll    waits for their sockets
    """

    def __init__(self, poll: SocketPoll) -> None:
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
