"""A looker for tests, which stays connected."""

import secrets
import socket
from collections import deque
from time import monotonic
from typing import Any

from rollflow.stream.wire import ConnectionBroken, Goodbye, Inspect, Limits, LookerConnection, Snapshots, Welcome


class RawLooker:
    """A looker that is connected to a TCP address; it looks when it is told to.

    limits    of this end
    secret    that both ends know; None: there is none
    """

    def __init__(self, address: str, limits: Limits | None = None, secret: bytes | None = None) -> None:
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        self.sock = socket.create_connection((host, int(port)), timeout=30.0)
        limits = Limits() if limits is None else limits
        self.connection = LookerConnection("raw", secrets.token_bytes, secret=secret, limits=limits, now=monotonic())
        self._events: deque[Any] = deque()
        self._is_welcome = False

    def next_event(self) -> Any:
        """Wait for the connection's next event; None where the other end has hung up."""
        while not self._events:
            for buffer in self.connection.outgoing():
                self.sock.sendall(buffer)
            data = self.sock.recv(1 << 16)
            self._events += self.connection.receive(data, monotonic()) if data else [None]
        return self._events.popleft()

    def welcome(self) -> None:
        """Wait until the other end has taken this one in. Raises WireError where it does not."""
        event = self.next_event()
        if isinstance(event, ConnectionBroken):
            raise event.error
        assert isinstance(event, Welcome), event
        self._is_welcome = True

    def look(self) -> list[dict[str, Any]]:
        """Ask for snapshots, and wait for them. Raises WireError where they are refused."""
        if not self._is_welcome:
            self.welcome()
        self.connection.tell(Inspect(0))
        event = self.next_event()
        if isinstance(event, ConnectionBroken):
            raise event.error
        assert isinstance(event, Snapshots), event
        return event.runs()

    def goodbye(self) -> str:
        """Wait until the other end says goodbye: its reason."""
        event = self.next_event()
        assert isinstance(event, Goodbye), event
        return event.reason

    def close(self) -> None:
        """Hang up."""
        self.sock.close()
