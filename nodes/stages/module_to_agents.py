"""The stage after the forward passes: connector pieces turn the modules' outputs into actions of agents."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from rollflow.nodes.connectors.pipelines.connector_pipeline_v2 import slowest_piece
from rollflow.nodes.connectors.pipelines.default_pipelines import ModuleToEnvPipeline
from rollflow.nodes.modules.torch_threads import TorchThreads
from rollflow.nodes.stages.acting_module import acting_in
from rollflow.nodes.stages.module_to_env import acted, check_first_actions, convert_actions
from rollflow.stream.data.columns import Columns
from rollflow.stream.data.tree import Tree, concatenate_trees, map_tree
from rollflow.stream.multi_agent.agent_lane import AgentLane, Slots
from rollflow.stream.multi_agent.multi_agent_lane import MultiAgentLane


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
        self._threads = TorchThreads(threads)
        self._metrics = metrics
        self._checked: set[tuple[int, int]] = set()  # lane and module whose first actions have been looked at

    def __call__(self, outputs: MultiAgentLane) -> MultiAgentLane:
        """Work out the actions of all agents that are to act."""
        lane = outputs
        lane.actions = self._threads.run(self._all_actions, lane)
        return lane

    @property
    def slowest_piece(self) -> str:
        """Name of the piece that took most of its time."""
        return slowest_piece(self.pipelines)

    def _all_actions(self, lane: MultiAgentLane) -> list[tuple[Slots | None, Tree]]:
        return [self._actions(lane, *each) for each in zip(lane.parts, self.pipelines, strict=True)]

    def _actions(
        self, lane: MultiAgentLane, part: AgentLane, pipeline: ModuleToEnvPipeline
    ) -> tuple[Slots | None, Tree]:
        """Slots i64[K] and actions `any[K, ...]` of all agents of a part that are to act; None for slots: all."""
        made = []
        for place, slots in part.by_module(part.acting):
            try:
                made.append(self._act(lane, part, pipeline, place, slots))
            except Exception as error:
                error.add_note(
                    f"module '{lane.module_ids[place]}', lane {lane.index}, vector step {lane.vector_steps}, "
                    f"agents {_agents_of(part, slots)}"
                )
                raise
        return _for_envs(part, made)

    def _act(
        self, lane: MultiAgentLane, part: AgentLane, pipeline: ModuleToEnvPipeline, place: int, slots: Slots
    ) -> tuple[Slots, Tree, Tree]:
        """Act for slots i64[K]: these, actions that a piece made for environments (None: none), and those chosen."""
        acting = acting_in(lane, place)
        context = acting.module, acting.explore, self._metrics
        batch = acted(pipeline, lane.batches[place], lane.shown[place], lane.shared_data_of(place), context)
        if (lane.index, place) not in self._checked:
            self._checked.add((lane.index, place))
            check_first_actions(batch, part.part.recorded_space, part.part.action_space, len(slots))
        convert_actions(batch, part.part.recorded_space, part.part.action_space)
        part.record_actions(slots, batch, place, lane.policy_versions[place])
        return slots, batch.get(Columns.ACTIONS_FOR_ENV), batch[Columns.ACTIONS]


def _agents_of(part: AgentLane, slots: Slots) -> list[Any]:
    """The agents that have these slots, each once."""
    agents = part.part.agents
    return [agents[place] for place in np.unique(slots % len(agents)).tolist()]


def _for_envs(part: AgentLane, made: list[tuple[Slots, Tree, Tree]]) -> tuple[Slots | None, Tree]:
    """Actions for the environments, in the slots' order: those chosen, or what a piece made of them."""
    if all(actions is None for _, actions, _ in made):
        return part.recorded_actions()
    slots = np.concatenate([slots for slots, _, _ in made])
    order = np.argsort(slots, kind="stable")
    actions = map_tree(
        lambda leaf: leaf[order], concatenate_trees([chosen if each is None else each for _, each, chosen in made])
    )
    return (None if len(slots) == part.layout.num_slots else slots[order]), actions
