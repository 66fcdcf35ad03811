"""A worker process that steps the environments of some lanes: what runs in it.

Each lane has a socket to the process that asks for steps; all lanes step in the main thread. Actions are read from
shared memory and what the environments answer is written to it; see `frames` for what goes over the socket.
"""

import logging
import pickle
import selectors
import socket
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rollflow.nodes.env.lane_envs import LaneEnvs
from rollflow.nodes.env.multi_agent_env import AgentInfos
from rollflow.nodes.env.observation_check import Deviations
from rollflow.nodes.env.stepping import Stepped, close_failed, takes_one_seed
from rollflow.nodes.env.workers.agent_codec import InfoCodec, StepBlock
from rollflow.nodes.env.workers.frames import FINAL_OBS, Frame, FrameKind, frame_with, lane_block, receive_frame
from rollflow.nodes.env.workers.lane_status import RaisedError
from rollflow.nodes.env.workers.stand_ins import description_of
from rollflow.nodes.env.workers.watch import ActivityFlag
from rollflow.nodes.env.workers.worker_process import become_worker
from rollflow.stream.data.blocks import BlockLayout, SharedBlock
from rollflow.stream.data.column import Column
from rollflow.stream.data.columns import Columns
from rollflow.stream.data.errors import ColumnError, EnvError
from rollflow.stream.data.packing import pack, unpack
from rollflow.stream.data.tree import map_tree

logger = logging.getLogger(__name__)


class LaneClosed(BaseException):
    """Raised if the other process wants no more of a lane, or has gone."""


