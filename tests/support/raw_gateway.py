"""A gateway for tests, made by hand."""

import socket
from collections import deque
from typing import Any

from rollflow.stream import wire
from rollflow.stream.data.errors import WireError

PATIENT = wire.Limits(handshake_s=250.0, heartbeat_s=250.0)  # nobody is given up while a test runs


class RawGateway:
    """A gateway made by hand, to misbehave: a host's only lane has one slot."""

    def __init__(self, address: str, limits: wire.Limits = PATIENT) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(address.removeprefix("unix:"))
        self.connection = wire.GatewayConnection(
            software="raw", nonce=bytes(wire.NONCE_BYTES), secret=None, limits=limits, now=0.0
        )
        self._events: deque[Any] = deque()

    def next_event(self) -> Any:
        """Wait for the connection's next event; None where the host has hung up."""
        while not self._events:
            self.flush()
            data = self.sock.recv(1 << 16)
            self._events += self.connection.receive(data, 0.0) if data else [None]
        return self._events.popleft()

    def next_of(self, kind: type[Any]) -> Any:
        """Wait for the next event, which is of this kind."""
        event = self.next_event()
        assert isinstance(event, kind), event
        return event

    def flush(self) -> None:
        for buffer in self.connection.outgoing():
            self.sock.sendall(buffer)

    def hello(self) -> wire.Hello:
        """Wait until the host has proved itself."""
        hello: wire.Hello = self.next_of(wire.Hello)
        return hello

    def welcome(self, session: wire.GatewaySession | None = None) -> wire.GatewaySession:
        """Take the host in, with a new session or one that goes on."""
        hello = self.connection.hello or self.hello()
        session = session or wire.GatewaySession(hello.session, hello, [0], [0])
        self.connection.welcome(session)
        self.flush()
        return session

    def ask(self, request: wire.Reset | wire.Step) -> wire.Rows:
        self.connection.ask(request)
        rows: wire.Rows = self.next_of(wire.Rows)
        return rows

    def refusal(self) -> WireError:
        """Wait until the host refuses: what it says."""
        error: WireError = self.next_of(wire.ConnectionBroken).error
        assert self.sock.recv(1) == b""
        self.sock.close()
        return error

    def end(self) -> None:
        self.connection.goodbye("done")
        self.flush()
        assert self.next_event() is None
        self.sock.close()
