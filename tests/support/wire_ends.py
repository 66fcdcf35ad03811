"""A gateway and a host in one place: what one sends is carried to the other by hand, some bytes at a time."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from wire_messages import GATEWAY_NONCE, SECRET, TOKEN, agents_hello, first_agent_rows, first_rows, hello

from rollflow.stream import wire
from rollflow.stream.data.errors import WireError


def taken_from(connection: wire.Connection) -> bytes:
    """Return the bytes that a connection has to send, reported as sent."""
    data = b"".join(connection.outgoing())
    connection.sent(len(data))
    return data


def frame_as(message: wire.Message) -> bytes:
    """The bytes of a message."""
    return b"".join(wire.encode(message))


def error_of(events: list[wire.Event]) -> WireError:
    """Why a connection broke: the last event."""
    assert isinstance(events[-1], WireError), events
    return events[-1]


def check_broken(events: list[wire.Event], code: str, told: str) -> None:
    """Assert that a connection broke, with an error of this code that says this."""
    error = error_of(events)
    assert error.code == code
    assert told in str(error)


@contextmanager
def refusing(code: str, told: str) -> Iterator[None]:
    """Expect an error of this code whose text matches."""
    with pytest.raises(WireError, match=told) as caught:
        yield
    assert caught.value.code == code


def told_by(connection: wire.Connection) -> wire.Refused:
    """The last thing that a connection has to say: why it refuses the other end."""
    data = taken_from(connection)
    refused = wire.decode(data[data.rindex(b"\x83\xa4kind\xa7refused") - 8 :])
    assert isinstance(refused, wire.Refused)
    return refused


def allocated(decoder: wire.FrameDecoder) -> int:
    """Bytes that a decoder has allocated for receiving."""
    return len(decoder._inbox) + len(decoder._large)


class PassingEnd(wire.Connection):
    """An end of a connection that hands on every message as it is."""

    roles = "gateway", "host"

    def _take(self, message: wire.Message, frame: Any) -> list[wire.Event]:
        return [message]  # type: ignore[list-item]


class Ends:
    """Both ends of one connection.

    session                    the gateway's, once the host was welcomed
    from_host, from_gateway    bytes on their way
    """

    def __init__(
        self,
        *,
        said: wire.Hello | None = None,
        host_session: wire.HostSession | None = None,
        host_secret: bytes | None = SECRET,
        gateway_secret: bytes | None = SECRET,
        limits: wire.Limits | None = None,
        now: float = 0.0,
    ) -> None:
        limits = limits or wire.Limits()
        self.now = now
        self.host_session = host_session or wire.HostSession(TOKEN)
        said = said or hello(session=self.host_session.token)
        self.host = wire.HostConnection(said, self.host_session, secret=host_secret, limits=limits, now=now)
        self.gateway = wire.GatewayConnection(
            software="rollflow 0.1", nonce=GATEWAY_NONCE, secret=gateway_secret, limits=limits, now=now
        )
        self.session: wire.GatewaySession | None = None
        self.from_host = self.from_gateway = b""

    def to_gateway(self, count: int | None = None) -> list[wire.Event]:
        """Carry bytes of the host to the gateway, all of them or so many."""
        self.from_host += taken_from(self.host)
        data, self.from_host = _split(self.from_host, count)
        return self.gateway.receive(data, self.now)

    def to_host(self, count: int | None = None) -> list[wire.Event]:
        """Carry bytes of the gateway to the host, all of them or so many."""
        self.from_gateway += taken_from(self.gateway)
        data, self.from_gateway = _split(self.from_gateway, count)
        return self.host.receive(data, self.now)


def greeted(**given: Any) -> Ends:
    """Two ends where the host has proved itself and waits for its welcome."""
    ends = Ends(**given)
    assert ends.to_gateway() == []
    assert ends.to_host() == []
    (said,) = ends.to_gateway()
    assert isinstance(said, wire.Hello)
    return ends


def running(**given: Any) -> Ends:
    """Two ends after the handshake, with a new session; lanes 0 and 1, …, of two environments each."""
    ends = greeted(**given)
    assert ends.gateway.hello is not None
    slots = ends.gateway.hello.slots
    first_slots = [sum(slots[:lane]) for lane in range(len(slots))]
    ends.session = wire.GatewaySession(TOKEN, ends.gateway.hello, range(len(slots)), first_slots)
    ends.gateway.welcome(ends.session)
    ends.to_host()
    return ends


def running_agents() -> Ends:
    """Two ends of environments with several agents, whose lane 0 has been reset; the answer is under way."""
    ends = running(said=agents_hello())
    return _reset(ends, first_agent_rows())


def running_reset(**given: Any) -> Ends:
    """Two ends whose lane 0 has been reset; the answer is under way."""
    return _reset(running(**given), first_rows())


def _reset(ends: Ends, answer: wire.Rows | wire.AgentRows) -> Ends:
    ends.gateway.ask(wire.Reset(0, 1, (1, 2), None))
    (request,) = ends.to_host()
    assert isinstance(request, wire.Reset)
    ends.host.answer(request, answer)
    return ends


class StreamEnds:
    """Both ends of one connection, after the handshake, of a sender that has given so many items, and its receiver."""

    def __init__(
        self,
        session: wire.SenderSession | None = None,
        known: wire.ReceiverSession | None = None,
        *,
        given: int = 0,
        credits: int = 0,
        accepts: str = "source",
        **said: Any,
    ) -> None:
        self.session = session or wire.SenderSession(TOKEN)
        self.session.given = max(given, self.session.given)
        self.known = known or wire.ReceiverSession(TOKEN)
        shared: dict[str, Any] = {"secret": SECRET, "limits": wire.Limits(), "now": 0.0}
        self.source = wire.SenderConnection(hello(**{"role": accepts, "slots": (1,), **said}), self.session, **shared)
        self.trainer = wire.ReceiverConnection(accepts=accepts, software="rollflow 0.1", nonce=GATEWAY_NONCE, **shared)
        self.to_trainer()
        self.to_source()
        self.events = self.to_trainer()
        if self.trainer.hello is not None:
            self.trainer.welcome(self.known, credits=credits)
            (self.welcome,) = self.to_source()

    def to_trainer(self) -> list[wire.Event]:
        """Carry all bytes of the source to the trainer."""
        return self.trainer.receive(taken_from(self.source), 0.0)

    def to_source(self) -> list[wire.Event]:
        """Carry all bytes of the trainer to the source."""
        return self.source.receive(taken_from(self.trainer), 0.0)


QUERY = wire.Fragment(0, 3, {"ids": np.array([7, 9])}, {"name": "update_priorities", "done": 2})


def asking() -> StreamEnds:
    """Both ends of one connection, after the handshake, of a sampler whose query 3 a replay host has to answer."""
    session = wire.SenderSession(TOKEN)
    session.given = session.done = session.kept = 2
    ends = StreamEnds(session, wire.ReceiverSession(TOKEN, 2, 8), accepts="sampler", credits=8)
    ends.source.ask(QUERY)
    return ends


def _split(data: bytes, count: int | None) -> tuple[bytes, bytes]:
    count = len(data) if count is None else count
    return data[:count], data[count:]
