"""Frames that the two ends of a lane send each other over their socket.

Every frame begins with twelve bytes: its kind, the index of a block, and a number, which is a row or the length of what
follows. Rows themselves lie in blocks of shared memory that both ends know by their index.
"""

import os
import socket
import struct
import sys
from collections import deque
from collections.abc import Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np

from rollflow.stream.data.blocks import BlockLayout
from rollflow.stream.data.columns import Columns
from rollflow.stream.data.space import row_of

FINAL_OBS = "final_obs"
_HEADER = struct.Struct("<BxHQ")
_FD_SPACE = socket.CMSG_SPACE(4) if hasattr(socket, "CMSG_SPACE") else 0
SHARED_COLUMNS = (Columns.OBS, Columns.ACTIONS, Columns.REWARDS, Columns.TERMINATEDS, Columns.TRUNCATEDS)


class FrameKind(IntEnum):
    """Kinds of frames, with the meaning of each one's number."""

    # To the worker
    MAKE = 1  # a descriptor, and the bytes behind it: how the environments are made
    LAYOUT = 2  # a descriptor, and the bytes behind it: a packed dict of seeds, and of rows, lookback or first_slot,
    # whether actions are to be recorded, and of environments that go on their states and the slots that reset next
    BLOCK = 3  # a descriptor, and the bytes behind it: a block
    RESET = 4  # the row to write the first observations to; or a descriptor, the pipe that tells which slots answer
    STEP = 5  # the row to step with: its actions are in the block
    STEP_FOR_ENV = 6  # the same, with the block's `actions_for_env`
    SET_UP = 8  # a descriptor, and the bytes behind it: what else a whole rollout is made of
    TURN = 9  # a fragment is wanted
    WEIGHTS = 10  # a descriptor, and the bytes behind it: a policy version and its weights
    STATES = 11  # a descriptor, and the bytes behind it: what the connectors of all workers have learnt
    FREE = 12  # (the block) nobody reads it any more
    DRAIN = 13  # what there is of the fragment is wanted now
    PHASE = 21  # a descriptor, and the bytes behind it: where the worker says what it is at, and how far
    STATE = 23  # the states of the environments are wanted
    # From the worker
    READY = 14  # length of a packed dict: spaces, slots, autoreset mode
    DONE = 15  # length of a packed dict: infos, and those of episodes that ended; 0 where there are none
    FAILED = 16  # length of a packed dict: what was raised
    FRAGMENT = 17  # length of a packed dict: what there is to say of a fragment, and the blocks that it lies in
    NEW_BLOCK = 18  # a descriptor, and the bytes behind it: a block
    TAKEN = 19  # weights have been taken over
    BEGUN = 20  # the first step of a rollout is being made: its environments have been reset


class Frame(NamedTuple):
    """One frame."""

    kind: FrameKind
    block: int
    number: int
    payload: bytes = b""
    fd: int = -1

    def discard(self) -> None:
        """Give back what came with a frame that nobody wants."""
        if self.fd >= 0:
            os.close(self.fd)


def frame(kind: FrameKind, block: int = 0, number: int = 0) -> bytes:
    """The bytes of a frame without a payload."""
    return _HEADER.pack(kind, block, number)


def frame_with(kind: FrameKind, payload: bytes) -> bytes:
    """The bytes of a frame that ends in a payload."""
    return _HEADER.pack(kind, 0, len(payload)) + payload


class FrameReader:
    """Cuts what comes from a worker into frames; it may come in any pieces."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._fds: deque[int] = deque()

    def feed(self, data: bytes, fds: Sequence[int] = ()) -> list[Frame]:
        """The frames that are complete with this, and with the descriptors that came along."""
        self._buffer += data
        self._fds += fds
        frames: list[Frame] = []
        begin = 0
        while len(self._buffer) - begin >= _HEADER.size:
            kind, block, number = _HEADER.unpack_from(self._buffer, begin)
            if kind == FrameKind.NEW_BLOCK:
                frames.append(Frame(FrameKind.NEW_BLOCK, block, number, fd=self._fds.popleft()))
                begin += _HEADER.size
                continue
            end = begin + _HEADER.size + number
            if len(self._buffer) < end:
                break
            frames.append(Frame(FrameKind(kind), block, number, bytes(self._buffer[begin + _HEADER.size : end])))
            begin = end
        del self._buffer[:begin]
        return frames


def receive_header(sock: socket.socket) -> tuple[bytes, list[Any]]:
    """The bytes of the next frame that came to a worker, and what came beside. Raises EOFError if nobody sends."""
    header, ancillary, _, _ = sock.recvmsg(_HEADER.size, _FD_SPACE)
    if not header:
        raise EOFError
    return header, ancillary


def frame_in(header: bytes, ancillary: Sequence[Any]) -> Frame:
    """The frame of a header, with the descriptor that came beside it."""
    kind, block, number = _HEADER.unpack(header)
    fd = int.from_bytes(ancillary[0][2], sys.byteorder) if ancillary else -1
    return Frame(FrameKind(kind), block, number, fd=fd)


def receive_frame(sock: socket.socket) -> Frame:
    """The next frame that came to a worker, with its descriptor. Raises EOFError if the other end has gone."""
    return frame_in(*receive_header(sock))


def lane_block(
    observation_space: gym.Space[Any], action_space: gym.Space[Any], slots: int, rows: int, lookback: int
) -> BlockLayout:
    """Layout of a block: the columns that environments write to or read, and rows of what isn't recorded."""
    obs, actions = row_of(observation_space, slots), row_of(action_space, slots)
    flags = np.zeros(slots, np.bool_)
    recorded = lookback + rows
    return BlockLayout(
        {
            Columns.OBS: (obs, recorded + 1),
            Columns.ACTIONS: (actions, recorded),
            Columns.REWARDS: (np.zeros(slots, np.float32), recorded),
            Columns.TERMINATEDS: (flags, recorded),
            Columns.TRUNCATEDS: (flags, recorded),
            Columns.ACTIONS_FOR_ENV: (actions, 1),
            FINAL_OBS: (obs, 1),
        }
    )
