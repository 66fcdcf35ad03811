"""Policies of rollouts: the modules that act, their connectors, and how weights are published to them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rollflow.nodes.modules.policy_weights import PolicyWeights, Weights
from rollflow.nodes.offloaded.agent_fragment_message import PartSpaces, spaces_seen
from rollflow.nodes.offloaded.offloaded import AgentEmitter, Emitter
from rollflow.nodes.offloaded.replica import PIPELINES, OneReplica, Published, Replica, SeveralReplica
from rollflow.nodes.rollout.options import ForwardOptions
from rollflow.nodes.stages.acting import Acting, seed_lane
from rollflow.nodes.stages.agent_forward import AgentForward
from rollflow.nodes.stages.agents_acting import AgentsActing
from rollflow.nodes.stages.agents_to_module import AgentsToModule
from rollflow.nodes.stages.credits import GateRelay
from rollflow.nodes.stages.env_to_module import EnvToModule
from rollflow.nodes.stages.joint_forward import joint_forward
from rollflow.nodes.stages.module_forward import ModuleForward
from rollflow.nodes.stages.module_to_agents import ModuleToAgents
from rollflow.nodes.stages.module_to_env import ModuleToEnv
from rollflow.stream.data.loss_ledger import Ledger
from rollflow.stream.episodes.multi_agent import DEFAULT_MODULE_ID
from rollflow.stream.multi_agent.agent_part import AgentPart


@dataclass(frozen=True, slots=True)
class StageOptions:
    """Options of a rollout's stages.

    forward          how forward passes are done
    num_fragments    after so many fragments a lane stops; None: it never does
    metrics          what pieces log into
    ledger           counts the fragments
    seed             of what is sampled
    """

    forward: ForwardOptions
    num_fragments: int | None
    metrics: Any
    ledger: Ledger
    seed: int


class Policy(Protocol):
    """Module and connectors that act in a rollout's environments.

    emitter         node that parts fragments from turns, where whole rollouts are elsewhere
    pipelines       of connectors
    pass_options    how forward passes are done elsewhere: what `ModuleForward` takes beside module and weights
    """

    @property
    def emitter(self) -> type[Emitter]: ...
    @property
    def pass_options(self) -> Mapping[str, Any]: ...
    @property
    def pipelines(self) -> Sequence[Any]: ...
    @property
    def pipeline_names(self) -> Sequence[str]: ...

    def stages(self, environments: Any, options: StageOptions, relay: GateRelay) -> tuple[Any, Any, Any]:
        """The stages before the forward pass, of it, and behind it, where these are here."""
        ...

    def begin_lane(self, lane: Any, seed: int) -> None:
        """Give a lane that comes what its actions are sampled with."""
        ...

    def replica(self) -> Replica:
        """Copy for a lane elsewhere that begins."""
        ...

    def publish(self, weights: Any) -> tuple[Any, Published]:
        """Have the next passes use weights: the version, or versions, that they get, and what was published."""
        ...

    def published_as(self, version: int, weights: Any) -> Published | None:
        """Weights that `publish_as` would publish; None where they are not newer. Raises ModuleError for wrong ones."""
        ...

    def publish_as(self, version: int, weights: Any) -> bool:
        """Have the next passes use weights of this version; False where they are not newer."""
        ...


class OnePolicy:
    """A `Policy` of one module, for environments with one agent each.

    acting     the copy of the module that acts, and the pipelines around it
    weights    of that copy, as they are published
    forward    how forward passes are done
    """

    emitter: type[Emitter] = Emitter
    pipeline_names: Sequence[str] = PIPELINES

    def __init__(self, acting: Acting, weights: PolicyWeights, forward: ForwardOptions) -> None:
        self._acting, self._weights = acting, weights
        self.pipelines = acting.env_to_module, acting.module_to_env
        self.pass_options = forward.of_passes(acting.copy)

    def stages(self, environments: Any, options: StageOptions, relay: GateRelay) -> tuple[Any, Any, Any]:
        acting, how = self._acting, options.forward
        context = {"module": acting.copy, "explore": how.explore, "metrics": options.metrics}
        prepare = EnvToModule(
            acting.env_to_module,
            num_lanes=environments.num_lanes,
            num_fragments=options.num_fragments,
            ledger=options.ledger,
            relay=relay,
            **context,
        )
        forward = ModuleForward(acting.copy, self._weights, **self.pass_options)
        largest = max(env.num_envs for env in environments.envs)
        joint = joint_forward(forward, largest, how.max_batch, how.max_wait, in_thread=how.in_thread)
        act = ModuleToEnv(acting.module_to_env, env_space=environments.action_space, threads=how.threads, **context)
        return prepare, joint or forward, act

    def begin_lane(self, lane: Any, seed: int) -> None:
        seed_lane(lane, seed)

    def replica(self) -> OneReplica:
        version = self._weights.load_into(self._acting.copy)
        return OneReplica(self._acting.copy, version, *self.pipelines)

    def publish(self, weights: Weights) -> tuple[int, Published]:
        version = self._weights.publish(weights)
        return version, {DEFAULT_MODULE_ID: (version, weights)}

    def published_as(self, version: int, weights: Weights) -> Published | None:
        if version <= self._weights.version:
            return None
        self._weights.check(weights)
        return {DEFAULT_MODULE_ID: (version, weights)}

    def publish_as(self, version: int, weights: Weights) -> bool:
        return self._weights.publish_as(version, weights)


class AgentsPolicy:
    """A `Policy` of several modules, for environments with several agents each.

    acting     the modules that act, and their pipelines
    forward    how forward passes are done
    """

    emitter: type[Emitter] = AgentEmitter

    def __init__(self, acting: AgentsActing, forward: ForwardOptions) -> None:
        self._acting, self._modules = acting, acting.modules
        self.pass_options = {"explore": forward.explore, **forward.of_several()}

    @property
    def pipelines(self) -> Sequence[Any]:
        return self._acting.pipelines

    @property
    def pipeline_names(self) -> Sequence[str]:
        return [name for name, _ in self._acting.named_pipelines]

    def stages(self, environments: Any, options: StageOptions, relay: GateRelay) -> tuple[Any, Any, Any]:
        acting, how = self._acting, options.forward
        prepare = AgentsToModule(
            acting.env_to_module,
            self._modules,
            joint=acting.joint,
            num_lanes=environments.num_lanes,
            num_fragments=options.num_fragments,
            metrics=options.metrics,
            ledger=options.ledger,
            relay=relay,
        )
        forward = AgentForward(self._modules)
        agents = sum(len(part.agents) for part in environments.parts)
        largest = max(envs.num_envs for envs in environments.envs) * agents
        joint = joint_forward(forward, largest, how.max_batch, how.max_wait, in_thread=how.in_thread)
        act = ModuleToAgents(acting.module_to_env, metrics=options.metrics, threads=how.threads)
        return prepare, joint or forward, act

    def begin_lane(self, lane: Any, seed: int) -> None:
        """Do nothing: a lane makes what a module samples with when it first serves an agent."""

    def replica(self) -> SeveralReplica:
        modules = self._modules.acting
        return SeveralReplica(self._acting, {each: act.weights.load_into(act.module) for each, act in modules.items()})

    def spaces_of(self, parts: Sequence[AgentPart]) -> list[PartSpaces]:
        """Spaces that observations of the agents may be in."""
        return spaces_seen(parts, self._acting.env_to_module)

    def publish(self, weights: Mapping[Any, Weights]) -> tuple[dict[Any, int], Published]:
        versions = self._modules.publish(weights)
        return versions, {module_id: (versions[module_id], weights[module_id]) for module_id in versions}

    def published_as(self, version: int, weights: Mapping[Any, Weights]) -> Published | None:
        self._modules.check_elsewhere(weights)
        if version <= self._modules.version_elsewhere:
            return None
        return {module_id: (version, each) for module_id, each in weights.items()}

    def publish_as(self, version: int, weights: Mapping[Any, Weights]) -> bool:
        return self._modules.publish_as(version, weights)
