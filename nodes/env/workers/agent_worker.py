"""A worker process that steps environments with several agents each, of some lanes: what runs in it.

Actions are read from a lane's block of shared memory, and what the environments answer is written there. Infos go over
the socket, where there are any; see `frames` for what else does.
"""

from functools import partial

import numpy as np
from numpy.typing import NDArray

from rollflow.nodes.env.multi_agent.array_vector import AgentInfos
from rollflow.nodes.env.workers.agent_codec import InfoCodec, StepBlock
from rollflow.nodes.env.workers.frames import Frame
from rollflow.nodes.env.workers.lane_server import LaneServer, serve_all


class AgentServer(LaneServer):
    """Steps one lane's environments."""

    _block: StepBlock

    def _take_block(self, index: int, memory: NDArray[np.uint8]) -> None:
        self._infos = InfoCodec(self._env.possible_agents)
        self._block = StepBlock(self._env.parts, self._env.num_envs, memory)

    def _reset(self, asked: Frame) -> bytes:
        observed, infos = self._env.reset(self._seeds)
        self._block.write_first(observed)
        return self._answered(infos=infos)

    def _step(self, asked: Frame) -> bytes:
        step = self._env.step(self._block.actions())
        self._block.write_step(step)
        return self._answered(infos=step.infos, first_infos=step.first_infos)

    def _answered(self, **infos: AgentInfos) -> bytes:
        plain = {kind: self._infos.plain(each) for kind, each in infos.items() if len(each)}
        return self._done(self._deviations.packed(plain))


main = partial(serve_all, kind=AgentServer)
