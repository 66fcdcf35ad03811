"""A worker process that does whole rollouts, each of one lane: what runs in it."""

import pickle
import select
import socket
from collections.abc import Sequence
from typing import Any

from rollflow.nodes.env.workers import lane_server
from rollflow.nodes.env.workers.frames import Frame, FrameKind, frame, frame_with
from rollflow.nodes.env.workers.lane_server import LaneServer, failure
from rollflow.nodes.modules.policy_weights import unpack_weights
from rollflow.nodes.offloaded.lane_rollout import AnyActing, Drained, LanePlan, LaneRollout, is_of_environment
from rollflow.nodes.offloaded.lent_fragments import FragmentWriter
from rollflow.nodes.offloaded.rollout_processes import BUSY, MARK, PROGRESS, UNDER_WAY
from rollflow.stream.data.blocks import SharedBlock
from rollflow.stream.data.packing import pack, unpack


class RolloutServer(LaneServer):
    """Serves one lane's socket: gives a fragment for every turn."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock)
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        self._rollout: LaneRollout | None = None
        self._fragments: FragmentWriter

    def _do(self, asked: Frame) -> bytes:
        kind = asked.kind
        if kind is FrameKind.TURN:
            return self._turn()
        if kind is FrameKind.FREE:
            self._fragments.free(asked.block)
            return b""
        if kind is FrameKind.WEIGHTS:
            version, weights, module_id = unpack_weights(SharedBlock(asked.number, asked.fd).taken().tobytes())
            if self._rollout is not None:
                self._rollout.put({module_id: (version, weights)})
            return frame(FrameKind.TAKEN)
        if kind is FrameKind.STATES:
            if self._rollout is not None:
                self._rollout.take_states(unpack(SharedBlock(asked.number, asked.fd).taken().tobytes()))
            return b""
        if kind is FrameKind.STATE and self._rollout is not None:
            return frame_with(FrameKind.DONE, pack(self._rollout.get_state(), "the state of a rollout"))
        if kind is FrameKind.SET_UP:
            self._progress = self.phase.memory[PROGRESS]
            self._busy = self._progress[BUSY].data  # quicker than the array
            try:
                return self._set_up(*pickle.loads(SharedBlock(asked.number, asked.fd).taken().data))
            except Exception as error:
                self._rollout = None
                return failure(error, is_refusal=not is_of_environment(error))
        if kind is FrameKind.DRAIN:
            return b""  # there is no fragment in the making
        return super()._do(asked)

    def _between(self) -> None:
        """Say how far the lane has come, and take what has come over the socket meanwhile."""
        assert self._rollout is not None
        self._progress[0] = self._rollout.lane.num_steps
        self._progress[UNDER_WAY] = self._rollout.under_way
        self._progress[1] += 1
        for number, busy in enumerate(self._rollout.busy_ns()):
            self._busy[number] = busy
        while self._poll.poll(0):
            asked = self._receive()
            if asked.kind is FrameKind.DRAIN:
                raise Drained
            answer = self._do(asked)
            if answer:
                self._send(answer)

    def _set_up(self, acting: AnyActing, plan: LanePlan) -> bytes:
        assert self._env is not None
        if self._has_several:
            self._env.number_from(plan.environments["first_slot"])
        self._rollout = LaneRollout(
            self._env,
            plan,
            acting,
            deviations=self._deviations,
            between=self._between,
            began=lambda: self._send(frame(FrameKind.BEGUN)),
            mark=self._progress[MARK].data,
        )
        self._fragments = FragmentWriter(self._rollout.lane)
        self._blocks_sent = 0
        return b""

    def _turn(self) -> bytes:
        if self._rollout is None:
            return b""  # it could not be set up, as the other process has been told
        try:
            fragment, report, raised = self._rollout.turn()
        except Exception as refusal:
            return failure(refusal, is_refusal=True)
        if raised is not None:
            if not fragment.num_rows:
                return failure(raised, lost_steps=report["lost_steps"])
            self._rollout = None
        self._send_fragment(fragment, report)
        return b""

    def _close(self) -> None:
        if self._rollout is not None:
            self._progress[0] = self._rollout.lane.num_steps
        super()._close()

    def _send_fragment(self, fragment: Any, more: dict[str, Any]) -> None:
        """Send a fragment, and what there is to say beside it."""
        fields = self._fragments.write(fragment)
        blocks = self._fragments.blocks
        for place in range(self._blocks_sent, len(blocks)):
            header = frame(FrameKind.NEW_BLOCK, place, blocks[place].size)
            socket.send_fds(self.sock, [header], [blocks[place].fd])
        self._blocks_sent = len(blocks)
        self._send(frame_with(FrameKind.FRAGMENT, self._deviations.packed(fields | more, "fragment")))


def main(life: int, lanes: Sequence[int]) -> None:
    """Serve the lanes: see `lane_server.main`."""
    lane_server.main(life, lanes, RolloutServer)
