"""Frames to a worker: they come in order with their descriptors, and one that does not read is lost."""

import os
import selectors
import socket
import tempfile
import threading
from collections.abc import Iterator

import pytest

from rollflow.nodes.env.env_source import lane_makers
from rollflow.nodes.env.environments import Environments
from rollflow.nodes.env.workers import worker_node
from rollflow.nodes.env.workers.frames import FrameKind, frame, receive_frame
from rollflow.nodes.env.workers.process_environments import EnvLink

Ends = tuple[EnvLink, socket.socket, selectors.BaseSelector]


@pytest.fixture
def ends() -> Iterator[Ends]:
    ours, theirs = socket.socketpair()
    [maker] = lane_makers("CartPole-v1", 1, None)
    with ours, theirs, selectors.DefaultSelector() as selector:
        link = EnvLink(0, maker, Environments("CartPole-v1"))
        link.connect(ours, selector, print)
        yield link, theirs, selector


def test_frames_come_in_order_with_their_descriptors(ends: Ends) -> None:
    link, theirs, _ = ends
    with tempfile.TemporaryFile() as file:
        link.send(frame(FrameKind.MAKE, number=7), file.fileno())
        link.send(frame(FrameKind.TURN))
        came = receive_frame(theirs)
        assert (came.kind, came.number) == (FrameKind.MAKE, 7)
        assert os.path.sameopenfile(came.fd, file.fileno())
        os.close(came.fd)
    assert receive_frame(theirs).kind is FrameKind.TURN
    assert link.receive() == []


def test_a_worker_that_has_gone_is_found_by_reading(ends: Ends) -> None:
    link, theirs, _ = ends
    theirs.close()
    link.send(frame(FrameKind.TURN))
    assert link.receive() is None


def test_what_a_full_socket_has_no_room_for_comes_in_order_once_the_worker_reads(ends: Ends) -> None:
    link, theirs, _ = ends
    came = []
    reads = threading.Timer(0.05, lambda: came.extend(receive_frame(theirs).number for _ in range(2000)))
    reads.start()
    for number in range(2000):
        link.send(frame(FrameKind.FREE, number=number))
    reads.join()
    assert came == list(range(2000))


def test_a_worker_that_reads_nothing_is_lost(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_node, "_ROOM_MS", 1)
    link, _, _ = ends
    while link.receive() is not None:
        link.send(frame(FrameKind.TURN))
    link.send(frame(FrameKind.TURN))
