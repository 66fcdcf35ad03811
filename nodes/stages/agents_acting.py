"""Modules as they act in environments of several agents each, and the connector pipelines around them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import gymnasium as gym

from rollflow.nodes.connectors.connector_v2 import ConnectorV2
from rollflow.nodes.connectors.pipelines.default_pipelines import EnvToModulePipeline, ModuleToEnvPipeline
from rollflow.nodes.modules.policy_weights import PolicyWeights
from rollflow.nodes.stages.acting import left_by, sampling_data
from rollflow.nodes.stages.agent_stages import AgentForward, AgentsToModule, JointPieces, ModuleToAgents
from rollflow.nodes.stages.connector_builders import pieces_given
from rollflow.nodes.stages.module_set import ModuleSet
from rollflow.stream.multi_agent.agent_part import AgentPart
from rollflow.stream.multi_agent.multi_agent_lane import MultiAgentLane


@dataclass(slots=True, eq=False)
class AgentsActing:
    """Modules that act, and their pipelines, in environments of several agents each; see `Acting`.

    A pickled one has copies of the modules, with the weights that they have loaded.

    given           modules as they were given
    options         what else `ModuleSet` is made with
    joint           pieces that see all agents together; None: there are none
    env_to_module, module_to_env    default pipelines of each part, with the pieces given

    modules         those that act
    """

    given: Any
    options: Mapping[str, Any]
    joint: JointPieces | None
    env_to_module: list[EnvToModulePipeline]
    module_to_env: list[ModuleToEnvPipeline]
    modules: ModuleSet = field(init=False)

    def __post_init__(self) -> None:
        self.modules = ModuleSet(self.given, **self.options)

    @property
    def parts(self) -> tuple[AgentPart, ...]:
        """The agents by their spaces, as the modules' own pieces find them."""
        parts: tuple[AgentPart, ...] = self.options["parts"]
        return parts

    @property
    def named_pipelines(self) -> list[tuple[str, Any]]:
        """Every pipeline with its name in messages; each part's goes by the part's agents."""
        named: list[tuple[str, Any]] = [] if self.joint is None else [("joint", self.joint.pipeline)]
        for name, pipelines in (("env_to_module", self.env_to_module), ("module_to_env", self.module_to_env)):
            for part, pipeline in zip(self.parts, pipelines, strict=True):
                named.append((name if len(self.parts) == 1 else f"{name} of agents {list(part.agents)}", pipeline))
        return named

    @property
    def pipelines(self) -> list[Any]:
        """Every pipeline, that of the joint pieces first."""
        return [pipeline for _, pipeline in self.named_pipelines]

    @property
    def by_id(self) -> dict[Any, tuple[Any, PolicyWeights]]:
        """Module id -> the copy that acts, and its weights as they are published."""
        return {module_id: (each.module, each.weights) for module_id, each in self.modules.acting.items()}

    def make_lanes(self, environments: Any, lookback: int, seed: int, sequence: int = 0) -> None:
        """Have environments make lanes that look back so many agent steps, with what modules sample with."""
        environments.make_lanes(
            lookback, self.modules, lambda lane, acting: sampling_data(lane, seed, acting.seed_name)
        )
        for lane in environments.lanes:
            lane.sequence = sequence
            for part in lane.parts:
                part.fragment.sequence = sequence

    def set_spaces(self, environments: Any) -> None:
        """Have environments record actions in the spaces of what modules choose. Before their lanes are made."""
        environments.set_chosen_spaces(self.modules.chosen_spaces())

    def stages(self, environments: Any, how: Mapping[str, Any], metrics: Any, **of_lanes: Any) -> tuple[Any, Any, Any]:
        """The stages before the forward passes, of them, and behind them."""
        return (
            AgentsToModule(self.env_to_module, self.modules, joint=self.joint, metrics=metrics, **of_lanes),
            AgentForward(self.modules),
            ModuleToAgents(self.module_to_env, metrics=metrics, threads=how["threads"]),
        )

    def under_way(self, lane: MultiAgentLane) -> int:
        """Transitions that a lane's next vector step may end."""
        return lane.steps_under_way + sum(len(part.acting) for part in lane.parts)

    def __reduce__(self) -> Any:
        acting = self.modules.acting.items()
        given = {module_id: each.module for module_id, each in acting}
        explore = {module_id: each.explore for module_id, each in acting}
        options = {**self.options, "model_config": None, "explore": explore}
        return AgentsActing, (given, options, self.joint, self.env_to_module, self.module_to_env)


def agents_acting_for(
    parts: Sequence[AgentPart],
    env: Any,
    *,
    module: Any,
    joint_connector: Any,
    env_to_module_connector: Any,
    module_to_env_connector: Any,
    **options: Any,
) -> AgentsActing:
    """Modules and pipelines that act in environments with these agents, as `MultiAgentRollout` takes them.

    parts      the agents by their spaces
    env        the environments of a lane, or a description of them, for `joint_connector`
    options    what else `ModuleSet` is made with

    Raises ModuleError or ConnectorError for modules or connectors that can't be used.
    """
    joint = pieces_given(joint_connector, "joint_connector", env)
    together = JointPieces(parts, joint) if joint else None
    left = tuple(parts) if together is None else together.parts_left()
    before = [_pieces(env_to_module_connector, "env_to_module_connector", part) for part in left]
    after = [_pieces(module_to_env_connector, "module_to_env_connector", part) for part in left]
    options |= {
        "parts": left,
        "seen": tuple(left_by(pieces, _spaces(part)) for part, pieces in zip(left, before, strict=True)),
        "acted": tuple(None if pieces else part.action_space for part, pieces in zip(left, after, strict=True)),
    }
    # With what a stateful module needs: one may be added. The pieces do nothing for others.
    return AgentsActing(
        module,
        options,
        together,
        [
            EnvToModulePipeline.default(*_spaces(part), pieces, stateful=True, device=options["device"])
            for part, pieces in zip(left, before, strict=True)
        ],
        [
            ModuleToEnvPipeline.default(*_spaces(part), pieces, stateful=True)
            for part, pieces in zip(left, after, strict=True)
        ],
    )


def _spaces(part: AgentPart) -> tuple[gym.Space[Any], gym.Space[Any]]:
    return part.observation_space, part.action_space


def _pieces(connector: Any, name: str, part: AgentPart) -> list[ConnectorV2]:
    return pieces_given(connector, name, part, spaces=_spaces(part))
