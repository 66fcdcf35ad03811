"""A connection that somebody has made to a trainer."""

import secrets
import socket
import ssl
from dataclasses import dataclass

from rollflow.nodes.remote.lines import Line, quoted
from rollflow.nodes.remote.software import software
from rollflow.nodes.remote.transport import transport_for
from rollflow.sinks.trainer.shared.borrower import Borrower
from rollflow.sinks.trainer.shared.descriptor_transport import DescriptorTransport
from rollflow.sinks.trainer.source import Source
from rollflow.stream.wire import NONCE_BYTES, Limits, TrainerConnection


@dataclass(slots=True, eq=False)
class Peer(Line[TrainerConnection]):
    """A connection, and whose it is.

    source      None: it has not been taken in
    called      as the rollout at its other end calls itself; None: that has not proved itself
    borrower    of what is lent through it; None: nothing is
    """

    source: Source | None = None
    borrower: Borrower | None = None
    called: str | None = None

    @property
    def told(self) -> str:
        """Who it is, as far as that is known, for people."""
        return self.where if self.called is None else f"rollout {quoted(self.called)} at {self.where}"


def peer_on(
    sock: socket.socket,
    where: str,
    *,
    secret: bytes | None,
    tls: ssl.SSLContext | None,
    limits: Limits,
    shares: bool,
    now: float,
) -> Peer:
    """Whoever is at the other end of a socket, to be proved.

    shares    whether what comes is to be lent
    """
    nonce = secrets.token_bytes(NONCE_BYTES)
    connection = TrainerConnection(software=software(), nonce=nonce, secret=secret, limits=limits, now=now)
    if not shares:
        return Peer(transport_for(sock, connection, tls, dialled=None), connection, where)
    transport = DescriptorTransport(sock, connection)
    return Peer(transport, connection, where, borrower=Borrower(transport))
