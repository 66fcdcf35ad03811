"""What acts in a rollout, and where its stages run: forward passes and connectors here, or whole rollouts elsewhere.

`execution_for` chooses one, once. Everything that differs between the two places stands here.
"""

import abc
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rollflow.nodes.connectors.connector_v2 import Batch
from rollflow.nodes.metrics.episode_returns import AgentReturns, EpisodeReturns
from rollflow.nodes.modules.policy_weights import PolicyWeights, Weights
from rollflow.nodes.offloaded.agent_fragment_message import PartSpaces, spaces_seen
from rollflow.nodes.offloaded.offloaded import AgentEmitter, Emitter, OffloadedRollouts, ring_of_turns
from rollflow.nodes.offloaded.replica import (
    PIPELINES,
    OneReplica,
    Published,
    SeveralReplica,
    stages_of_one,
    stages_of_several,
)
from rollflow.nodes.rollout.options import RolloutOptions
from rollflow.nodes.stages.acting import acting_for, seed_lane
from rollflow.nodes.stages.agents_acting import agents_acting_for
from rollflow.nodes.stages.credits import LaneGates
from rollflow.nodes.stages.env_to_module import EnvToModule
from rollflow.nodes.stages.joint_forward import joint_forward
from rollflow.nodes.stages.ring import ring_of
from rollflow.stream.data.loss_ledger import Ledger
from rollflow.stream.episodes.multi_agent import DEFAULT_MODULE_ID
from rollflow.stream.fragments.episode_collector import EpisodeCollector, WholeEpisodes
from rollflow.stream.graph.graph import Graph
from rollflow.stream.graph.node import Gate
from rollflow.stream.graph.report import Report
from rollflow.stream.multi_agent.agent_part import AgentPart
from rollflow.stream.multi_agent.whole_episodes import AgentEpisodeCollector

Send = Callable[[Published], None]


class OnePolicy:
    """One module and its connectors, which act in environments with one agent each.

    environments    the node that steps them
    options         of the rollout
    metrics         what pieces log into

    how             the options
    acting          the module as it was given, the copy that acts, and the pipelines around it
    weights         of that copy, as they are published
    returns         of the last episodes
    collector       makes whole episodes of fragments
    first_versions  None: modules neither come nor go
    emitter         node that parts fragments from turns, if whole rollouts are elsewhere
    pipelines       of connectors
    most_agents     in each environment

    Raises ModuleError, ConnectorError or ValueError for a module or a connector that can't be used.
    """

    emitter: type[Emitter] = Emitter
    pipeline_names: Sequence[str] = PIPELINES
    first_versions = None
    most_agents = 1

    def __init__(self, environments: Any, options: RolloutOptions, metrics: Any) -> None:
        self.how, self.metrics = options, metrics
        self.acting = acting = acting_for(
            environments.envs[0],
            (environments.observation_space, environments.action_space),
            module=options.module,
            model_config=options.model_config,
            env_to_module_connector=options.env_to_module_connector,
            module_to_env_connector=options.module_to_env_connector,
            device=options.device,
            seed=options.seed,
        )
        environments.set_chosen_space(acting.spaces[1])
        self.module, self.weights = acting.module, PolicyWeights(acting.copy)
        self.returns, self.collector = EpisodeReturns(), EpisodeCollector[WholeEpisodes]()
        self.pipelines = acting.env_to_module, acting.module_to_env

    def versions(self) -> dict[str, int]:
        """Module -> policy version published last; "" stands for the only module."""
        return {"": self.weights.version}

    def go_on_from(self, versions: Mapping[Any, int]) -> None:
        """Begin with the policy versions of an earlier run. Raises ValueError, ModuleError or RunError."""
        if versions.keys() != {""}:
            raise ValueError(f"state has versions of {list(versions)}, expected that of one module, of a Rollout")
        self.weights.go_on_from(versions[""])

    def stages(self, environments: Any, **of_lanes: Any) -> tuple[Any, Any, Any]:
        """The stages before the forward pass, of it, and behind it, if these are here: see `stages_of_one`."""
        space, how = environments.action_space, self.how.pass_options
        return stages_of_one(self.acting.copy, self.weights, self.pipelines, space, how, self.metrics, **of_lanes)

    def begin_lane(self, lane: Any) -> None:
        """Give a lane that comes what its actions are sampled with."""
        seed_lane(lane, self.how.seed)

    def replica(self) -> OneReplica:
        """Copy for a lane elsewhere that begins."""
        version = self.weights.load_into(self.acting.copy)
        return OneReplica(self.acting.copy, version, *self.pipelines)

    def publish(self, weights: Weights, send: Send) -> int:
        """Have the next passes use weights, and send them; the version that they get."""
        version = self.weights.publish(weights)
        send({DEFAULT_MODULE_ID: (version, weights)})
        return version

    def publish_as(self, version: int, weights: Weights, send: Send) -> bool:
        """Send weights of this version, and have the next passes use them; False: they are not newer."""
        if version <= self.weights.version:
            return False
        self.weights.check(weights)
        send({DEFAULT_MODULE_ID: (version, weights)})  # first: a turn may begin once the version is there
        return self.weights.publish_as(version, weights)


