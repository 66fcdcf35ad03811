"""A worker process that does whole rollouts, each of one lane: what runs in it."""

import contextlib
import pickle
import select
import socket
from collections.abc import Sequence
from typing import Any

import numpy as np

from rollflow.nodes.lane_rollout import Drained, LaneRollout, WeightsFrom, is_of_environment
from rollflow.nodes.weights_codec import unpack_weights
from rollflow.nodes.workers.env_worker import EnvServer
from rollflow.nodes.workers.fragment_codec import FragmentWriter
from rollflow.nodes.workers.frames import Frame, Kind, frame, frame_with, receive_frame
from rollflow.nodes.workers.lane_server import described, failure, serve_all
from rollflow.nodes.workers.rollout_link import PROGRESS_BYTES
from rollflow.stream.blocks import SharedBlock
from rollflow.stream.packing import pack, unpack


class Closed(BaseException):
    """Raised, in the middle of a fragment, when the other process wants no more of this lane, or has gone."""


class RolloutServer(EnvServer):
    """Serves one lane's socket: gives a fragment for every turn."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock)
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        self._rollout: LaneRollout | None = None

    def serve(self) -> None:
        """Answer frame after frame."""
        with contextlib.suppress(Closed):
            super().serve()

    def _do(self, asked: Frame) -> bytes:
        kind = asked.kind
        if kind is Kind.TURN:
            return self._turn()
        if kind is Kind.FREE:
            self._fragments.free(asked.block)
            return b""
        if kind is Kind.WEIGHTS:
            self._weights.put(*unpack_weights(SharedBlock(asked.number, asked.fd).taken().tobytes()))
            return frame(Kind.TAKEN)
        if kind is Kind.STATES:
            if self._rollout is not None:
                self._rollout.take_states(unpack(SharedBlock(asked.number, asked.fd).taken().tobytes()))
            return b""
        if kind is Kind.SET_UP:
            block = SharedBlock(asked.number, asked.fd).taken()
            self._progress = block[:PROGRESS_BYTES].view(np.int64)
            try:
                return self._set_up(pickle.loads(block[PROGRESS_BYTES:].tobytes()))
            except Exception as error:
                self._rollout = None
                return failure(error, is_refusal=not is_of_environment(error))
        if kind is Kind.DRAIN:
            return b""  # there is no fragment in the making
        return super()._do(asked)

    def _between(self) -> None:
        """Say how far the lane has come, and take what has come over the socket meanwhile."""
        assert self._rollout is not None
        lane = self._rollout.lane
        begun = self._fragments.begin()
        if begun is not None:
            self._send_blocks()
            self._sock.sendall(frame_with(Kind.FILLING, pack(begun)))
        self._fragments.keep_finals()
        self._progress[0] = lane.num_steps
        self._progress[1] += 1
        self._progress[2] = lane.sequence * (lane.layout.num_rows + 1) + lane.row - lane.layout.lookback
        while self._poll.poll(0):
            try:
                asked = receive_frame(self._sock)
            except (EOFError, OSError) as error:
                raise Closed from error
            if asked.kind is Kind.CLOSE:
                raise Closed
            if asked.kind is Kind.DRAIN:
                raise Drained
            answer = self._do(asked)
            if answer:
                self._sock.sendall(answer)

    def _set_up(self, told: dict[str, Any]) -> bytes:
        assert self._env is not None
        module = told["module"]
        self._weights = WeightsFrom(module, told["version"], self._between, digests=told["plan"].digests)
        self._rollout = LaneRollout(
            self._env,
            told["plan"],
            module=module,
            weights=self._weights,
            env_to_module=told["env_to_module"],
            module_to_env=told["module_to_env"],
            began=lambda: self._sock.sendall(frame(Kind.BEGUN)),
            is_shared=True,
            hide=self._hide,
            turn=self._phase.turn,
        )
        self._fragments, self._blocks_sent = FragmentWriter(self._rollout.lane), 0
        return b""

    def _turn(self) -> bytes:
        if self._rollout is None:
            return b""  # it could not be set up, as the other process has been told
        try:
            fragment, error, lost = self._rollout.turn()
        except Exception as refusal:
            return failure(refusal, is_refusal=True)
        if error is None:
            self._send(fragment)
            return b""
        if not fragment.num_rows:
            return failure(error, lost_steps=lost)
        self._send(fragment, failure=described(error), lost_steps=lost)
        self._rollout = None
        return b""

    def _close_env(self) -> None:
        if self._rollout is not None:
            self._progress[0] = self._rollout.lane.num_steps
        super()._close_env()

    def _send(self, fragment: Any, **more: Any) -> None:
        assert self._rollout is not None
        index, told = self._fragments.write(fragment)
        self._send_blocks()
        told |= self._rollout.told() | more
        self._sock.sendall(frame_with(Kind.FRAGMENT, pack(told, "fragment"), index))

    def _hide(self) -> None:
        """Have no row of the fragment in the making rescued any more."""
        self._progress[2] = -1

    def _send_blocks(self) -> None:
        """Let the other process see the blocks that there are."""
        blocks = self._fragments.blocks
        for index in range(self._blocks_sent, len(blocks)):
            socket.send_fds(self._sock, [frame(Kind.NEW_BLOCK, index, blocks[index].size)], [blocks[index].fd])
        self._blocks_sent = len(blocks)


def main(life: int, lanes: Sequence[int]) -> None:
    """Serve the lanes whose sockets have these descriptors, for as long as the pipe `life` is open."""
    serve_all(life, [RolloutServer(socket.socket(fileno=fd)) for fd in lanes])
