"""One lane whose environments step in a worker process, seen from here."""

import selectors
import socket
from collections.abc import Mapping
from enum import Enum, auto
from time import monotonic
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space

from rollflow.nodes.backoff import pause_s
from rollflow.nodes.environments import actions_of
from rollflow.nodes.workers.frames import SHARED_COLUMNS, Frame, FrameReader, Kind, frame, frame_with
from rollflow.nodes.workers.outbox import Outbox
from rollflow.nodes.workers.phase import PHASE_BYTES, Doing, Phase
from rollflow.nodes.workers.watch import At
from rollflow.stream.blocks import BlockLayout, BlockPool, SharedBlock
from rollflow.stream.column import Column
from rollflow.stream.columns import Columns
from rollflow.stream.lane import Lane
from rollflow.stream.lane_columns import FINAL_OBS
from rollflow.stream.packing import pack, unpack
from rollflow.stream.space_codec import space_of
from rollflow.stream.tree import Tree, map_tree

_LONGEST_DELAY_S = 30.0
_MOST_FDS = 64  # that come with what is received at a time


class LaneBlocks:
    """A `LaneMemory` that a worker process writes to as well."""

    def __init__(self, layout: BlockLayout) -> None:
        self.pool = BlockPool(layout.size, SharedBlock)
        self.index = -1
        self.columns: dict[str, Column] = {}
        self._layout = layout

    def next_columns(self) -> dict[str, Column]:
        """Columns in a block of their own, which becomes the current one."""
        self.index, block = self.pool.take()
        self.columns = self._layout.columns(block)
        return {name: self.columns[name] for name in SHARED_COLUMNS}

    def observations(self, row: int) -> Tree:
        """What the environments wrote for a row of the current block."""
        return self.columns[Columns.OBS].row(row)


class Elsewhere:
    """What is known here of a vector environment that is elsewhere; it has the names that it has there."""

    def __init__(self, told: Mapping[str, Any]) -> None:
        self.num_envs = told["num_envs"]
        self.metadata = {"autoreset_mode": AutoresetMode[told["autoreset_mode"]]}
        self.single_observation_space: gym.Space[Any] = space_of(told["observation_space"])
        self.single_action_space: gym.Space[Any] = space_of(told["action_space"])
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)

    @property
    def unwrapped(self) -> "Elsewhere":
        """The same: wrappers are where the environments are."""
        return self

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"these environments are elsewhere, where '{name}' can't be asked for; known here: num_envs, "
            "metadata['autoreset_mode'], single_observation_space, single_action_space, observation_space, action_space"
        )


class State(Enum):
    """What a lane's worker is at."""

    MAKING = auto()
    MADE = auto()
    RESETTING = auto()
    READY = auto()
    STEPPING = auto()
    LOST = auto()  # to be made again at `due`
    ASIDE = auto()  # for good; what its worker still says is not heard


