"""A gateway for tests, made by hand."""

import socket
from typing import Any

from remote_hosts import RawEnd

from rollflow.stream import wire
from rollflow.stream.wire.codec.handshake import NONCE_BYTES

PATIENT = wire.Limits(handshake_s=250.0, heartbeat_s=250.0)  # nobody is given up while a test runs


class RawGateway(RawEnd):
    """A gateway made by hand, to misbehave: a host's only lane has one slot."""

    connection: wire.GatewayConnection

    def __init__(self, address: str, limits: wire.Limits = PATIENT) -> None:
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(address.removeprefix("unix:"))
        nonce = bytes(NONCE_BYTES)
        super().__init__(sock, wire.GatewayConnection(nonce=nonce, secret=None, limits=limits, now=0.0))

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

    def next_event(self) -> Any:
        """Wait for the connection's next event, but for the progress of a rollout host."""
        while isinstance(event := super().next_event(), wire.Metrics):
            pass
        return event

    def ask(self, request: wire.Reset | wire.Step) -> wire.Rows:
        self.connection.ask(request)
        rows: wire.Rows = self.next_of(wire.Rows)
        return rows

    def end(self) -> None:
        self.connection.goodbye("done")
        self.flush()
        assert self.next_event() is None
        self.sock.close()
