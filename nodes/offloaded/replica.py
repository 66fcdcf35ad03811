"""Replicas: what acts in one lane where its whole rollout runs, in environments of one agent or of several."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollflow.nodes.connectors.pipelines.default_pipelines import EnvToModulePipeline, ModuleToEnvPipeline
from rollflow.nodes.env.environments import Environments
from rollflow.nodes.env.multi_agent.agent_environments import AgentEnvironments
from rollflow.nodes.env.observation_check import Deviations
from rollflow.nodes.env.stepping import LaneVectorEnv, Turn, nothing
from rollflow.nodes.metrics.metrics_logger import MetricsLogger
from rollflow.nodes.modules.policy_weights import PolicyWeights, Weights
from rollflow.nodes.stages.acting import chosen_space, sampling_data, seed_lane
from rollflow.nodes.stages.agent_stages import AgentForward, AgentsToModule, ModuleToAgents
from rollflow.nodes.stages.agents_acting import AgentsActing
from rollflow.nodes.stages.env_to_module import EnvToModule
from rollflow.nodes.stages.module_forward import ModuleForward
from rollflow.nodes.stages.module_to_env import ModuleToEnv
from rollflow.stream.episodes.multi_agent import DEFAULT_MODULE_ID
from rollflow.stream.fragments.lane import Lane

PIPELINES = ("env_to_module", "module_to_env")  # of one agent's rollout
Published = Mapping[Any, tuple[int, Weights]]  # module id -> version and weights; of one module, DEFAULT_MODULE_ID


@dataclass(frozen=True, slots=True)
class LanePlan:
    """Plan of one lane's rollout.

    lane, first_slot    its number, and that of its first slot, among all of the rollout's
    sequence            number of its first fragment
    first_step          the run's vector step at which it begins
    fragment_length     vector steps in a fragment (T)
    lookback            steps of the fragment before in each (H)
    seed                of environments and sampling
    acting              how forward passes are done: what `ModuleForward` takes beside module and weights
    slot_seeds          one seed for each slot of the lane; None: they follow from `seed`
    """

    lane: int
    first_slot: int
    sequence: int
    first_step: int
    fragment_length: int
    lookback: int
    seed: int
    acting: Mapping[str, Any]
    slot_seeds: Sequence[int] | None = None

    @property
    def env_options(self) -> dict[str, Any]:
        """Keywords of the node that steps the lane's environments."""
        return {
            "fragment_length": self.fragment_length,
            "seed": self.seed,
            "slot_seeds": self.slot_seeds,
            "first_lane": self.lane,
            "first_slot": self.first_slot,
        }


@dataclass(frozen=True, slots=True)
class LaneSite:
    """The place of a lane's rollout.

    env           its environments, which whoever made them closes
    is_shared     whether other processes may look at the lane's columns
    turn          called when a reset within a step begins, and when it has ended: see `LaneVectorEnv`
    deviations    of observations from their space
    """

    env: Any
    is_shared: bool = False
    turn: Turn = nothing
    deviations: Deviations = field(default_factory=lambda: Deviations(is_logged=False))


# The stages of one lane's ring: the lane, its environments, what prepares batches, does forward passes, and acts.
LaneStages = tuple[Any, Any, Any, Any, Any]


def stages_of_one(
    module: Any,
    weights: PolicyWeights,
    pipelines: tuple[EnvToModulePipeline, ModuleToEnvPipeline],
    env_space: Any,
    how: Mapping[str, Any],
    metrics: Any,
    **of_lanes: Any,
) -> tuple[Any, Any, Any]:
    """The stages before the forward pass, of it, and behind it, in environments of one agent each.

    module, weights    that acts, and what is published for it
    pipelines          before it and behind it
    env_space          of the environments' actions
    how                passes are done: what `ModuleForward` takes beside module and weights
    metrics            what pieces log into
    of_lanes           keywords of the first stage: which lanes come by, and who is told of them
    """
    context = {"module": module, "explore": how["explore"], "metrics": metrics}
    return (
        EnvToModule(pipelines[0], **context, **of_lanes),
        ModuleForward(module, weights, **how),
        ModuleToEnv(pipelines[1], env_space=env_space, threads=how["threads"], **context),
    )


def stages_of_several(
    acting: AgentsActing, how: Mapping[str, Any], metrics: Any, **of_lanes: Any
) -> tuple[Any, Any, Any]:
    """The stages in environments of several agents each: see `stages_of_one`."""
    return (
        AgentsToModule(acting.env_to_module, acting.modules, joint=acting.joint, metrics=metrics, **of_lanes),
        AgentForward(acting.modules),
        ModuleToAgents(acting.module_to_env, metrics=metrics, threads=how["threads"]),
    )