class LaneLink:
    """The socket to a lane's worker, what it is at, and how often it has failed.

    lane         the lane; set before the first reset
    is_waited    whether the lane has been handed over and not come back
    """

    def __init__(self, index: int, maker: bytes) -> None:
        self.index = index
        self.maker = maker
        self.state = State.LOST
        self.lane: Any = None
        self.is_waited = False
        self.failures = 0
        self.reason = ""  # of the last failure
        self.due = 0.0
        self.starts = 0
        self._steps = 0  # since the last failure
        self.sock: socket.socket | None = None
        self._reader = FrameReader()
        self._outbox: Outbox | None = None
        self._blocks_sent = 0
        self._phase = Phase()

    # What is asked for

    def connect(self, sock: socket.socket, selector: selectors.BaseSelector, told: Any) -> None:
        """Take the socket to a new process, and have it watched; `told` is what the selector tells of it."""
        sock.setblocking(False)
        selector.register(sock, selectors.EVENT_READ, told)
        self.sock, self._reader, self._outbox = sock, FrameReader(), Outbox(sock, selector)

    def disconnect(self, selector: selectors.BaseSelector) -> None:
        """Have the socket watched no more, and drop what is still to be sent."""
        if self.sock is not None and self._outbox is not None:
            selector.unregister(self.sock)
            self._outbox.close()
            self.sock = self._outbox = None
            self._phase = Phase()

    def make(self) -> None:
        """Have the environments made."""
        phase = SharedBlock(PHASE_BYTES)
        self._phase = Phase(phase.array().view(np.int64))
        self.send(frame(Kind.PHASE, number=phase.size), phase.fd)
        phase.close()
        constructor = SharedBlock(len(self.maker))
        constructor.write(self.maker)
        self.send(frame(Kind.MAKE, number=constructor.size), constructor.fd)
        constructor.close()
        self.state = State.MAKING

    def reset(self, seed: int, first_slot: int) -> None:
        """Have the environments reset for the first time."""
        lane, blocks = self._laid_out()
        layout = {"rows": lane.layout.num_rows, "lookback": lane.layout.lookback, "seed": seed}
        self.send(frame_with(Kind.LAYOUT, pack(layout | {"first_slot": first_slot})))
        self._blocks_sent = 0
        self._send_blocks(blocks)
        self.send(frame(Kind.RESET, blocks.index, lane.row))
        self.state, self.starts = State.RESETTING, self.starts + 1

    def step(self) -> None:
        """Have the environments stepped with the lane's actions."""
        lane, blocks = self._laid_out()
        kind = Kind.STEP
        if Columns.ACTIONS_FOR_ENV in lane.batch:
            kind = Kind.STEP_FOR_ENV
            blocks.columns[Columns.ACTIONS_FOR_ENV].write(0, actions_of(lane))
        self._send_blocks(blocks)
        self.send(frame(kind, blocks.index, lane.row))
        self.state = State.STEPPING

    def send(self, data: bytes, fd: int = -1) -> None:
        """Send a frame, and a descriptor with it, as soon as there is room."""
        assert self._outbox is not None
        self._outbox.put(data, fd)

    def send_kept(self) -> None:
        """Send of what is kept as much as there is room for now."""
        if self._outbox is not None:
            self._outbox.flush()

    # What is seen

    @property
    def at(self) -> At:
        """How often the worker has got on with something, and what it is at."""
        is_stepped = self.state in (State.READY, State.STEPPING)
        return self._phase.turns, self._phase.doing if is_stepped else Doing.RESET

    # What is answered

    def receive(self) -> list[Frame] | None:
        """The frames that have come; None when the process has gone."""
        if self.sock is None:
            return None
        try:
            data, fds, _, _ = socket.recv_fds(self.sock, 1 << 18, _MOST_FDS)
        except BlockingIOError:
            return []
        except OSError:
            return None
        return self._reader.feed(data, fds) if data else None

    def take(self, answer: Frame) -> Any:
        """The lane, once its worker is done with what it was asked for."""
        lane, blocks = self._laid_out()
        told = unpack(answer.payload) if answer.payload else {}
        infos = told.get("infos", {})
        if self.state is State.RESETTING:
            lane.take_reset(infos)
        else:
            final = None
            if "final_infos" in told:
                final = self._last_observations(lane, blocks), told["final_infos"]
            lane.take_step(infos, final)
            self._succeeded(lane.layout.num_rows)
        self.state = State.READY
        return lane

    def fail(self, reason: str, most: int) -> None:
        """Count a failure: the environments are to be made again after a while, or never."""
        self.failures += 1
        self.reason, self._steps = reason, 0
        self.state = State.LOST if self.failures <= most else State.ASIDE
        self.due = monotonic() + pause_s(self.failures, _LONGEST_DELAY_S)

    # Inside

    def _succeeded(self, fragment_length: int) -> None:
        """A step was made: after a fragment of them, failures are forgotten."""
        self._steps += 1
        if self._steps >= fragment_length:
            self.failures = 0

    def _laid_out(self) -> tuple[Lane, LaneBlocks]:
        lane: Lane = self.lane
        assert isinstance(lane.memory, LaneBlocks)
        return lane, lane.memory

    def _last_observations(self, lane: Lane, blocks: LaneBlocks) -> list[Tree]:
        done = blocks.columns[Columns.TERMINATEDS].row(lane.row) | blocks.columns[Columns.TRUNCATEDS].row(lane.row)
        last = blocks.columns[FINAL_OBS].row(0)
        return [map_tree(lambda leaf, i=slot: leaf[i].copy(), last) for slot in np.flatnonzero(done).tolist()]

    def _send_blocks(self, blocks: LaneBlocks) -> None:
        for index in range(self._blocks_sent, len(blocks.pool.blocks)):
            block = blocks.pool.blocks[index]
            self.send(frame(Kind.BLOCK, index, block.size), block.fd)
        self._blocks_sent = len(blocks.pool.blocks)
