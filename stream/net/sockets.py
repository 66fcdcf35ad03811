"""Peers, which are connections with their sockets, and how their ends are logged."""

import logging
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from rollflow.stream.net.dialler import Dialled
from rollflow.stream.net.transport import Transport
from rollflow.stream.wire import Connection

_MOST_QUOTED = 300  # characters of what the other end says

C = TypeVar("C", bound=Connection)


@dataclass(slots=True, eq=False)
class Peer(Generic[C]):
    """Connection, and the transport that carries it.

    where      the other end, for people
    dialled    the address that it was reached at by a `Dialler`
    mask       events of the socket that are waited for; 0: it is in no loop
    """

    transport: Transport
    connection: C
    where: str
    dialled: Dialled | None = field(default=None, kw_only=True)
    mask: int = field(default=0, kw_only=True)

    def fileno(self) -> int:
        """The socket's descriptor; -1 once it is closed."""
        return self.transport.fileno()


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
