"""Environments that step in worker processes: for those that are costly, or not to be trusted with this process."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from rollflow.nodes.env.lane_source import LaneSource
from rollflow.nodes.env.workers.agent_codec import InfoCodec, StepBlock
from rollflow.nodes.env.workers.frames import FINAL_OBS, SHARED_COLUMNS, Frame, FrameKind, frame, lane_block
from rollflow.nodes.env.workers.lane_status import LanePhase
from rollflow.nodes.env.workers.worker_node import LaneLink, WorkerNode
from rollflow.stream.data.blocks import SharedBlock
from rollflow.stream.data.columns import Columns
from rollflow.stream.data.errors import noted
from rollflow.stream.data.packing import pack
from rollflow.stream.data.tree import Tree, map_tree
from rollflow.stream.fragments.lane import Lane, LaneBlocks


class EnvLink(LaneLink):
    """The link to a worker that writes a lane's rows straight into its fragments."""

    _blocks_sent = 0

    def _reset(self) -> None:
        lane, blocks = self._laid_out()
        layout = {"rows": lane.layout.num_rows, "lookback": lane.layout.lookback}
        self.send_block(FrameKind.LAYOUT, pack(layout | _beginning(self)))
        self._blocks_sent = 0
        self._send_blocks(blocks)
        self.send(frame(FrameKind.RESET, blocks.index, lane.row))

    def step(self) -> None:
        """Have the environments stepped with the lane's actions."""
        lane, blocks = self._laid_out()
        kind = FrameKind.STEP
        if Columns.ACTIONS_FOR_ENV in lane.batch or Columns.ACTIONS not in blocks.names:
            kind = FrameKind.STEP_FOR_ENV
            blocks.columns[Columns.ACTIONS_FOR_ENV].write(0, lane.actions)
        self._send_blocks(blocks)
        self.send(frame(kind, blocks.index, lane.row))

    def take(self, answer: Frame) -> bool:
        """Have the lane take what its worker has written."""
        lane, blocks = self._laid_out()
        fields = self._fields_of(answer, f"lane {self.index}, ") if answer.payload else {}
        infos = fields.get("infos", {})
        if self.phase is LanePhase.RESETTING:
            if not _goes_on(self, fields):
                lane.take_reset(infos)
        else:
            final = None
            if "final_infos" in fields:
                final = self._last_observations(lane, blocks), fields["final_infos"]
            lane.take_step(infos, final)
        return self._taken()

    def _laid_out(self) -> tuple[Lane, LaneBlocks]:
        lane: Lane = self.lane
        assert lane.memory is not None
        return lane, lane.memory

    def _last_observations(self, lane: Lane, blocks: LaneBlocks) -> Tree:
        done = blocks.columns[Columns.TERMINATEDS].row(lane.row) | blocks.columns[Columns.TRUNCATEDS].row(lane.row)
        return map_tree(lambda leaf: leaf[done], blocks.columns[FINAL_OBS].row(0))

    def _send_blocks(self, blocks: LaneBlocks) -> None:
        for index in range(self._blocks_sent, len(blocks.pool.blocks)):
            block = blocks.pool.blocks[index]
            self.send(frame(FrameKind.BLOCK, index, block.size), block.fd)
        self._blocks_sent = len(blocks.pool.blocks)


def _beginning(link: LaneLink) -> dict[str, Any]:
    """What a worker is told of the first reset of a lane, beside its layout."""
    lane, node = link.lane, link.node
    if lane.is_restored and link.starts:  # it was lost before it went on
        lane.begin_anew(link.reason)
    told = {"seeds": node.seeds_of_lane(link.index, link.starts + lane.vector_steps * lane.is_restored)}
    told["records"] = node.records_actions
    if lane.is_restored:
        told["goes_on"] = [node.states_before[link.index], np.flatnonzero(lane.dead).tolist()]
    return told


def _goes_on(link: LaneLink, fields: Mapping[str, Any]) -> bool:
    """True if the environments of a lane go on from their states, by what their worker answers."""
    if link.lane.is_restored and "anew" in fields:
        link.node.begin_anew(link.lane, fields["anew"])
    return bool(link.lane.is_restored)


class AgentLink(LaneLink):
    """The link to a worker that has a block of memory for a step in common with this process."""

    def __init__(self, index: int, maker: Any, node: LaneSource) -> None:
        super().__init__(index, maker, node)
        self._infos = InfoCodec(())
        self._memory: SharedBlock | None = None
        self._block: StepBlock | None = None

    def release(self) -> None:
        self._memory = self._block = None

    def _reset(self) -> None:
        if self._memory is None:
            envs = self.node.envs[self.index]
            self._infos = InfoCodec(envs.possible_agents)
            self._memory = SharedBlock(StepBlock.size(envs.parts, envs.num_envs))
            self._block = StepBlock(envs.parts, envs.num_envs, self._memory.array())
        first_slot = self.node.first_slots()[self.index]  # which the maker can't have: sizes weren't known yet
        self.send_block(FrameKind.LAYOUT, pack({"first_slot": first_slot} | _beginning(self)))
        self.send(frame(FrameKind.BLOCK, number=self._memory.size), self._memory.fd)
        self.send(frame(FrameKind.RESET))

    def step(self) -> None:
        """Have the environments stepped with the lane's actions."""
        assert self._block is not None
        self._block.write_actions(self.lane.actions)
        self.send(frame(FrameKind.STEP))

    def take(self, answer: Frame) -> bool:
        """Have the lane take what its worker has written."""
        assert self._block is not None
        lane, fields = self.lane, self._fields_of(answer)
        infos, first_infos = (self._infos.infos(fields.get(kind, ())) for kind in ("infos", "first_infos"))
        if self.phase is LanePhase.RESETTING:
            if not _goes_on(self, fields):
                lane.reset(self._block.first(), infos)
        else:
            with noted(lane.where):
                lane.record_step(self._block.step(infos, first_infos))
        return self._taken()


class ProcessEnvironments(WorkerNode):
    """A node whose lanes step in worker processes, while others are worked on: see `WorkerNode`.

    Callables are handed over by cloudpickle. Rows of environments with one agent lie in shared memory. Agents' ids must
    be numbers, strings or tuples of those; infos numbers, strings, arrays, or lists and dicts of those. An agent that
    has acted and waits when its environment is lost has made no step: it is one of `lost_steps`.
    """

    program = "rollflow.nodes.env.workers.lane_server"

    def link_of(self, lane: int, maker: Any, node: LaneSource) -> LaneLink:
        return (AgentLink if self.kind.has_several else EnvLink)(lane, maker, node)

    def _release_lanes(self) -> None:
        for lane in self.lanes:
            if isinstance(lane, Lane) and lane.memory is not None:
                lane.memory.pool.close()
        super()._release_lanes()

    def memory(self, index: int) -> LaneBlocks | None:
        """Blocks that a lane's worker writes to as well."""
        spaces = self.observation_space, self.action_space
        slots = self.envs[index].num_envs
        block = lane_block(*spaces, slots, self.fragment_length, self.lookback)
        has_actions = self.chosen_space == self.action_space
        return LaneBlocks(block, [name for name in SHARED_COLUMNS if has_actions or name != Columns.ACTIONS])
