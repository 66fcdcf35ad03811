"""Connections and their sockets: what is waited for, who is let in."""

import logging
import select
import socket
import ssl
import threading
from collections.abc import Callable
from time import monotonic

import pytest
from wire_ends import PassingEnd

from rollflow.stream.net import transport
from rollflow.stream.net.socket_loop import Peer, SocketLoop, refusal_level
from rollflow.stream.net.transport import TlsTransport
from rollflow.stream.wire import Connection, Limits


def test_nothing_is_waited_for_to_be_written_once_reading_has_sent_it(certificates: dict[str, ssl.SSLContext]) -> None:
    here, there = socket.socketpair()
    connection = PassingEnd(Limits(), 0.0, 1 << 20)
    lines: SocketLoop[Peer[Connection]] = SocketLoop(None)  # type: ignore[arg-type]
    line = Peer(TlsTransport(here, connection, certificates["server"], dialled=None), connection, "there")
    client = certificates["client"].wrap_socket(
        there, server_hostname="127.0.0.1", do_handshake_on_connect=False, suppress_ragged_eofs=False
    )
    shaking = threading.Thread(target=client.do_handshake)
    shaking.start()
    lines.add(line)
    while shaking.is_alive() or not line.transport._is_agreed:  # type: ignore[attr-defined]
        if lines.wait(0.05):
            line.transport.read(monotonic())
            lines.write(line)
    shaking.join()
    connection._queue([bytes(8 << 20)])
    lines.write(line)
    assert line.mask & select.POLLOUT
    left = 8 << 20
    while left:
        left -= len(client.recv(1 << 20))
        line.transport.read(monotonic())  # as where something comes while something is left to be sent
    lines.write(line)
    assert connection.undelivered == 0
    assert lines.wait(0) == []
    lines.drop(line)
    lines.close()
    client.close()


def test_what_is_much_is_sent_bit_by_bit_and_others_have_their_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "_MOST_SENT", 1000)
    here, there = socket.socketpair()
    connection = PassingEnd(Limits(), 0.0, 1 << 20)
    line = transport.Transport(here, connection)
    connection._queue([bytes(600), memoryview(bytes(range(250)) * 10), bytes(1)])
    came = []
    while connection.undelivered:
        line.write()
        assert line.waits_to_write == bool(connection.undelivered)
        came.append(there.recv(1 << 20))
    assert [len(data) for data in came] == [1000, 1000, 1000, 101]
    assert b"".join(came) == bytes(600) + bytes(range(250)) * 10 + bytes(1)
    line.close()
    there.close()


def test_what_comes_while_the_last_words_are_on_their_way_does_not_cut_them_off() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        here, there = socket.create_connection(server.getsockname()), server.accept()[0]
    there.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)  # or the system may have room for all of it
    connection = PassingEnd(Limits(), 0.0, 1 << 20)
    line = transport.Transport(here, connection)
    connection._queue([bytes(16 << 20)])  # more than the sockets hold
    line.write()
    connection.refuse("failed", "it broke")
    size = connection.undelivered
    assert size
    until = monotonic() + 60.0
    closing = threading.Thread(target=line.close, args=(lambda: until,))
    closing.start()
    received = 0
    while data := there.recv(1 << 20):
        received += len(data)
        there.sendall(bytes(1000))  # as a trainer acknowledges
    assert connection.undelivered == 0
    assert received >= size
    assert closing.is_alive()  # it waits for the other end to close as well
    there.close()
    closing.join()
    assert line.fileno() == -1


def test_the_other_end_has_only_so_much_time_to_close() -> None:
    here, there = socket.socketpair()
    line = transport.Transport(here, PassingEnd(Limits(), 0.0, 1 << 20))
    until = monotonic() + 0.01
    line.close(lambda: until)
    assert line.fileno() == -1
    assert there.recv(1) == b""
    there.close()


@pytest.mark.parametrize(
    ("ends", "level"),
    [
        (lambda end: end.ended(), logging.DEBUG),
        (lambda end: (end.receive(b"\0", 0.0), end.ended()), logging.WARNING),
        (lambda end: end.tick(1e6), logging.WARNING),
        (lambda end: end.refuse("busy", "no room"), logging.WARNING),
    ],
    ids=["it was closed without a word", "with a byte", "it was silent for too long", "it was refused"],
)
def test_a_look_whether_somebody_listens_is_no_warning(ends: Callable[[Connection], object], level: int) -> None:
    end = PassingEnd(Limits(), 0.0, 1 << 20)
    ends(end)
    assert refusal_level(end) == level
