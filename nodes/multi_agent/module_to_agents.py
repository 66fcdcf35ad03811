"""The stage after the forward passes: connector pieces turn the modules' outputs into actions of agents."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from rollflow.nodes.connectors.module_to_env.module_to_env_pipeline import ModuleToEnvPipeline
from rollflow.nodes.multi_agent.acting_module import acting_in
from rollflow.nodes.torch_threads import TorchThreads
from rollflow.stream.columns import Columns
from rollflow.stream.multi_agent.agent_lane import AgentLane
from rollflow.stream.multi_agent.ended_agents import Slots
from rollflow.stream.multi_agent.multi_agent_lane import MultiAgentLane
from rollflow.stream.tree import Tree, concatenate_trees, map_tree, stack_trees


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

    def __call__(self, outputs: MultiAgentLane) -> MultiAgentLane:
        """Work out the actions of all agents that are to act."""
        lane = outputs
        with self._threads:
            lane.actions = [self._actions(lane, *each) for each in zip(lane.parts, self.pipelines, strict=True)]
        return lane

    def _actions(
        self, lane: MultiAgentLane, part: AgentLane, pipeline: ModuleToEnvPipeline
    ) -> tuple[Slots | None, Tree]:
        """Of all agents of a part that are to act."""
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
    ) -> tuple[Slots, Tree]:
        acting, shared_data = acting_in(lane, place), lane.shared_data_of(place)
        batch = pipeline.run(
            acting.module, lane.batches[place], lane.shown[place], acting.explore, shared_data, self._metrics
        )
        if not pipeline.columnar:
            batch = {name: stack_trees(x) if isinstance(x, list) else x for name, x in batch.items()}
        part.record_actions(slots, batch, place, lane.policy_versions[place])
        return slots, batch.get(Columns.ACTIONS_FOR_ENV)


def _agents_of(part: AgentLane, slots: Slots) -> list[Any]:
    """Whose slots these are, each agent once."""
    agents = part.part.agents
    return [agents[place] for place in np.unique(slots % len(agents)).tolist()]


def _for_envs(part: AgentLane, made: list[tuple[Slots, Tree]]) -> tuple[Slots | None, Tree]:
    """What the environments are to be stepped with: the actions, or what a piece made of them, in the slots' order."""
    if all(actions is None for _, actions in made):
        return part.recorded_actions()
    slots = np.concatenate([slots for slots, _ in made])
    order = np.argsort(slots, kind="stable")
    actions = map_tree(lambda leaf: leaf[order], concatenate_trees([each for _, each in made]))
    return (None if len(slots) == part.layout.num_slots else slots[order]), actions
