"""The stage before the forward passes: connector pieces, module by module, and the cutting of fragments."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from rollflow.nodes.connectors.common.stateful_columns import states_at
from rollflow.nodes.connectors.pipelines.connector_pipeline_v2 import slowest_piece
from rollflow.nodes.connectors.pipelines.default_pipelines import EnvToModulePipeline
from rollflow.nodes.stages.acting_module import acting_in
from rollflow.nodes.stages.credits import GateRelay
from rollflow.nodes.stages.env_to_module import CuttingStage, check_lookback
from rollflow.nodes.stages.joint_pieces import JointPieces
from rollflow.nodes.stages.module_set import ModuleSet
from rollflow.stream.data.columns import Columns
from rollflow.stream.data.loss_ledger import Ledger
from rollflow.stream.multi_agent.agent_lane import AgentLane
from rollflow.stream.multi_agent.multi_agent_fragment import MultiAgentFragment
from rollflow.stream.multi_agent.multi_agent_lane import MultiAgentLane


class PreparedAgents(NamedTuple):
    """Output of one lane's turn: its batches for the modules, and at times a finished fragment."""

    batches: MultiAgentLane | None
    fragments: MultiAgentFragment | None


class AgentsToModule(CuttingStage[MultiAgentLane, PreparedAgents]):
    """A node that makes a batch for every module out of the agents that are to act, and cuts full fragments.

    pipelines    of each part: may change the observations of its agents' episodes, and makes the batches
    modules      what joint pieces see as `rl_module`; the others see the one whose agents they are given
    joint        pieces that see all agents together, before the others; None: there are none
    metrics      what the pieces see as `metrics`

    The other parameters are those of `EnvToModule`.
    """

    def __init__(
        self,
        pipelines: Sequence[EnvToModulePipeline],
        modules: ModuleSet,
        *,
        joint: JointPieces | None = None,
        num_lanes: int = 1,
        num_fragments: int | None = None,
        metrics: Any = None,
        ledger: Ledger | None = None,
        relay: GateRelay | None = None,
    ) -> None:
        super().__init__(PreparedAgents, num_lanes, num_fragments, ledger, relay)
        self.pipelines, self._joint = pipelines, joint
        self._modules, self._metrics = modules, metrics

    def __call__(self, steps: MultiAgentLane) -> PreparedAgents:
        """Turn the newest observations of those agents that are to act into batches."""
        lane = steps
        if lane.is_set_aside:
            return self._set_aside(lane)
        if lane.index not in self._lanes:
            self._take_in(lane)
        lane.batches = {}
        if self._joint is not None:
            self._see_jointly(lane, self._joint)
        for part, pipeline in zip(lane.parts, self.pipelines, strict=True):
            try:
                self._prepare(lane, part, pipeline)
            except Exception as error:
                error.add_note(f"lane {lane.index}, vector step {lane.vector_steps}, agents {list(part.part.agents)}")
                raise
        return self._full(lane) if lane.is_full else self._ready[lane.index]

    @property
    def slowest_piece(self) -> str:
        """Name of the piece that took most of its time."""
        return slowest_piece([*self.pipelines, *([] if self._joint is None else [self._joint.pipeline])])

    def _take_in(self, lane: MultiAgentLane) -> None:
        jointly = [] if self._joint is None else [self._joint.pipeline]
        for pipeline in (*jointly, *self.pipelines):
            check_lookback(pipeline, lane.lookback)
        super()._take_in(lane)
        for part, pipeline in zip(lane.parts, self.pipelines, strict=True):
            part.observation_spaces = (
                part.observation_spaces[0],
                *(space for space in (pipeline.input_observation_space,) if space is not None),
                *pipeline.observation_spaces,
            )

    def _see_jointly(self, lane: MultiAgentLane, joint: JointPieces) -> None:
        try:
            joint(lane, self._modules, self._modules.explores, self._metrics)
        except Exception as error:
            error.add_note(f"lane {lane.index}, vector step {lane.vector_steps}")
            raise

    def _prepare(self, lane: MultiAgentLane, part: AgentLane, pipeline: EnvToModulePipeline) -> None:
        if part.ended is not None:
            if pipeline.changes_episodes:
                for place, slots in part.ended_by_module():
                    ended, acting = part.show_ended(slots), acting_in(lane, place)
                    shared_data = dict(lane.shared_data_of(place))
                    pipeline.run(acting.module, {}, ended, acting.explore, shared_data, self._metrics)
                    part.edit_ended(ended)
            part.settle_ended()
        for place, slots in part.by_module(part.acting):
            shown, acting = part.show(slots), acting_in(lane, place)
            shared_data = lane.shared_data_of(place)
            shared_data["step"] = lane.step
            batch = pipeline.run(acting.module, {}, shown, acting.explore, shared_data, self._metrics)
            lane.batches[place] = batch
            if Columns.STATE_IN in batch:
                begun = np.flatnonzero(shown.just_begun())
                if len(begun):
                    part.record_states(slots[begun], states_at(batch[Columns.STATE_IN], begun))
            part.settle(shown)
            lane.shown[place] = shown
