"""Outbox of a socket: what does not fit is kept in order, and nothing of it is dropped."""

import gc
import os
import selectors
import socket
import tempfile
from collections.abc import Iterator

import pytest

from rollflow.nodes.env.workers.frames import Frame, FrameKind, frame, frame_with, receive_frame
from rollflow.nodes.env.workers.lane_link import Outbox

Ends = tuple[Outbox, selectors.BaseSelector, socket.socket]


@pytest.fixture
def ends() -> Iterator[Ends]:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    with ours, theirs, selectors.DefaultSelector() as selector:
        selector.register(ours, selectors.EVENT_READ)
        yield Outbox(ours, selector), selector, theirs


def received(ends: Ends, count: int) -> list[Frame]:
    """The next frames at the other end, while ours sends whenever there is room."""
    outbox, selector, theirs = ends
    theirs.setblocking(False)
    data, frames = bytearray(), []
    while len(frames) < count:
        for _, events in selector.select(0):
            if events & selectors.EVENT_WRITE:
                outbox.flush()
        with_fds, fds, _, _ = socket.recv_fds(theirs, 1 << 16, 16)
        data += with_fds
        for fd in fds:
            os.close(fd)
        while len(data) >= 12:
            number = int.from_bytes(data[4:12], "little")
            end = 12 + (number if data[0] == FrameKind.LAYOUT else 0)
            if len(data) < end:
                break
            frames.append(Frame(FrameKind(data[0]), 0, number, bytes(data[12:end])))
            del data[:end]
    return frames


def count_descriptors() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def test_a_small_frame_goes_at_once(ends: Ends) -> None:
    outbox, selector, theirs = ends
    with tempfile.TemporaryFile() as file:
        outbox.put(frame(FrameKind.MAKE, number=7), file.fileno())
        came = receive_frame(theirs)
        assert (came.kind, came.number) == (FrameKind.MAKE, 7)
        assert os.path.sameopenfile(came.fd, file.fileno())
        os.close(came.fd)
    assert [key.events for key in selector.get_map().values()] == [selectors.EVENT_READ]


def test_a_frame_that_is_cut_by_a_full_socket_comes_whole_and_before_the_next(ends: Ends) -> None:
    payload = os.urandom(1_000_000)
    ends[0].put(frame_with(FrameKind.LAYOUT, payload))
    ends[0].put(frame(FrameKind.TURN))
    layout, turn = received(ends, 2)
    assert layout.payload == payload
    assert turn.kind is FrameKind.TURN
    [key] = ends[1].get_map().values()
    assert key.events == selectors.EVENT_READ  # nobody is woken for room that is not needed


def test_more_frames_than_a_socket_holds_all_come_with_their_descriptors(ends: Ends) -> None:
    before = count_descriptors()
    with tempfile.TemporaryFile() as file:
        for number in range(2000):
            ends[0].put(frame(FrameKind.BLOCK, number=number), file.fileno() if number % 100 == 0 else -1)
    assert [each.number for each in received(ends, 2000)] == list(range(2000))
    assert count_descriptors() == before


def test_what_is_kept_is_given_back_when_it_is_dropped(ends: Ends) -> None:
    before = count_descriptors()
    with tempfile.TemporaryFile() as file:
        ends[0].put(frame_with(FrameKind.LAYOUT, bytes(1_000_000)))
        ends[0].put(frame(FrameKind.BLOCK), file.fileno())
    assert count_descriptors() == before + 1
    ends[0].close()
    assert count_descriptors() == before


def test_nothing_is_raised_where_the_other_end_has_gone(ends: Ends) -> None:
    ends[0].put(frame_with(FrameKind.LAYOUT, bytes(1_000_000)))
    ends[2].close()
    ends[0].flush()
    ends[0].put(frame(FrameKind.TURN))