class OneReplica:
    """Connectors and a module that act in one lane, for that lane alone, in environments of one agent each.

    It can be pickled until its stages are made.

    module                          a copy of the module for this lane alone
    version                         of its weights; -1: they are yet to come
    env_to_module, module_to_env    connector pipelines for this lane alone

    versions    module id -> policy version of the weights that the module has
    """

    def __init__(
        self, module: Any, version: int, env_to_module: EnvToModulePipeline, module_to_env: ModuleToEnvPipeline
    ) -> None:
        self.versions = {DEFAULT_MODULE_ID: version}
        self._pipelines = env_to_module, module_to_env
        self._module = module
        self._weights: PolicyWeights | None = None

    @property
    def modules(self) -> Mapping[Any, Any]:
        """Module id -> the copy that acts."""
        return {DEFAULT_MODULE_ID: self._module}

    @property
    def named_pipelines(self) -> Sequence[tuple[str, Any]]:
        """Pipelines of connectors, whose states are kept in step with other lanes', and their names."""
        return list(zip(PIPELINES, self._pipelines, strict=True))

    def begin(self) -> None:
        """Make ready to act, and to `put` weights."""
        self._weights = PolicyWeights(self._module, self.versions[DEFAULT_MODULE_ID])

    def put(self, published: Published) -> None:
        """Have the next pass use weights, unless newer ones are here. Raises ModuleError for those of others."""
        assert self._weights is not None
        for version, weights in published.values():
            self._weights.publish_as(version, weights, copies=False)

    def under_way(self, lane: Any) -> int:
        """Transitions that the lane's next vector step may end."""
        return int(lane.layout.num_slots)

    def stages(self, site: LaneSite, plan: LanePlan, metrics: MetricsLogger) -> LaneStages:
        """Stages of the lane's ring; they act from the plan's first fragment on."""
        assert self._weights is not None
        environments = _OneLane(site, **plan.env_options)
        environments.begin_at(plan.first_step)
        environments.set_chosen_space(chosen_space(self._module, environments.action_space))
        environments.make_lanes(plan.lookback)
        [lane] = environments.lanes
        seed_lane(lane, plan.seed)
        lane.fragment.sequence = plan.sequence
        pipelines, env_space = self._pipelines, environments.action_space
        stages = stages_of_one(self._module, self._weights, pipelines, env_space, plan.acting, metrics)
        return lane, environments, *stages


class SeveralReplica:
    """Connectors and modules that act in environments of several agents each; otherwise as `OneReplica`.

    acting    modules, their connector pipelines, and which agents they serve
    """

    def __init__(self, acting: AgentsActing, versions: Mapping[Any, int]) -> None:
        self._acting, self.versions = acting, dict(versions)

    @property
    def modules(self) -> Mapping[Any, Any]:
        return {module_id: acting.module for module_id, acting in self._acting.modules.acting.items()}

    @property
    def named_pipelines(self) -> Sequence[tuple[str, Any]]:
        return self._acting.named_pipelines

    def begin(self) -> None:
        for module_id, acting in self._acting.modules.acting.items():
            if self.versions[module_id] > 0:
                acting.weights.publish_as(self.versions[module_id], acting.module.state_dict())

    def put(self, published: Published) -> None:
        for module_id, (version, weights) in published.items():
            acting = self._acting.modules.acting[module_id]
            if self.versions[module_id] < 0:  # the first ones may have the version that it has without them
                acting.weights.check(weights)
                acting.module.load_state_dict(weights)
                self.versions[module_id] = version
            acting.weights.publish_as(version, weights, copies=False)

    def under_way(self, lane: Any) -> int:
        return int(lane.steps_under_way + sum(len(part.acting) for part in lane.parts))

    def stages(self, site: LaneSite, plan: LanePlan, metrics: MetricsLogger) -> LaneStages:
        acting = self._acting
        environments = _SeveralLane(site, **plan.env_options)
        environments.begin_at(plan.first_step)
        environments.set_chosen_spaces(acting.modules.chosen_spaces())
        environments.make_lanes(
            plan.lookback, acting.modules, lambda lane, each: sampling_data(lane, plan.seed, each.seed_name)
        )
        [lane] = environments.lanes
        lane.sequence = plan.sequence
        for part in lane.parts:
            part.fragment.sequence = plan.sequence
        return lane, environments, *stages_of_several(acting, plan.acting, metrics)


Replica = OneReplica | SeveralReplica


class _OneLane(Environments):
    """The environments of one lane, made already."""

    def __init__(self, site: LaneSite, **options: Any) -> None:
        self._site = site
        super().__init__(site.env, **options)

    def _lane(self, index: int, vector: Any, first_slot: int) -> Lane:
        layout = self._layout(index, vector, self.seed)
        return Lane(index, layout, self.observation_space, is_shared=self._site.is_shared)

    def _made(self, env: Any, num_envs: int | None, lanes: int | None) -> Sequence[Any]:
        self.deviations = self._site.deviations  # logged by whoever gets the fragments
        where = f"lane {self._first_lane}, "
        here = LaneVectorEnv(env, deviations=self.deviations, where=where)
        here.tell_resets(self._site.turn)
        self._here = [here]
        return [env]


class _SeveralLane(AgentEnvironments):
    """The environments of one lane, with several agents each, made already."""

    def __init__(self, site: LaneSite, **options: Any) -> None:
        super().__init__(site.env, **options)

    def _made(self, env: Any, num_envs: int | None, lanes: int | None) -> Sequence[Any]:
        self._here = [env]
        return self._here
