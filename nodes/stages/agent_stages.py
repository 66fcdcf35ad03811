"""The stages of environments with several agents: connector pieces and the cutting of fragments, forward, actions."""

from collections.abc import Callable, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import gymnasium as gym
import numpy as np

from rollflow.nodes.connectors.connector_v2 import ConnectorV2
from rollflow.nodes.connectors.pipelines.connector_pipeline_v2 import note_own_pieces, slowest_piece
from rollflow.nodes.connectors.pipelines.default_pipelines import EnvToModulePipeline, ModuleToEnvPipeline
from rollflow.nodes.modules.rl_module import with_threads
from rollflow.nodes.stages.env_to_module import CuttingStage, check_lookback, record_first_states
from rollflow.nodes.stages.module_to_env import act
from rollflow.stream.data.columns import Columns
from rollflow.stream.data.errors import ConnectorError
from rollflow.stream.data.tree import Tree, concatenate_trees, map_tree
from rollflow.stream.multi_agent.agent_lane import AgentLane, ModuleTurn, Slots
from rollflow.stream.multi_agent.agent_part import AgentPart
from rollflow.stream.multi_agent.env_episodes import live_episode
from rollflow.stream.multi_agent.multi_agent_fragment import MultiAgentFragment
from rollflow.stream.multi_agent.multi_agent_lane import MultiAgentLane

if TYPE_CHECKING:
    from rollflow.nodes.stages.module_set import ActingModule, AgentsActing


