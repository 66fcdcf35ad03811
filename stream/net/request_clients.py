"""Request clients: those that a server of requests knows, across their connections."""

import logging
import secrets
import socket
import ssl
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from time import monotonic
from typing import NamedTuple

from rollflow.stream import wire
from rollflow.stream.data.errors import WireError, error_text
from rollflow.stream.net.dialler import Dialled
from rollflow.stream.net.socket_loop import SocketLoop
from rollflow.stream.net.sockets import Peer, quoted, refusal_level
from rollflow.stream.net.transport import transport_for

logger = logging.getLogger(__name__)

MOST_STRANGERS = 256  # connections that have not proved themselves yet


@dataclass(slots=True, eq=False)
class ClientPeer(Peer[wire.ReplayConnection]):
    """Connection of a client; `client` is None until it has been taken in."""

    client: "RequestClient | None" = None


@dataclass(eq=False)
class RequestClient:
    """A client that has proved itself; it may come back by another connection until its grace is over.

    peer       its newest connection
    lost_at    when that was lost; None: it is there
    """

    name: str
    session: wire.ServerSession
    peer: ClientPeer
    lost_at: float | None = None


class ServerOptions(NamedTuple):
    """Options of a server, the same for every client.

    software       of this end, for people
    max_clients    more are refused
    window         requests that a client may have under way
    """

    secret: bytes | None
    tls: ssl.SSLContext | None
    limits: wire.Limits
    software: str
    max_clients: int
    window: int

    def greet(self, sock: socket.socket, where: str, now: float, dialled: Dialled | None) -> ClientPeer:
        """Peer of a socket with a client at its other end, which has to prove itself."""
        nonce = secrets.token_bytes(wire.NONCE_BYTES)
        connection = wire.ReplayConnection(
            software=self.software, nonce=nonce, secret=self.secret, limits=self.limits, now=now
        )
        return ClientPeer(transport_for(sock, connection, self.tls, dialled=None), connection, where)


class RequestClients:
    """Clients of one server; all methods are for the thread that serves.

    loop       of their sockets; `fail` is for it, and `greet` of the options
    forgot     called with each client that is known no longer
    """

    def __init__(
        self,
        loop: SocketLoop[ClientPeer],
        options: ServerOptions,
        forgot: Callable[[RequestClient], object],
    ) -> None:
        self._loop, self._options, self._forgot = loop, options, forgot
        self._grace_s = options.limits.grace_s
        self._clients: dict[bytes, RequestClient] = {}

    def __len__(self) -> int:
        return len(self._clients)

    def __contains__(self, client: RequestClient) -> bool:
        return self._clients.get(client.session.token) is client

    def __iter__(self) -> Iterator[RequestClient]:
        return iter(list(self._clients.values()))

    @property
    def due(self) -> float | None:
        """Time at which `tick` is to be called; None: it need not be."""
        lost = [each.lost_at for each in self if each.lost_at is not None]
        return min(lost) + self._grace_s if lost else None

    def tick(self, now: float) -> None:
        """Forget clients that have had their time to come back."""
        for client in self:
            if client.lost_at is not None and now >= client.lost_at + self._grace_s:
                self.forget(client)

    def take(self, peer: ClientPeer, event: wire.Message) -> RequestClient | None:
        """Take a client in, or let it go; the client that a message is from, None: there is nothing else to do.

        Raises WireError where there are too many.
        """
        if isinstance(event, wire.Hello):
            self._take_in(peer, event)
            return peer.client
        client = peer.client
        if client is None or client.peer is not peer:
            return None
        if isinstance(event, wire.Goodbye):
            self._loop.drop(peer)
            self.forget(client)
            return None
        return client

    def answer(self, client: RequestClient, answer: wire.Result, refusal: Callable[[WireError], wire.Result]) -> None:
        """Answer a request.

        refusal    makes the answer in place of one that can't be sent
        """
        connection = client.peer.connection
        try:
            try:
                connection.answer(answer)
            except WireError as error:
                if error.code == "undelivered":
                    raise
                connection.answer(refusal(error))
        except WireError as error:
            self._loop.fail(client.peer, error, monotonic())
        else:
            self._loop.peers.write(client.peer)

    def forget(self, client: RequestClient) -> None:
        """Know a client no longer."""
        if client in self:
            del self._clients[client.session.token]
            self._forgot(client)

    def _take_in(self, peer: ClientPeer, hello: wire.Hello) -> None:
        """Take in a client that has proved itself: a new one, or one that comes back. Raises WireError if too many."""
        client = self._clients.get(hello.session)
        if client is None:
            self._make_room()
            client = RequestClient(hello.name, wire.ServerSession(hello.session, self._options.window), peer)
            peer.connection.welcome(client.session)
            self._clients[hello.session] = client
        else:
            peer.connection.welcome(client.session)
            older, client.peer, client.lost_at = client.peer, peer, None
            self._loop.drop(older)
        peer.client = client

    def _make_room(self) -> None:
        most = self._options.max_clients
        if len(self._clients) < most:
            return
        lost = [each for each in self if each.lost_at is not None]
        if not lost:
            raise WireError(f"{most} clients are served already, expected fewer", "busy")
        self.forget(min(lost, key=lambda each: each.lost_at or 0.0))

    # What the loop asks for

    def fail(self, peer: ClientPeer, error: Exception, now: float) -> None:
        """Refuse a client that something has failed for; it may come back."""
        code = error.code if isinstance(error, WireError) else "message"
        reason = error_text(error)
        peer.connection.refuse(code, reason)
        client = peer.client
        if client is None:
            level = refusal_level(peer.connection)
            logger.log(level, "a connection from %s is refused: %s", peer.where, quoted(reason))
        elif client.peer is peer and client.lost_at is None:
            client.lost_at = now
            role = peer.connection.roles[1]
            logger.info("%s %s at %s is lost: %s", role, quoted(client.name), peer.where, quoted(reason))