class LaneServer:
    """Serves one lane's socket until it is closed: makes its environments, of one agent or several, and steps them.

    sock     also what the lane is registered by in a selector
    phase    says, if others can see it, what the lane is at
    """

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.phase = ActivityFlag()
        self._env: Any = None
        self._has_several = False
        self._seeds: Sequence[int] = ()
        self._goes_on: tuple[Any, Sequence[int]] | None = None  # states, and slots that reset next
        self._layout: BlockLayout
        self._blocks: dict[int, dict[str, Column]] = {}
        self._deviations = Deviations(is_logged=False)

    def serve_next(self) -> bool:
        """Answer the next frame; False: there are no more, and the environments are closed."""
        try:
            self._answer(self._receive())
        except BaseException as end:
            self._close()
            if not isinstance(end, LaneClosed):
                raise
            return False
        return True

    # Inside

    def _do(self, asked: Frame) -> bytes:
        """Do what a frame asks for, and give the answer; b"" if there is none."""
        kind = asked.kind
        if kind is FrameKind.STEP or kind is FrameKind.STEP_FOR_ENV:
            return self._agents_stepped() if self._has_several else self._stepped(asked)
        if kind is FrameKind.RESET:
            return self._reset(asked)
        if kind is FrameKind.STATE:
            return frame_with(FrameKind.DONE, pack({"environments": self._env.get_state()}, "the environments' states"))
        if kind is FrameKind.BLOCK:
            memory = SharedBlock(asked.number, asked.fd).taken()
            if self._has_several:
                self._block = StepBlock(self._env.parts, self._env.num_envs, memory)
            else:
                self._blocks[asked.block] = self._layout.columns(memory)
            return b""
        if kind is FrameKind.LAYOUT:
            fields = unpack(SharedBlock(asked.number, asked.fd).taken().tobytes())
            self._seeds, self._goes_on = fields["seeds"], fields.get("goes_on")
            if fields["records"]:
                self._env.record_actions()
            self._lay_out(fields)
            return b""
        failed, self._env = self._env, None
        if failed is not None:
            close_failed(failed)
        maker = pickle.loads(SharedBlock(asked.number, asked.fd).taken().tobytes())
        self._env = maker.lane_env(self._deviations)
        self._has_several = isinstance(self._env, LaneEnvs)
        self.phase.set_blended(not self._env.tell_resets(self.phase.turn))
        return frame_with(FrameKind.READY, self._description())

    def _lay_out(self, fields: Mapping[str, Any]) -> None:
        """Take what the layout says beside how the environments begin."""
        if self._has_several:
            self._env.number_from(fields["first_slot"])
            self._infos = InfoCodec(self._env.possible_agents, fields["first_slot"])
        else:
            spaces = self._env.env.single_observation_space, self._env.env.single_action_space
            self._layout = lane_block(*spaces, self._env.num_envs, fields["rows"], fields["lookback"])

    def _description(self) -> bytes:
        """The payload that describes the environments. Raises EnvError for agents that have no packed form."""
        fields = description_of(self._env)
        if not self._has_several:
            fields["takes_one_seed"] = takes_one_seed(self._env.env)
        try:
            return pack(fields | {"num_envs": self._env.num_envs}, "the environments")
        except ColumnError as error:
            raise EnvError(str(error)) from error

    def _reset(self, asked: Frame) -> bytes:
        fields: dict[str, Any] = {}
        if self._goes_on is not None:
            states, ended = self._goes_on
            try:
                self._env.set_state(states, self._seeds, ended)
                return frame_with(FrameKind.DONE, self._deviations.packed(fields))
            except EnvError as error:
                fields["anew"] = str(error)
        observations, infos = self._env.reset(self._seeds)
        if self._has_several:
            self._block.write_first(observations)
            return self._answered(fields, infos=(infos, range(self._env.num_envs)))
        self._blocks[asked.block][Columns.OBS].write(asked.number, observations)
        return frame_with(FrameKind.DONE, self._deviations.packed(fields | ({"infos": infos} if infos else {})))

    def _stepped(self, asked: Frame) -> bytes:
        columns, row = self._blocks[asked.block], asked.number
        for_env = asked.kind is FrameKind.STEP_FOR_ENV
        actions = columns[Columns.ACTIONS_FOR_ENV].row(0) if for_env else columns[Columns.ACTIONS].row(row)
        actions = map_tree(np.copy, actions)  # the environment may keep what it gets, or write over it
        observations, rewards, terminateds, truncateds, infos, final = Stepped(*self._env.step(actions))
        columns[Columns.OBS].write(row + 1, observations)
        columns[Columns.REWARDS].write(row, rewards)
        columns[Columns.TERMINATEDS].write(row, terminateds)
        columns[Columns.TRUNCATEDS].write(row, truncateds)
        fields: dict[str, Any] = {"infos": infos} if infos else {}
        if final is not None:
            slots = np.flatnonzero(np.logical_or(terminateds, truncateds))
            columns[FINAL_OBS].write_items(0, slots, final[0])
            fields["final_infos"] = final[1]
        return frame_with(FrameKind.DONE, self._deviations.packed(fields))

    def _agents_stepped(self) -> bytes:
        step = self._env.step(self._block.actions())
        self._block.write_step(step)
        infos = step.infos, range(self._env.num_envs)
        return self._answered({}, infos=infos, first_infos=(step.first_infos, step.ended.tolist()))

    def _answered(self, fields: dict[str, Any], **infos: tuple[AgentInfos, Sequence[int]]) -> bytes:
        """The answer with fields and infos, each with the numbers of the environments that they are of."""
        given = {kind: each for kind, each in infos.items() if len(each[0])}
        plain = {kind: self._infos.plain(each) for kind, (each, _) in given.items()}
        told = self._deviations.left_out
        return frame_with(
            FrameKind.DONE,
            self._deviations.packed(
                fields | plain,
                sent=lambda: fields | {kind: self._infos.sent(*each, told) for kind, each in given.items()},
            ),
        )

    def _answer(self, asked: Frame) -> None:
        if asked.kind is FrameKind.PHASE:
            self.phase = ActivityFlag(SharedBlock(asked.number, asked.fd).taken().view(np.int64))
            self.phase.set_thread(threading.get_native_id())
            return
        try:
            answer = self._do(asked)
        except Exception as error:
            answer = failure(error)
        if answer:
            self._send(answer)

    def _receive(self) -> Frame:
        """The next frame. Raises LaneClosed if there are no more."""
        try:
            return receive_frame(self.sock)
        except (EOFError, OSError) as error:
            raise LaneClosed from error

    def _send(self, data: bytes) -> None:
        """Send a frame. Raises LaneClosed if the other process has gone."""
        try:
            self.sock.sendall(data)
        except OSError as error:
            raise LaneClosed from error

    def _close(self) -> None:
        """Close the environments and the socket."""
        env, self._env = self._env, None
        try:
            if env is not None:
                close_failed(env)
        finally:
            self.sock.close()


def failure(error: Exception, **more: Any) -> bytes:
    """The frame that tells of an error."""
    return frame_with(FrameKind.FAILED, pack(RaisedError.of(error)._asdict() | more))


def main(life: int, lanes: Sequence[int], kind: type[LaneServer] = LaneServer) -> None:
    """Serve the lanes whose sockets have these descriptors, in this thread, for as long as the pipe `life` is open.

    It is the process's main thread, which some environments want: asyncio, signals, OpenGL. Lanes take turns in it.
    """
    become_worker("rollflow-worker", life)
    servers = [kind(socket.socket(fileno=fd)) for fd in lanes]
    if len(servers) > 1:
        _take_turns(servers)
        return
    while servers[0].serve_next():
        pass


def _take_turns(servers: Sequence[LaneServer]) -> None:
    """Serve several lanes, a frame of each at a time, and mark the one that is at work."""
    with selectors.DefaultSelector() as selector:
        for server in servers:
            selector.register(server.sock, selectors.EVENT_READ, server)
        while selector.get_map():
            for key, _ in selector.select():
                served: LaneServer = key.data
                served.phase.set_at_work(True)
                if not served.serve_next():
                    selector.unregister(key.fileobj)
                served.phase.set_at_work(False)
