"""Connections, their sockets and the loop that owns them: what is waited for, who is let in, and every end."""

import logging
import select
import socket
import ssl
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from time import monotonic

import numpy as np
import pytest
from wire_ends import PassingEnd, frame_as

from rollflow.stream.data.errors import WireError
from rollflow.stream.net import transport
from rollflow.stream.net.socket_loop import Peer, SocketLoop, refusal_level
from rollflow.stream.net.transport import TlsTransport, Transport
from rollflow.stream.wire import (
    Connection,
    ConnectionPhase,
    Event,
    Goodbye,
    Limits,
    Message,
    Ping,
    Pong,
    TcpAddress,
    Weights,
)


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


@pytest.mark.parametrize("is_server", [False, True])
def test_what_comes_while_tls_begins_is_no_sign_of_an_end_without_it(
    certificates: dict[str, ssl.SSLContext], *, is_server: bool
) -> None:
    here, there = socket.socketpair()
    there.setblocking(False)
    one, another = ("server", "client") if is_server else ("client", "server")
    connection = PassingEnd(Limits(), 0.0, 1 << 20)
    dialled = None if is_server else TcpAddress("127.0.0.1", 1)
    line = TlsTransport(here, connection, certificates[one], dialled=dialled)
    other = certificates[another].wrap_socket(
        there,
        server_side=not is_server,
        server_hostname="127.0.0.1" if is_server else None,
        do_handshake_on_connect=False,
    )
    agree = line._tls.do_handshake

    def agree_late() -> None:
        """Agree, while the other end's next bytes come."""
        line._tls.do_handshake = agree  # type: ignore[method-assign]
        if is_server:
            with suppress(ssl.SSLWantReadError):
                other.do_handshake()
            agree()
            return
        with suppress(ssl.SSLWantReadError):
            agree()
        with suppress(ssl.SSLWantReadError):
            other.do_handshake()
        agree()

    line._tls.do_handshake = agree_late  # type: ignore[method-assign, assignment]
    for _ in range(9):
        line.write()
        assert line.read(0.0) == []
        with suppress(ssl.SSLWantReadError):
            other.do_handshake()
    assert connection.is_open
    assert line._is_agreed
    line.close()
    other.close()


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


EndPeer = Peer[PassingEnd]


class Owner:
    """Handler that keeps what it is given; it raises for weights of version 0."""

    def __init__(self) -> None:
        self.handled: list[Message] = []
        self.failed: list[tuple[EndPeer, Exception]] = []

    def connection(self, now: float) -> PassingEnd:
        return PassingEnd(Limits(heartbeat_s=1.0), now, 1 << 20)

    def handle(self, peer: EndPeer, event: Message, now: float) -> None:
        self.handled.append(event)
        if isinstance(event, Weights) and not event.version:
            raise KeyError("no version")

    def fail(self, peer: EndPeer, error: Exception, now: float) -> None:
        self.failed.append((peer, error))


class Looped:
    """A loop with two peers, and the sockets at their other ends."""

    def __init__(self, closing: ExitStack) -> None:
        self.owner = Owner()
        self.loop: SocketLoop[EndPeer] = SocketLoop(self.owner, max_strangers=2)
        closing.callback(self.loop.close)
        self.peers: list[EndPeer] = []
        self.others: list[socket.socket] = []
        for _ in range(2):
            here, there = socket.socketpair()
            self.others.append(closing.enter_context(there))
            connection = self.owner.connection(0.0)
            self.peers.append(Peer(Transport(here, connection), connection, "there"))
            self.peers[-1].connection.phase = ConnectionPhase.RUNNING
            self.loop.add(self.peers[-1])

    def send(self, place: int, message: Message) -> None:
        self.others[place].sendall(frame_as(message))

    def serve(self, now: float = 0.5) -> None:
        self.loop.serve(self.loop.wait(60), now)


@pytest.fixture
def looped() -> Iterator[Looped]:
    with ExitStack() as closing:
        yield Looped(closing)


def test_a_peer_whose_message_is_no_good_fails_and_the_others_go_on(looped: Looped) -> None:
    looped.send(0, Weights(0, {}, {}, {}))
    looped.send(0, Weights(1, {}, {}, {}))
    looped.send(1, Weights(2, {}, {}, {}))
    looped.serve()
    assert [weights.version for weights in looped.owner.handled] == [0, 2]  # type: ignore[attr-defined]
    [(peer, error)] = looped.owner.failed
    assert peer is looped.peers[0]
    assert isinstance(error, KeyError)
    assert list(looped.loop.peers) == looped.peers[1:]


def test_a_ping_is_answered_at_once_and_a_goodbye_closes_and_is_no_failure(looped: Looped) -> None:
    looped.send(0, Ping(7))
    looped.serve()
    assert looped.others[0].recv(1 << 10, socket.MSG_DONTWAIT) == frame_as(Pong(7))
    looped.send(0, Goodbye("done"))
    looped.serve()
    assert [type(event) for event in looped.owner.handled] == [Goodbye]
    assert looped.owner.failed == []
    assert looped.others[0].recv(1, socket.MSG_DONTWAIT) == b""
    assert list(looped.loop.peers) == looped.peers[1:]


