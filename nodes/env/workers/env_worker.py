"""A worker process that steps the environments of some lanes: what runs in it.

Each lane has a socket to the process that asks for steps; all lanes step in the main thread. Actions are read from
shared memory and what the environments answer is written to it; see `frames` for what goes over the socket.
"""

import socket
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollflow.nodes.env.stepping import Stepped
from rollflow.nodes.env.workers.frames import FINAL_OBS, Frame, FrameKind, lane_block
from rollflow.nodes.env.workers.lane_server import LaneServer, serve_all
from rollflow.stream.data.blocks import BlockLayout
from rollflow.stream.data.column import Column
from rollflow.stream.data.columns import Columns
from rollflow.stream.data.tree import map_tree


class EnvServer(LaneServer):
    """Steps one lane's environments."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock)
        self._layout: BlockLayout
        self._blocks: dict[int, dict[str, Column]] = {}

    def _lay_out(self, fields: dict[str, Any]) -> None:
        spaces = self._env.env.single_observation_space, self._env.env.single_action_space
        self._layout = lane_block(*spaces, self._env.num_envs, fields["rows"], fields["lookback"])

    def _take_block(self, index: int, memory: NDArray[np.uint8]) -> None:
        self._blocks[index] = self._layout.columns(memory)

    def _reset(self, asked: Frame) -> bytes:
        observations, infos = self._env.reset(self._seeds)
        self._blocks[asked.block][Columns.OBS].write(asked.number, observations)
        return self._done(self._deviations.packed({"infos": infos} if infos else {}))

    def _step(self, asked: Frame) -> bytes:
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
        return self._done(self._deviations.packed(fields))


main = partial(serve_all, kind=EnvServer)
