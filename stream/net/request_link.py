"""Request link: the client's end of requests and answers, over connections that may break, in a thread of its own."""

import logging
import secrets
import socket
import ssl
import threading
from collections.abc import Callable
from time import monotonic
from typing import Any

from rollflow.stream import wire
from rollflow.stream.data.errors import ReplayError, WireError
from rollflow.stream.net.backoff import WaitReminder
from rollflow.stream.net.dialler import Dialled
from rollflow.stream.net.socket_loop import Peer, SocketLoop, quoted
from rollflow.stream.net.transport import transport_for
from rollflow.stream.wire.software import hello_of

logger = logging.getLogger(__name__)

# Codes of errors after which the server is dialled again.
_COMES_BACK = ("lost", "silent", "undelivered", "handshake", "busy", "session")


class RequestLink:
    """Asks a server, from any number of threads, until it is closed. A connection that breaks is dialled again.

    timeout_s         that an answer is waited for
    name              of this end, for people

    changed    condition, notified whenever something has come
    session    memory of the requests
    loop       of the sockets
    """

    def __init__(
        self,
        address: wire.Address,
        *,
        secret: bytes | None,
        tls: ssl.SSLContext | None,
        limits: wire.Limits,
        timeout_s: float,
        name: str,
    ) -> None:
        self._address, self._secret, self._tls, self._limits = address, secret, tls, limits
        self._timeout_s, self._name = timeout_s, name
        self.session = wire.ClientSession(secrets.token_bytes(wire.SESSION_BYTES))
        self._results: dict[int, wire.Result | None] = {}  # by the number of the request; None: it has not come
        self._fatal: Exception | None = None
        self._is_closing = False
        self.loop: SocketLoop[Peer[wire.SamplerConnection]] = SocketLoop(self)
        self.loop.dial([address])
        self.changed = threading.Condition(self.loop.lock)  # of all of the above
        self._thread = threading.Thread(target=self._run, name=f"rollflow sampler of {address}", daemon=True)
        self._thread.start()

    def ask(self, make: Callable[[int, int], wire.Query], until: float) -> wire.Result:
        """Send a request, and wait for its answer until a time.

        make    makes the request of its number, and the number up to which all are answered
        """
        with self.changed:
            self.wait(until, lambda: self.session.may_ask)
            request = make(self.session.number + 1, self.session.done)
            self._send(request)
            results, number = self._results, request.number
            results[number] = None
            try:
                self.wait(until, lambda: results[number] is not None)
            except BaseException:
                self.session.drop(number)
                raise
            finally:
                result = results.pop(number)
            assert result is not None
            return result

    @property
    def is_connected(self) -> bool:
        """True while the server has taken this client in, by a connection that is there."""
        return any(peer.connection.phase is wire.ConnectionPhase.RUNNING for peer in self.loop.peers)

    def wait(self, until: float, is_there: Callable[[], bool]) -> None:
        """Wait, with the lock held, until something is there. Raises what has ended the link, or ReplayError."""
        patience: WaitReminder | None = None  # as a rule it is there
        while not is_there():
            if self._fatal is not None:
                raise self._fatal
            if self._is_closing:
                raise ReplayError("this client is closed")
            patience = patience or WaitReminder(until - monotonic())
            if patience.is_over:
                raise ReplayError(self._server(f"has not answered within {self._timeout_s:g} s"))
            self.changed.wait(patience.left)
            if not is_there() and patience.is_long:
                state = "has not answered yet" if self.is_connected else "is away"
                logger.warning("waiting for %.0f s: %s", patience.waited_s, self._server(state))

    def close(self) -> None:
        """Say goodbye; requests under way raise ReplayError."""
        with self.changed:
            self._is_closing = True
            self.changed.notify_all()
        self.loop.wakeup.ring()
        self._thread.join()

    def _send(self, request: wire.Query) -> None:
        """Send a request by the connection that there is, or have the next one send it."""
        peer = next((each for each in self.loop.peers if each.connection.is_open), None)
        if peer is None or peer.connection.phase is not wire.ConnectionPhase.RUNNING:
            self.session.ask(request)
            return
        try:
            peer.connection.ask(request)
        except WireError as error:
            if error.code != "undelivered":
                raise
            self.loop.fail(peer, error, monotonic())
        self.loop.write(peer)
        if peer.transport.waits_to_write or not peer.connection.is_open:
            self.loop.wakeup.ring()

    def _server(self, text: str) -> str:
        """What is said of the server, with the problems of its connections."""
        problems = "; ".join(self.loop.dialler.problems)
        return f"the replay host at {self._address} {text}{problems and ': '}{problems}"

    # In the thread

    def _run(self) -> None:
        try:
            self.loop.tick(monotonic())
            while not self._is_closing and self._fatal is None:
                ready = self.loop.wait_until()
                now = monotonic()
                self.loop.serve(ready, now)
                self.loop.tick(now)
        except Exception as error:
            self._fatal = error
        with self.changed:
            for peer in self.loop.peers:
                peer.connection.goodbye("the client is closed")
                self.loop.drop(peer)
            self.changed.notify_all()
        self.loop.close()

    # What the loop asks for

    def greet(
        self, sock: socket.socket, where: str, now: float, dialled: Dialled | None
    ) -> Peer[wire.SamplerConnection]:
        """Peer of a socket with a server at its other end, which is told hello."""
        assert dialled is not None
        nothing: dict[str, Any] = {"observation_space": {}, "action_space": {}, "autoreset": "DISABLED", "metadata": {}}
        hello = hello_of("sampler", self._name[:256], self.session.token, self._limits, slots=(1,), **nothing)
        connection = wire.SamplerConnection(hello, self.session, secret=self._secret, limits=self._limits, now=now)
        transport = transport_for(sock, connection, self._tls, dialled=dialled.address)
        return Peer(transport, connection, where, dialled=dialled)

    def handle(self, peer: Peer[wire.SamplerConnection], event: wire.Message, now: float) -> None:
        """Take a message of the server."""
        with self.changed:
            match event:
                case wire.Result():
                    if event.number in self._results:  # else whoever asked waits no more
                        self._results[event.number] = event
                case wire.Welcome():
                    self.loop.dialler.welcomed(peer.dialled)
                case wire.Goodbye():
                    logger.info("%s says goodbye: %s", peer.where, event.reason)
                    if peer.dialled is not None:
                        peer.dialled.problem = f"it has said goodbye: {quoted(event.reason)}"
                    self.loop.drop(peer)
            self.changed.notify_all()

    def fail(self, peer: Peer[wire.SamplerConnection], error: Exception, now: float) -> None:
        """Have the server dialled again, or end where that is of no use."""
        if isinstance(error, WireError) and error.code in _COMES_BACK:
            if peer.dialled is not None:
                peer.dialled.problem = str(error)
            peer.connection.refuse(error.code, str(error))
            logger.info("%s: %s; it is dialled again", peer.where, error)
        else:
            peer.connection.refuse(getattr(error, "code", "message"), str(error))
            self._fatal = error
