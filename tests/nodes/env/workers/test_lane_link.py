"""Frames to a worker: they come in order with their descriptors, and none is waited for that does not read."""

import gc
import os
import selectors
import socket
import tempfile
from collections.abc import Iterator
from unittest.mock import MagicMock

import pytest

from rollflow.nodes.env.env_source import lane_makers
from rollflow.nodes.env.environments import Environments
from rollflow.nodes.env.workers.frames import FrameKind, frame, receive_frame
from rollflow.nodes.env.workers.process_environments import EnvLink
from rollflow.nodes.env.workers.worker_node import WorkerNode

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


def count_descriptors() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def test_what_a_full_socket_has_no_room_for_is_kept_and_comes_in_order_with_its_descriptors(ends: Ends) -> None:
    link, theirs, selector = ends
    before = count_descriptors()
    with tempfile.TemporaryFile() as file:
        for number in range(2000):
            link.send(frame(FrameKind.BLOCK, number=number), file.fileno() if number % 100 == 0 else -1)
    assert [key.events for key in selector.get_map().values()] == [selectors.EVENT_READ | selectors.EVENT_WRITE]
    came = []
    for _ in range(2000):
        came.append(receive_frame(theirs))
        list(WorkerNode._heard_from(MagicMock(), link))
    assert [each.number for each in came] == list(range(2000))
    assert [each.number for each in came if each.fd >= 0] == list(range(0, 2000, 100))
    assert [key.events for key in selector.get_map().values()] == [selectors.EVENT_READ]  # none is woken for room
    for each in came:
        each.discard()
    assert count_descriptors() == before


def test_what_is_kept_is_given_back_when_it_is_dropped(ends: Ends) -> None:
    link, _, selector = ends
    before = count_descriptors()
    while not link._kept:
        link.send(frame(FrameKind.TURN))
    with tempfile.TemporaryFile() as file:
        link.send(frame(FrameKind.BLOCK), file.fileno())
    assert count_descriptors() == before + 1
    link.disconnect(selector)
    assert count_descriptors() == before
