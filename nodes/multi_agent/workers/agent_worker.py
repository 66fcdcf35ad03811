"""A worker process that steps environments with several agents each, of some lanes: what runs in it.

Actions are read from a lane's block of shared memory, and what the environments answer is written there. Infos go over
the socket, where there are any; see `frames` for what else does.
"""

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rollflow.nodes.multi_agent.dict_vector import MultiAgentEnvs
from rollflow.nodes.multi_agent.lane_envs import LaneEnvs, lane_envs
from rollflow.nodes.multi_agent.workers.agent_codec import InfoCodec, describe
from rollflow.nodes.multi_agent.workers.step_block import StepBlock
from rollflow.nodes.stepping import seeds_for
from rollflow.nodes.workers.frames import Frame, Kind, frame, frame_with
from rollflow.nodes.workers.lane_server import LaneServer, loaded, serve_all
from rollflow.stream.blocks import SharedBlock
from rollflow.stream.packing import unpack


@dataclass(frozen=True, slots=True)
class AgentLaneMaker:
    """Makes the environments of one lane.

    makers       one callable for each environment
    first_env    the number of the first
    """

    makers: Sequence[Any]
    first_env: int

    def make(self) -> LaneEnvs:
        """The environments. Raises EnvError where they can't be stepped together."""
        return lane_envs(self.makers, first_env=self.first_env)


class AgentServer(LaneServer):
    """Steps one lane's environments."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock)
        self._envs: LaneEnvs | None = None
        self._infos = InfoCodec(())
        self._block: StepBlock | None = None
        self._seeds: Sequence[int] = ()

    def _do(self, asked: Frame) -> bytes:
        if asked.kind is Kind.STEP:
            return self._step()
        if asked.kind is Kind.RESET:
            return self._reset()
        if asked.kind is Kind.BLOCK:
            assert self._envs is not None
            memory = SharedBlock(asked.number, asked.fd).taken()
            self._block = StepBlock(self._envs.parts, self._envs.num_envs, memory)
            return b""
        if asked.kind is Kind.LAYOUT:
            assert self._envs is not None
            told = unpack(asked.payload)
            self._seeds = seeds_for(told["seed"], told["first_env"], self._envs.num_envs)
            return b""
        return self._make(asked)

    def _close(self) -> None:
        envs, self._envs, self._block = self._envs, None, None
        if envs is not None:
            envs.close()

    def _make(self, asked: Frame) -> bytes:
        self._close_env()
        maker: AgentLaneMaker = loaded(asked)
        self._envs = maker.make()
        if isinstance(self._envs, MultiAgentEnvs):
            self._envs.turn = self._phase.turn
        self._phase.set_blended(not isinstance(self._envs, MultiAgentEnvs))
        self._infos = InfoCodec(self._envs.possible_agents, maker.first_env)
        return frame_with(Kind.READY, describe(self._envs))

    def _reset(self) -> bytes:
        assert self._envs is not None
        assert self._block is not None
        observed, infos = self._envs.reset(self._seeds)
        self._block.write_first(observed)
        return _done(self._infos.packed({"infos": (infos, range(self._envs.num_envs))}))

    def _step(self) -> bytes:
        assert self._envs is not None
        assert self._block is not None
        step = self._envs.step(self._block.actions())
        self._block.write_step(step)
        told = {
            "infos": (step.infos, range(self._envs.num_envs)),
            "first_infos": (step.first_infos, step.ended.tolist()),
        }
        return _done(self._infos.packed(told))


def _done(told: bytes) -> bytes:
    return frame_with(Kind.DONE, told) if told else frame(Kind.DONE)


def main(life: int, lanes: Sequence[int]) -> None:
    """Serve the lanes whose sockets have these descriptors, for as long as the pipe `life` is open."""
    serve_all(life, [AgentServer(socket.socket(fileno=fd)) for fd in lanes])
