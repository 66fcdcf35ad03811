"""A worker process that steps environments each on its own: what runs in it.

Slots that have answered are told by their numbers, i64, through a pipe that all workers of a lane write to: `~slot`
if an answer has also infos, or the last observation of an episode, whose frame comes over the worker's socket before
that. Everything else is as in `lane_server`.
"""

import os
import socket
from collections.abc import Mapping, Sequence
from sys import byteorder
from typing import Any

import numpy as np
from gymnasium.vector.utils import batch_space, iterate

from rollflow.nodes.env.stepping import Beginning, OneSlot, SlotAnswer, joiner_of_slots
from rollflow.nodes.env.workers import lane_server
from rollflow.nodes.env.workers.frames import (
    FINAL_OBS,
    Frame,
    FrameKind,
    frame,
    frame_in,
    frame_with,
    lane_block,
    receive_header,
)
from rollflow.nodes.env.workers.lane_server import LaneClosed, LaneServer, failure
from rollflow.stream.data.blocks import SharedBlock
from rollflow.stream.data.columns import Columns
from rollflow.stream.data.infos import info_of
from rollflow.stream.data.packing import pack
from rollflow.stream.data.tree import Tree, map_tree

ANSWERED = Columns.OBS, Columns.REWARDS, Columns.TERMINATEDS, Columns.TRUNCATEDS


class ReadyServer(LaneServer):
    """Serves some slots of a lane, which take turns in this thread."""

    _pipe, _first = -1, 0

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock)
        self._asked: dict[bytes, OneSlot] = {}  # slots by the frames that ask for their steps, once they are reset

    def _do(self, asked: Frame) -> bytes:
        kind = asked.kind
        if kind is FrameKind.STEP:
            return b""
        if kind is FrameKind.RESET:
            if self._pipe >= 0:
                os.close(self._pipe)
            self._pipe = asked.fd
            states: Any = self._goes_on or [(None, False)] * len(self._seeds)
            for one, seed, (state, resets_next) in zip(self._slots(), self._seeds, states, strict=True):
                self._asked[frame(FrameKind.STEP, number=one.slot)] = one
                given = one.begin(Beginning(seed, state, resets_next))
                if type(given) is tuple:
                    self._give(one.slot, given)
                elif given is None:
                    self._tell(one.slot)
                else:
                    self._send(frame_with(FrameKind.DONE, pack({"slot": one.slot, "anew": given})))
                    self._tell(~one.slot)
            return frame_with(FrameKind.DONE, b"")
        if kind is FrameKind.BLOCK:
            columns = self._columns = self._layout.columns(SharedBlock(asked.number, asked.fd).taken())
            self._actions = map_tree(lambda leaf: leaf[0], columns[Columns.ACTIONS].tree)
            self._plain = [columns[name].tree[0] for name in ANSWERED[1:]]
            return b""
        answer = super()._do(asked)
        if kind is FrameKind.MAKE:
            self._asked = {}
            self._slots()  # or an error
        return answer

    def _lay_out(self, fields: Mapping[str, Any]) -> None:
        self._first, space = fields["first_slot"], self._env.env.single_observation_space
        actions = self._env.env.single_action_space
        self._layout, self._join = lane_block(space, actions, fields["slots"], 1, 0), joiner_of_slots(space)
        self._one_action = batch_space(actions, 1)

    def _slots(self) -> Sequence[OneSlot]:
        slots: Sequence[OneSlot] = self._env.slots([self.phase.turn] * self._env.num_envs, self._first)
        return slots

    def _receive(self) -> Frame:
        """The next frame that asks for no step; the steps that are asked for before it are made."""
        while True:
            try:
                header, ancillary = receive_header(self.sock)
            except (EOFError, OSError) as error:
                raise LaneClosed from error
            one = self._asked.get(header)
            if one is None:
                return frame_in(header, ancillary)
            try:
                self._give(one.slot, one.step(self._action(one.slot)))
            except Exception as error:
                self._asked = {}  # what else was asked for meanwhile is left
                error.add_note(f"slot {one.slot}")
                self._send(failure(error))

    def _action(self, slot: int) -> Tree:
        actions = self._actions
        if isinstance(actions, np.ndarray):
            return actions[slot] if actions.ndim == 1 else actions[slot].copy()
        return next(iter(iterate(self._one_action, map_tree(lambda leaf: leaf[slot : slot + 1].copy(), actions))))

    def _give(self, slot: int, given: SlotAnswer) -> None:
        """Write an answer to shared memory, and tell its slot."""
        if self._is_written(slot, *given):
            self._tell(slot)
            return
        columns, slots = self._columns, np.array([slot])
        observations, rewards, terminateds, truncateds, infos, final = self._join([slot], [given])
        answer = dict(zip(ANSWERED, (observations, rewards, terminateds, truncateds), strict=True))
        fields: dict[str, Any] = {"info": info_of(infos, 0)} if infos else {}
        if final is not None:
            answer[FINAL_OBS], fields["final_info"] = final[0], info_of(final[1], 0)
        for name, values in answer.items():
            columns[name].write_items(0, slots, values)
        self._send(frame_with(FrameKind.DONE, self._deviations.packed({"slot": slot, **fields})))
        self._tell(~slot)

    def _tell(self, slot: int) -> None:
        os.write(self._pipe, slot.to_bytes(8, byteorder, signed=True))

    def _is_written(self, slot: int, answer: Any, final: Any) -> bool:
        """Write an answer that has nothing but its columns; False: it has more, or is to be looked at."""
        try:
            observation, reward, terminated, truncated, info = answer
        except (TypeError, ValueError):
            return False
        if final is not None or info or self._deviations.unsent or type(reward) is not float:
            return False
        if not (
            type(terminated) is type(truncated) is bool
            and self._columns[Columns.OBS].try_write_slot(0, slot, observation)
        ):
            return False
        rewards, terminateds, truncateds = self._plain
        rewards[slot], terminateds[slot], truncateds[slot] = reward, terminated, truncated
        return True


def main(life: int, lanes: Sequence[int]) -> None:
    """Serve slots: see `lane_server.main`."""
    lane_server.main(life, lanes, ReadyServer)