class AgentsPolicy:
    """Several modules and their connectors, which act in environments with several agents each; see `OnePolicy`.

    acting     the modules that act, and their pipelines
    """

    emitter: type[Emitter] = AgentEmitter

    def __init__(self, environments: Any, options: RolloutOptions, metrics: Any) -> None:
        self.how, self.metrics = options, metrics
        self.acting = acting = agents_acting_for(
            environments.parts,
            environments.envs[0],
            module=options.module,
            mapping=options.agent_to_module_mapping_fn,
            joint_connector=options.joint_connector,
            env_to_module_connector=options.env_to_module_connector,
            module_to_env_connector=options.module_to_env_connector,
            model_config=options.model_config,
            device=options.device,
            seed=options.seed,
            explore=options.explore,
            may_be_stateful=options.lookback != 0,
            acting=options.forward.options,
        )
        self._modules, self.module = acting.modules, acting.modules.modules
        environments.set_chosen_spaces(self._modules.chosen_spaces())
        self.versions, self.first_versions = self._modules.versions, self._modules.first_versions
        self.go_on_from = self._modules.go_on_from
        self.returns, self.collector = AgentReturns(self.module.__contains__), AgentEpisodeCollector()
        self.pipelines = acting.pipelines
        self.most_agents = sum(len(part.agents) for part in environments.parts)

    @property
    def pipeline_names(self) -> Sequence[str]:
        return [name for name, _ in self.acting.named_pipelines]

    def stages(self, environments: Any, **of_lanes: Any) -> tuple[Any, Any, Any]:
        return stages_of_several(self.acting, self.how.pass_options, self.metrics, **of_lanes)

    def begin_lane(self, lane: Any) -> None:
        """Do nothing: a lane makes what a module samples with when it first serves an agent."""

    def replica(self) -> SeveralReplica:
        modules = self._modules.acting
        return SeveralReplica(self.acting, {each: act.weights.load_into(act.module) for each, act in modules.items()})

    def spaces_of(self, parts: Sequence[AgentPart]) -> list[PartSpaces]:
        """Spaces that observations of the agents may be in."""
        return spaces_seen(parts, self.acting.env_to_module)

    def publish(self, weights: Mapping[Any, Weights], send: Send) -> dict[Any, int]:
        versions = self._modules.publish(weights)
        send({module_id: (versions[module_id], weights[module_id]) for module_id in versions})
        return versions

    def publish_as(self, version: int, weights: Mapping[Any, Weights], send: Send) -> bool:
        self._modules.check_elsewhere(weights)
        if version <= self._modules.version_elsewhere:
            return False
        send({module_id: (version, each) for module_id, each in weights.items()})
        return self._modules.publish_as(version, weights)


ActingPolicy = OnePolicy | AgentsPolicy


class _Stages(abc.ABC):
    """Stages of a rollout's ring.

    counting    stage that counts the lanes that come by
    policy      what acts
    """

    counting: Any

    def __init__(self, environments: Any, policy: ActingPolicy) -> None:
        self.policy, self._relay = policy, LaneGates(environments)

    @abc.abstractmethod
    def _drawn(self, gate: Gate | None) -> Graph:
        """The ring with a gate, to which no stage reports."""

    def ring(self, gates: Sequence[Gate]) -> Graph:
        """The ring, with the output `fragments`; the gates let a lane go on: to its next step, or its next turn."""
        self._relay.take(gates)
        return self._drawn(self._relay.gate)

    def explain(self, gate: Gate) -> str:
        """A text on the ring with a gate; no stage reports to the gate."""
        return self._drawn(gate).explain()

    def let_go(self) -> None:
        """Let go of the gates: the run is over."""
        self._relay.take(())


