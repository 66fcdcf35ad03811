"""Replicas: what acts in one lane where its whole rollout runs, in environments of one agent or of several."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollflow.nodes.env.environments import AgentEnvironments, Environments
from rollflow.nodes.env.observation_check import Deviations
from rollflow.nodes.env.stepping import LaneVectorEnv, Turn, nothing
from rollflow.nodes.metrics.metrics_logger import MetricsLogger
from rollflow.nodes.modules.policy_weights import Weights
from rollflow.nodes.stages.acting import Acting
from rollflow.nodes.stages.module_set import AgentsActing

Published = Mapping[Any, tuple[int, Weights]]  # module id -> version and weights; of one module, DEFAULT_MODULE_ID


@dataclass(frozen=True, slots=True)
class LanePlan:
    """Plan of one lane's rollout.

    environments    keywords of the node that steps its environments: see `LaneSource`
    sequence        number of its first fragment
    first_step      the run's vector step at which it begins
    lookback        steps of the fragment before in each (H)
    acting          how forward passes are done: what `ModuleForward` takes beside module and weights
    """

    environments: Mapping[str, Any]
    sequence: int
    first_step: int
    lookback: int
    acting: Mapping[str, Any]

    @property
    def seed(self) -> int:
        """The seed of environments and sampling."""
        return int(self.environments["seed"])


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


class Replica:
    """Connectors and modules that act in one lane, for that lane alone. It can be pickled until its stages are made.

    acting      copies of modules and pipelines for this lane alone
    versions    module id -> policy version of the weights that the module has; -1: they are yet to come
    """

    def __init__(self, acting: Acting | AgentsActing, versions: Mapping[Any, int]) -> None:
        self._acting, self.versions = acting, versions

    @classmethod
    def of(cls, acting: Acting | AgentsActing) -> "Replica":
        """What acts now, with the newest weights; a copy once it is pickled."""
        return cls(acting, {each: weights.load_into(module) for each, (module, weights) in acting.by_id.items()})

    @property
    def modules(self) -> Mapping[Any, Any]:
        """Module id -> the copy that acts."""
        return {module_id: module for module_id, (module, _) in self._acting.by_id.items()}

    @property
    def named_pipelines(self) -> Sequence[tuple[str, Any]]:
        """Pipelines of connectors, whose states are kept in step with other lanes', and their names."""
        return self._acting.named_pipelines

    def begin(self) -> None:
        """Make ready to act, and to `put` weights."""
        for module_id, (_, weights) in self._acting.by_id.items():
            weights.go_on_from(self.versions[module_id])

    def put(self, published: Published) -> None:
        """Have the next pass use weights, unless newer ones are here. Raises ModuleError for those of others."""
        acting = self._acting.by_id
        for module_id, (version, weights) in published.items():
            acting[module_id][1].publish_as(version, weights, copies=False)

    def under_way(self, lane: Any) -> int:
        """Transitions that the lane's next vector step may end."""
        return self._acting.under_way(lane)

    def stages(self, site: LaneSite, plan: LanePlan, metrics: MetricsLogger) -> tuple[Any, Any, Any, Any, Any]:
        """The lane, its environments, and the stages before the forward pass, of it, and behind it.

        They act from the plan's first fragment on.
        """
        acting = self._acting
        environments = (_OneLane if isinstance(acting, Acting) else _SeveralLane)(site, **plan.environments)
        environments.begin_at(plan.first_step)
        acting.set_spaces(environments)
        acting.make_lanes(environments, plan.lookback, plan.seed, plan.sequence)
        [lane] = environments.lanes
        return lane, environments, *acting.stages(environments, plan.acting, metrics)


class _OneLane(Environments):
    """The environments of one lane, made already."""

    def __init__(self, site: LaneSite, **options: Any) -> None:
        self._site = site
        super().__init__(site.env, **options)
        self.is_shared = site.is_shared

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