class JointPieces:
    """Runs pieces over the `MultiAgentEpisode`s of a lane.

    parts     the agents by their spaces
    pieces    may rewrite the newest observations of agents, and must leave the batch empty
    """

    def __init__(self, parts: Sequence[AgentPart], pieces: Sequence[ConnectorV2]) -> None:
        agents = [(agent, part) for part in parts for agent in part.agents]
        seen = gym.spaces.Dict({agent: part.observation_space for agent, part in agents})
        done = gym.spaces.Dict({agent: part.action_space for agent, part in agents})
        self.pipeline = EnvToModulePipeline(seen, done, connectors=list(pieces))
        self._parts = parts

    def parts_left(self) -> tuple[AgentPart, ...]:
        """The parts, with the spaces that the pieces leave their observations in.

        Raises ConnectorError if they are others for one agent of a part than for another.
        """
        left: Any = self.pipeline.observation_space
        agents = {agent for part in self._parts for agent in part.agents}
        is_by_agents = isinstance(left, gym.spaces.Dict) and set(left.spaces) == agents
        parts = []
        for part in self._parts:
            spaces = [left[agent] if is_by_agents else left for agent in part.agents]
            for agent, space in zip(part.agents, spaces, strict=True):
                if space != spaces[0]:
                    raise ConnectorError(
                        f"{self.pipeline.name} leaves observations of agent '{agent}' in {space} and those of "
                        f"'{part.agents[0]}' in {spaces[0]}, expected the same for agents with the same spaces"
                    )
            # The very space where nothing has changed it: a lane tells spaces apart by that.
            same = spaces[0] == part.observation_space
            parts.append(part if same else part._replace(observation_space=spaces[0]))
        return tuple(parts)

    def __call__(self, lane: MultiAgentLane, modules: "AgentsActing", explore: bool, metrics: Any) -> None:
        """Have the pieces see what the last step gave: first the episodes that it has ended, then those that go on."""
        if len(lane.just_ended):
            self._see(lane, lane.just_ended.tolist(), modules, explore, metrics, has_ended=True)
        self._see(lane, range(lane.num_envs), modules, explore, metrics, has_ended=False)
        for part in lane.parts:
            part.reveal_ended(None)

    def _see(
        self,
        lane: MultiAgentLane,
        envs: Sequence[int],
        modules: "AgentsActing",
        explore: bool,
        metrics: Any,
        *,
        has_ended: bool,
    ) -> None:
        for part in lane.parts:
            part.reveal_ended(lane.just_ended, of_these=has_ended)
        shown = [part.show_jointly(with_those_that_act=not has_ended) for part in lane.parts]
        episodes: Any = [live_episode(lane, env, has_ended=has_ended) for env in envs]
        batch = self.pipeline.run(modules.module, {}, episodes, explore, {"step": lane.step}, metrics)
        if batch:
            raise ConnectorError(
                f"{self.pipeline.name} put {sorted(map(str, batch))} into the batch, expected it to be left empty: "
                "pieces that see all agents together rewrite observations, and batches are made for each module"
            )
        for part, each in zip(lane.parts, shown, strict=True):
            part.take_jointly(each)


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
    of_lanes     keywords of `CuttingStage`
    """

    def __init__(
        self,
        pipelines: Sequence[EnvToModulePipeline],
        modules: "AgentsActing",
        *,
        joint: JointPieces | None = None,
        metrics: Any = None,
        **of_lanes: Any,
    ) -> None:
        super().__init__(PreparedAgents, **of_lanes)
        self.pipelines, self._joint = pipelines, joint
        self._modules, self._metrics = modules, metrics

    def __call__(self, steps: MultiAgentLane) -> PreparedAgents:
        """Turn the newest observations of those agents that are to act into batches."""
        lane = steps
        if self.note is not None:
            self.note(lane.index)
        if lane.is_set_aside:
            return self._set_aside(lane)
        if lane.index not in self._lanes and (result := self._first_result(lane)) is not None:
            return result
        lane.turns = []
        agents: tuple[Any, ...] = ()
        try:
            if self._joint is not None:
                self._joint(lane, self._modules, self._modules.explores, self._metrics)
            for part, pipeline in zip(lane.parts, self.pipelines, strict=True):
                agents = part.part.agents
                self._prepare(lane, part, pipeline)
        except Exception as error:
            note_own_pieces(error, *self.pipelines)
            whose = f", agents {list(agents)}" if agents else ""
            error.add_note(f"{lane.where}{whose}")
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

    def _prepare(self, lane: MultiAgentLane, part: AgentLane, pipeline: EnvToModulePipeline) -> None:
        if part.ended is not None:
            if pipeline.changes_episodes:
                for place, slots in part.ended_by_module():
                    acting = lane.modules[place]
                    ended = part.show_ended(slots)
                    shared_data = dict(lane.shared_data_of(place))
                    pipeline.run(acting.module, {}, ended, acting.explore, shared_data, self._metrics)
                    part.ended.take(ended)
            part.commit_ended()
        step, run, metrics = lane.step, pipeline.run, self._metrics
        for turn in part.turns(lane.shared_data_of):
            shown, acting, shared_data = part.show(turn), turn.acting, turn.shared_data
            shared_data["step"] = step
            turn.batch = batch = run(acting.module, {}, shown, acting.explore, shared_data, metrics)
            if Columns.STATE_IN in batch:
                record_first_states(shown, batch[Columns.STATE_IN])
            part.commit(shown)
            lane.turns.append(turn)


class AgentForward:
    """A node that runs each module over its batch; the output takes the batch's place.

    modules    those that act, for `explain()`

    note    told of ~ the number of each lane that has a pass of its own; None: nobody is
    """

    note: Callable[[int], None] | None = None

    def __init__(self, modules: "AgentsActing") -> None:
        self._modules = modules

    def __call__(self, batches: MultiAgentLane) -> MultiAgentLane:
        """One pass for every module that has agents to act for."""
        if self.note is not None:
            self.note(~batches.index)
        for turn in batches.turns:
            turn.acting.forward(turn)
        return batches

    def rows(self, lane: MultiAgentLane) -> int:
        """Rows of a lane in its passes, of all modules: the agents that are to act."""
        return sum(len(part.acting) for part in lane.parts)

    def forward_lanes(self, lanes: Sequence[MultiAgentLane]) -> None:
        """One pass for every module, over its agents in all lanes; each lane gets `LaneOutput`s of those."""
        if len(lanes) == 1:
            self(lanes[0])
            return
        served: dict[ActingModule, list[ModuleTurn]] = {}
        for turn in chain.from_iterable(lane.turns for lane in lanes):
            served.setdefault(turn.acting, []).append(turn)
        for acting, turns in served.items():
            numbers = ", ".join(str(turn.part.index) for turn in turns)
            acting.forward.forward_jointly(turns, f"module '{acting.module_id}', lanes {numbers}")

    def describe(self) -> str:
        """The way passes are done, for `explain()`, if that is not as the modules have it."""
        ways = {acting.module_id: acting.forward.describe() for acting in list(self._modules.acting.values())}
        if len(set(ways.values())) == 1:
            return next(iter(ways.values()))
        return ", ".join(f"'{module_id}' {way}" for module_id, way in ways.items() if way)


class ModuleToAgents:
    """A node that runs a module-to-env pipeline over every module's output and records the actions that come out.

    pipelines    of each part: make `actions` (and maybe `actions_for_env`) out of outputs; their pieces see the module
                 whose output they are given as `rl_module`
    metrics      what the pieces see as `metrics`
    threads      that torch uses meanwhile; None: as many as it is set to
    """

    def __init__(
        self, pipelines: Sequence[ModuleToEnvPipeline], *, metrics: Any = None, threads: int | None = None
    ) -> None:
        self.pipelines = pipelines
        self._act_all = with_threads(threads, self._all_actions)
        self._metrics = metrics

    def __call__(self, outputs: MultiAgentLane) -> MultiAgentLane:
        """Work out the actions of all agents that are to act."""
        lane = outputs
        lane.actions = self._act_all(lane)
        return lane

    @property
    def slowest_piece(self) -> str:
        """Name of the piece that took most of its time."""
        return slowest_piece(self.pipelines)

    def _all_actions(self, lane: MultiAgentLane) -> list[tuple[Slots | None, Tree]]:
        """Slots i64[K] and actions `any[K, ...]` of all agents that are to act, part by part; None for slots: all."""
        of_parts = []
        for part, pipeline in zip(lane.parts, self.pipelines, strict=True):
            has_made_others = False
            for turn in lane.turns:
                if turn.part is part:
                    context = turn.acting.module, turn.acting.explore, self._metrics
                    act(pipeline, (), part.part.action_space, context, turn)
                    has_made_others = has_made_others or Columns.ACTIONS_FOR_ENV in turn.batch
            of_parts.append(_joined(part, lane.turns) if has_made_others else part.recorded_actions())
        return of_parts


def _joined(part: AgentLane, turns: Sequence[ModuleTurn]) -> tuple[Slots | None, Tree]:
    """Actions of a part's agents for the environments, in the slots' order."""
    turns = [turn for turn in turns if turn.part is part]
    slots = np.concatenate([turn.slots for turn in turns])
    order = np.argsort(slots, kind="stable")
    actions = map_tree(lambda leaf: leaf[order], concatenate_trees([turn.actions for turn in turns]))
    return (None if len(slots) == part.layout.num_slots else slots[order]), actions
