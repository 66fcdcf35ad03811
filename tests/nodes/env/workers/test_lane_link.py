"""Frames to a worker: they come in order with their descriptors, and none is waited for that does not read."""

import os
import selectors
import socket
import tempfile
from collections.abc import Iterator

import pytest

from rollflow.nodes.env.env_source import lane_makers
from rollflow.nodes.env.environments import Environments
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


@pytest.mark.wait_times(close_s=0.05)
def test_a_worker_that_takes_no_frames_has_gone(ends: Ends) -> None:
    link, _, _ = ends
    for _ in range(2000):  # more than the socket has room for
        link.send(frame(FrameKind.TURN))
    assert link.receive() is None
