"""A large message that takes far longer than three heartbeats, because of the line: nobody is given up for that."""

import select
import socket
import ssl
from collections.abc import Iterator

import numpy as np
import pytest
from wire_ends import PassingEnd

from rollflow.stream.net.transport import TlsTransport, Transport
from rollflow.stream.wire import ConnectionPhase, Event, Limits, TcpAddress, Weights

SIZE, A_BEAT = 8 << 20, 256 << 10  # bytes of the message, and of what the line carries in a heartbeat
ROOM = 64 << 10  # bytes that may lie at the line's near end


def pair_of_sockets() -> tuple[socket.socket, socket.socket]:
    with socket.socket() as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, ROOM)
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        dialled = socket.create_connection(listening.getsockname())
        accepted, _ = listening.accept()
    return dialled, accepted


def carry(near: socket.socket, far: socket.socket, end: socket.socket, patience: float) -> None:
    """Carry a little of what comes within so many seconds over to the other side of the line, to its end."""
    if select.select([near], [], [], patience)[0]:
        far.sendall(near.recv(ROOM))
        select.select([end], [], [])  # for the system has timers of its own


@pytest.fixture
def sockets() -> Iterator[list[socket.socket]]:
    """The sender's and the line's near end, the line's far end and the taker's."""
    ends = [*pair_of_sockets(), *pair_of_sockets()]
    yield ends
    for end in ends:
        end.close()


@pytest.mark.parametrize("is_encrypted", [False, True])
def test_a_slow_line_is_no_silence(
    is_encrypted: bool, certificates: dict[str, ssl.SSLContext], sockets: list[socket.socket]
) -> None:
    mine, near, far, theirs = sockets
    sender, taker = PassingEnd(Limits(), 0.0, 1 << 20), PassingEnd(Limits(), 0.0, 1 << 30)
    here: Transport
    there: Transport
    if is_encrypted:
        here = TlsTransport(mine, sender, certificates["client"], dialled=TcpAddress("127.0.0.1", 1))
        there = TlsTransport(theirs, taker, certificates["server"], dialled=None)
    else:
        here, there = Transport(mine, sender), Transport(theirs, taker)
    sender.phase = taker.phase = ConnectionPhase.RUNNING
    now, taken = 0.0, list[Event]()
    sender._send(Weights(1, {"w": np.zeros(SIZE, np.uint8)}, {}, {}))
    for beat in range(10 * SIZE // A_BEAT):  # noqa: B007  # which is counted
        for _ in range(A_BEAT // ROOM):
            here.write()
            carry(near, far, theirs, 10.0 if sender.undelivered + sender.queued() else 0.0)
            taken += there.read(now)
            there.write()
            carry(far, near, mine, 0.0)
            here.read(now)
        if taken and not sender._unanswered:  # what was asked behind it is answered
            break
        now += sender.limits.heartbeat_s
        sender.tick(now)
        assert sender.is_open, sender.error
    assert beat > 10
    [weights] = taken
    assert isinstance(weights, Weights)
