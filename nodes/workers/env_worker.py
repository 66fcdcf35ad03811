"""A worker process that steps the environments of some lanes: what runs in it.

Each lane has a socket to the process that asks for steps, and a thread of its own where there are several. Actions are
read from shared memory and what the environments answer is written to it; see `frames` for what goes over the socket.
"""

import socket
from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium.vector import VectorEnv

from rollflow.nodes.env_source import LaneMaker
from rollflow.nodes.stepping import Step, Stepped, autoreset_mode, blends_resets, reset_first, step_of
from rollflow.nodes.workers.frames import Frame, Kind, frame, frame_with, lane_block
from rollflow.nodes.workers.lane_server import LaneServer, loaded, serve_all
from rollflow.stream.blocks import BlockLayout, SharedBlock
from rollflow.stream.column import Column
from rollflow.stream.columns import Columns
from rollflow.stream.errors import ColumnError, EnvError
from rollflow.stream.lane_columns import FINAL_OBS
from rollflow.stream.packing import pack, unpack
from rollflow.stream.space_codec import describe_space
from rollflow.stream.tree import map_tree


class EnvServer(LaneServer):
    """Steps one lane's environments."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock)
        self._env: VectorEnv[Any, Any, Any] | None = None
        self._step: Step | None = None
        self._layout: BlockLayout | None = None
        self._seed, self._first_slot = 0, 0
        self._blocks: dict[int, dict[str, Column]] = {}

    def _do(self, asked: Frame) -> bytes:
        kind = asked.kind
        if kind is Kind.STEP or kind is Kind.STEP_FOR_ENV:
            return self._stepped(self._blocks[asked.block], asked.number, kind is Kind.STEP_FOR_ENV)
        if kind is Kind.RESET:
            return self._reset(self._blocks[asked.block], asked.number)
        if kind is Kind.BLOCK:
            assert self._layout is not None
            self._blocks[asked.block] = self._layout.columns(SharedBlock(asked.number, asked.fd).taken())
            return b""
        if kind is Kind.LAYOUT:
            return self._lay_out(unpack(asked.payload))
        return self._make(asked)

    def _close(self) -> None:
        env, self._env = self._env, None
        if env is not None:
            env.close()

    def _make(self, asked: Frame) -> bytes:
        self._close_env()
        maker: LaneMaker = loaded(asked)
        self._env = env = maker.make()
        self._step = step_of(env, is_ours=True, turn=self._phase.turn)
        self._phase.set_blended(blends_resets(env, is_ours=True))
        told = {
            "observation_space": describe_space(env.single_observation_space),
            "action_space": describe_space(env.single_action_space),
            "num_envs": env.num_envs,
            "autoreset_mode": autoreset_mode(env).name,
        }
        return frame_with(Kind.READY, pack(told))

    def _lay_out(self, told: dict[str, Any]) -> bytes:
        assert self._env is not None
        env, self._seed, self._first_slot = self._env, told["seed"], told["first_slot"]
        spaces = env.single_observation_space, env.single_action_space
        self._layout = lane_block(*spaces, env.num_envs, told["rows"], told["lookback"])
        return b""

    def _reset(self, columns: dict[str, Column], row: int) -> bytes:
        assert self._env is not None
        observations, infos = reset_first(self._env, self._seed, self._first_slot)
        columns[Columns.OBS].write(row, observations)
        return _done({"infos": infos} if infos else {})

    def _stepped(self, columns: dict[str, Column], row: int, for_env: bool) -> bytes:
        assert self._step is not None
        actions = columns[Columns.ACTIONS_FOR_ENV].row(0) if for_env else columns[Columns.ACTIONS].row(row)
        actions = map_tree(np.copy, actions)  # the environment may keep what it gets, or write over it
        observations, rewards, terminateds, truncateds, infos, final = Stepped(*self._step(actions))
        columns[Columns.OBS].write(row + 1, observations)
        columns[Columns.REWARDS].write(row, rewards)
        columns[Columns.TERMINATEDS].write(row, terminateds)
        columns[Columns.TRUNCATEDS].write(row, truncateds)
        told: dict[str, Any] = {"infos": infos} if infos or len(getattr(infos, "dicts", ())) else {}
        if final is not None:
            slots = np.flatnonzero(np.logical_or(terminateds, truncateds)).tolist()
            for slot, item in zip(slots, final[0], strict=True):
                columns[FINAL_OBS].write_slot(0, slot, item)
            told["final_infos"] = final[1]
        return _done(told)


def _done(told: dict[str, Any]) -> bytes:
    try:
        return frame_with(Kind.DONE, pack(told, "the environment's answer")) if told else frame(Kind.DONE)
    except ColumnError as error:
        raise EnvError(str(error)) from error


def main(life: int, lanes: Sequence[int]) -> None:
    """Serve the lanes whose sockets have these descriptors, for as long as the pipe `life` is open."""
    serve_all(life, [EnvServer(socket.socket(fileno=fd)) for fd in lanes])