def test_a_connection_that_is_lost_fails_by_its_own_error(looped: Looped) -> None:
    looped.others[0].close()
    looped.serve()
    [(peer, error)] = looped.owner.failed
    assert error is peer.connection.error
    assert isinstance(error, WireError)
    assert error.code == "lost"


def test_a_heartbeat_is_due_and_is_sent(looped: Looped) -> None:
    looped.loop.tick(0.9)
    assert [peer.connection._pings for peer in looped.peers] == [0, 0]
    looped.loop.tick(1.0)
    assert [other.recv(1 << 10) for other in looped.others] == 2 * [frame_as(Ping(1))]


def test_a_connection_that_another_thread_has_broken_is_found_out(looped: Looped) -> None:
    looped.peers[1].connection.refuse("undelivered", "too much")
    told: list[EndPeer] = []
    looped.loop.send(told.append)
    assert told == looped.peers[:1]
    looped.loop.tick(0.5)
    assert [(peer, str(error)) for peer, error in looped.owner.failed] == [(looped.peers[1], "host: too much")]


def test_a_peer_that_can_not_be_told_fails_and_the_others_are_told(looped: Looped) -> None:
    def tell(peer: EndPeer) -> None:
        if peer is looped.peers[0]:
            raise ValueError("nothing to tell")
        peer.connection._send(Goodbye("told"))

    looped.loop.send(tell)
    assert [peer for peer, _ in looped.owner.failed] == looped.peers[:1]
    assert looped.others[1].recv(1 << 10) == frame_as(Goodbye("told"))


def test_the_oldest_stranger_fails_where_too_many_come(looped: Looped) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, ExitStack() as closing:
        listener.setblocking(False)
        looped.loop.listen([listener])
        for _ in range(3):
            closing.enter_context(socket.create_connection(listener.getsockname()))
            looped.serve()
        [(stranger, error)] = looped.owner.failed
        assert str(error) == "host: 2 connections have not proved themselves, expected fewer"
        assert stranger.where.startswith("tcp://127.0.0.1:")
        assert len(list(looped.loop.peers)) == 4
        looped.loop.stop_listening()
        closing.enter_context(socket.create_connection(listener.getsockname()))
        assert looped.loop.wait(0) == []


def test_a_socket_that_nobody_can_greet_is_closed(looped: Looped) -> None:
    def rude(now: float) -> PassingEnd:
        raise KeyError(now)

    looped.owner.connection = rude  # type: ignore[method-assign]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        looped.loop.listen([listener])
        with socket.create_connection(listener.getsockname(), timeout=30) as other:
            with pytest.raises(KeyError) as raised:  # whose frames hold the socket
                looped.serve()
            assert other.recv(1) == b""
            assert raised.tb


def test_one_who_has_gone_before_it_is_greeted_disturbs_nothing(
    looped: Looped, certificates: dict[str, ssl.SSLContext]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        looped.loop.listen([listener], certificates["server"])
        with socket.create_connection(listener.getsockname()) as other:
            other.sendall(b"?")
            other.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # ends by a reset
        looped.serve()
        assert list(looped.loop.peers) == looped.peers
        with socket.create_connection(listener.getsockname()):
            looped.serve()
            assert len(looped.loop.peers) == 3


class Exhausted(socket.socket):
    is_exhausted = True

    def accept(self) -> tuple[socket.socket, object]:
        if self.is_exhausted:
            raise OSError(24, "Too many open files")
        return super().accept()


def test_a_listener_that_can_let_nobody_in_is_left_a_while(looped: Looped, caplog: pytest.LogCaptureFixture) -> None:
    with Exhausted() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        looped.loop.listen([listener])
        with socket.create_connection(listener.getsockname()):
            looped.serve(7.0)
            listener.is_exhausted = False
            looped.loop.tick(7.0)
            assert looped.loop.wait(0) == []
            looped.loop.tick(8.0)
            looped.serve(8.0)
            assert len(list(looped.loop.peers)) == 3
    assert "a connection can't be taken: [Errno 24] Too many open files" in caplog.text


def test_a_wait_ends_when_something_is_due_or_another_thread_wakes_it(looped: Looped) -> None:
    for peer in looped.peers:
        peer.connection._quiet_since = monotonic() + 1e3
    assert looped.loop.wait_until(monotonic()) == []
    looped.loop.wakeup.ring()
    ready = looped.loop.wait_until()
    assert [fd for fd, _ in ready] == [looped.loop.wakeup.fileno()]
    looped.loop.serve(ready, 0.5)
    assert looped.loop.wait(0) == []


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


def carry(near: socket.socket, far: socket.socket, end: Transport, patience: float) -> None:
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
            carry(near, far, there, 10.0 if sender.undelivered + sender.queued() else 0.0)
            taken += there.read(now)
            there.write()
            carry(far, near, here, 0.0)
            here.read(now)
        if taken and not sender._unanswered:  # what was asked behind it is answered
            break
        now += sender.limits.heartbeat_s
        sender.tick(now)
        assert sender.is_open, sender.error
    assert beat > 10
    here.close()
    there.close()
    [weights] = taken
    assert isinstance(weights, Weights)
