"""The loop that owns sockets: its handler gets what comes, and learns of every connection that ends."""

import socket
from collections.abc import Iterator
from contextlib import ExitStack
from time import monotonic

import pytest
from wire_ends import PassingEnd, frame_as

from rollflow.stream.data.errors import WireError
from rollflow.stream.net.socket_loop import Peer, SocketLoop
from rollflow.stream.net.transport import Transport
from rollflow.stream.wire import ConnectionPhase, Goodbye, Limits, Message, Ping, Pong, Weights

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