class StagesHere(_Stages):
    """Forward passes and connectors in this process, wherever the environments step."""

    def __init__(self, environments: Any, policy: ActingPolicy, num_fragments: int | None, ledger: Ledger) -> None:
        super().__init__(environments, policy)
        self._environments = environments
        of_lanes = {"num_lanes": environments.num_lanes, "num_fragments": num_fragments, "ledger": ledger}
        self.counting, forward, act = policy.stages(environments, **of_lanes, relay=self._relay)
        largest = max(env.num_envs for env in environments.envs) * policy.most_agents
        self._stages = self.counting, joint_forward(forward, largest, policy.how.forward), act

    def _drawn(self, gate: Gate | None) -> Graph:
        return ring_of(self._environments, *self._stages, gate)

    def begin_lane(self, lane: Any) -> None:
        """Give a lane that comes what its actions are sampled with."""
        self.policy.begin_lane(lane)

    def send(self, published: Published) -> None:
        """Do nothing: what acts is here."""

    def check_train_batch(self, batch: Batch) -> None:
        """Warn where a train batch's observations have other shapes than the module got while acting."""
        if isinstance(self.counting, EnvToModule):
            self.counting.compare_with_train_batch(batch)

    def with_stages(self, report: Report) -> Report:
        """The report as it is: it has all stages."""
        return report


class StagesElsewhere(_Stages):
    """Whole rollouts in worker processes or on hosts: owner of what they are done with, and of what they report.

    Each turn of a lane is a fragment.

    send       sends weights to every lane
    """

    def __init__(
        self, rollouts: OffloadedRollouts, policy: ActingPolicy, num_fragments: int | None, ledger: Ledger
    ) -> None:
        super().__init__(rollouts, policy)
        self._rollouts, self._pipelines = rollouts, policy.pipelines
        self._states: dict[int, Any] = {}  # of the connectors there, by lane
        self.counting = policy.emitter(rollouts.num_lanes, num_fragments, ledger, self._relay)
        for pipeline in self._pipelines:
            pipeline.refuse_edits_while_run_by(self, has_states=True)
        self.send = rollouts.broadcast
        rollouts.work_for(self)

    def _drawn(self, gate: Gate | None) -> Graph:
        return ring_of_turns(self._rollouts, self.counting, gate)

    def begin_lane(self, lane: Any) -> None:
        """Do nothing: a lane that comes is seeded where it is."""

    def check_train_batch(self, batch: Batch) -> None:
        """Do nothing: what the module got while acting was seen elsewhere."""

    def with_stages(self, report: Report) -> Report:
        """The report, with the stages of the workers or hosts in place of the node that stands for them."""
        return report.with_parts("rollouts", self._rollouts.stages(report.elapsed_s))

    # As `RolloutOwner`, and as runner of the pipelines

    @property
    def is_running(self) -> bool:
        """True if connectors elsewhere have states of their own."""
        return self._rollouts.is_started and not self._rollouts.is_closed

    @property
    def wants_newest(self) -> bool:
        """True if a turn is to begin with the newest weights, however many others are on their way."""
        return self._relay.wants_newest

    def take_message(self, lane: int, message: Mapping[str, Any]) -> None:
        """Take in what a lane's connectors have learnt and logged."""
        if "states" in message:
            self._merge_states(self._states | {lane: message["states"]})
        if "metrics" in message:
            self.policy.metrics.merge([message["metrics"]])

    def _merge_states(self, states: dict[int, Any]) -> None:
        """Merge the connectors' states of all lanes, lane -> one for each pipeline, and hand them on to every lane."""
        pipelines = self._pipelines
        merged = [
            pipeline.merge_states(list(each))
            for pipeline, each in zip(pipelines, zip(*states.values(), strict=True), strict=True)
        ]
        for pipeline, state in zip(pipelines, merged, strict=True):
            pipeline.take_over_state(state)
        self._states = states  # not before: another host may have sent what can't be merged
        self._rollouts.hand_on([pipeline.get_state() for pipeline in pipelines])


Execution = StagesHere | StagesElsewhere


def execution_for(environments: Any, policy: ActingPolicy, num_fragments: int | None, ledger: Ledger) -> Execution:
    """The strategy for the place of the environments. Raises ValueError where a lane does not fit into a pass.

    num_fragments    after so many a lane stops; None: it never does
    ledger           counts the fragments
    """
    made = StagesElsewhere if isinstance(environments, OffloadedRollouts) else StagesHere
    return made(environments, policy, num_fragments, ledger)
