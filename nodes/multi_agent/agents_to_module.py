"""The stage before the forward passes: connector pieces, module by module, and the cutting of fragments."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from rollflow.nodes.connectors.env_to_module.env_to_module_pipeline import EnvToModulePipeline
from rollflow.nodes.multi_agent.acting_module import acting_in
from rollflow.nodes.multi_agent.joint_pieces import JointPieces
from rollflow.nodes.multi_agent.module_set import ModuleSet
from rollflow.stream.errors import ConnectorError
from rollflow.stream.multi_agent.agent_lane import AgentLane
from rollflow.stream.multi_agent.multi_agent_fragment import MultiAgentFragment
from rollflow.stream.multi_agent.multi_agent_lane import MultiAgentLane


class PreparedAgents(NamedTuple):
    """What one lane's turn gives: its batches for the modules, and at times a finished fragment."""

    batches: MultiAgentLane | None
    fragments: MultiAgentFragment | None


class AgentsToModule:
    """A node that makes a batch for every module out of the agents that are to act, and cuts full fragments.

    pipelines        of each part: may change the observations of its agents' episodes, and makes the batches
    modules          what joint pieces see as `rl_module`; the others see the one whose agents they are given
    num_lanes        lanes that come by
    num_fragments    after so many fragments a lane stops; None: it never does
    metrics          what the pieces see as `metrics`
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
    ) -> None:
        self.pipelines, self._joint = pipelines, joint
        self._modules, self._metrics = modules, metrics
        self._num_fragments, self._going = num_fragments, num_lanes
        self._lanes: dict[int, MultiAgentLane] = {}

    def __call__(self, steps: MultiAgentLane) -> PreparedAgents:
        """Turn the newest observations of those agents that are to act into batches."""
        lane = steps
        if lane.is_set_aside:
            self._going -= 1
            known = self._lanes.pop(lane.index, None) is not None
            return PreparedAgents(None, lane.leave() if known else None)
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
        if not lane.is_full:
            return PreparedAgents(lane, None)
        fragment = lane.cut()
        if self._num_fragments is None or fragment.sequence + 1 < self._num_fragments:
            return PreparedAgents(lane, fragment)
        self._going -= 1
        return PreparedAgents(None, fragment)

    def expect(self, lanes: int) -> None:
        """Say that so many more lanes come by than was said at first."""
        self._going += lanes

    @property
    def done(self) -> bool:
        """Whether every lane has stopped."""
        return self._going == 0

    def finish(self) -> Iterator[PreparedAgents]:
        """Cut what every lane has so far."""
        for lane in self._lanes.values():
            if not lane.at_start:
                yield PreparedAgents(None, lane.cut())

    def _take_in(self, lane: MultiAgentLane) -> None:
        jointly = [] if self._joint is None else [self._joint.pipeline]
        for pipeline in (*jointly, *self.pipelines):
            if pipeline.lookback > lane.lookback:
                raise ConnectorError(
                    f"{pipeline.name} looks back {pipeline.lookback} steps, but fragments keep {lane.lookback}; "
                    "expected it to be edited before the rollout is run or put into a graph"
                )
        self._lanes[lane.index] = lane
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
            shared_data["step"] = lane.vector_steps
            lane.batches[place] = pipeline.run(acting.module, {}, shown, acting.explore, shared_data, self._metrics)
            part.settle(shown)
            lane.shown[place] = shown
