"""What acts in a rollout, and where its stages run: forward passes and connectors here, or whole rollouts elsewhere."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rollflow.nodes.connectors.connector_v2 import Batch
from rollflow.nodes.metrics.episode_returns import AgentReturns, EpisodeReturns
from rollflow.nodes.modules.policy_weights import Weights
from rollflow.nodes.offloaded.fragment_message import PartSpaces, spaces_seen
from rollflow.nodes.offloaded.offloaded import AgentEmitter, Emitter, OffloadedRollouts, ring_of_turns
from rollflow.nodes.offloaded.replica import Published
from rollflow.nodes.rollout.options import RolloutOptions
from rollflow.nodes.stages.acting import acting_for, seed_lane
from rollflow.nodes.stages.agent_stages import agents_acting_for
from rollflow.nodes.stages.env_to_module import EnvToModule
from rollflow.nodes.stages.joint_forward import joint_forward
from rollflow.nodes.stages.ring import ring_of
from rollflow.nodes.stages.rounds import LaneGates
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
    returns         of the last episodes
    collector       makes whole episodes of fragments
    first_versions  None: modules neither come nor go
    emitter         node that parts fragments from turns, if whole rollouts are elsewhere
    pipelines       of connectors
    most_agents     in each environment

    Raises ModuleError, ConnectorError or ValueError for a module or a connector that can't be used.
    """

    emitter: type[Emitter] = Emitter
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
        acting.set_spaces(environments)
        self.module, self.weights = acting.module, acting.weights
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

    def begin_lane(self, lane: Any) -> None:
        """Give a lane that comes what its actions are sampled with."""
        seed_lane(lane, self.how.seed)

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
        acting.set_spaces(environments)
        self.versions, self.first_versions = self._modules.versions, self._modules.first_versions
        self.go_on_from = self._modules.go_on_from
        self.returns, self.collector = AgentReturns(self.module.__contains__), AgentEpisodeCollector()
        self.pipelines = acting.pipelines
        self.most_agents = sum(len(part.agents) for part in environments.parts)

    def begin_lane(self, lane: Any) -> None:
        """Do nothing: a lane makes what a module samples with when it first serves an agent."""

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


class Execution:
    """Stages of a rollout's ring: forward passes and connectors here, or whole rollouts in workers or on hosts.

    environments     node that steps them; of whole rollouts elsewhere each turn of a lane is a fragment
    policy           what acts
    num_fragments    after so many a lane stops; None: it never does
    ledger           counts the fragments

    counting    stage that counts the lanes that come by

    Raises ValueError where a lane does not fit into a pass.
    """

    def __init__(self, environments: Any, policy: ActingPolicy, num_fragments: int | None, ledger: Ledger) -> None:
        self._environments, self._policy, self._relay = environments, policy, LaneGates(environments)
        self._is_here = not isinstance(environments, OffloadedRollouts)
        self.counting: Any
        if self._is_here:
            of_lanes = {"num_lanes": environments.num_lanes, "num_fragments": num_fragments, "ledger": ledger}
            how = policy.how.pass_options, policy.metrics
            self.counting, forward, act = policy.acting.stages(environments, *how, **of_lanes, relay=self._relay)
            largest = max(env.num_envs for env in environments.envs) * policy.most_agents
            self._stages = self.counting, joint_forward(forward, largest, policy.how.forward), act
        else:
            environments.act_with(policy, self._relay)
            self.counting = policy.emitter(environments.num_lanes, num_fragments, ledger, self._relay)

    def _drawn(self, gate: Gate | None) -> Graph:
        """The ring with a gate, to which no stage reports."""
        if self._is_here:
            return ring_of(self._environments, *self._stages, gate)
        return ring_of_turns(self._environments, self.counting, gate)

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

    def begin_lane(self, lane: Any) -> None:
        """Give a lane that comes what its actions are sampled with, if that is here."""
        if self._is_here:
            self._policy.begin_lane(lane)

    def send(self, published: Published) -> None:
        """Send weights to every lane, if they act elsewhere."""
        if not self._is_here:
            self._environments.broadcast(published)

    def check_train_batch(self, batch: Batch) -> None:
        """Warn where a train batch's observations have other shapes than the module got while acting here."""
        if isinstance(self.counting, EnvToModule):
            self.counting.compare_with_train_batch(batch)

    def with_stages(self, report: Report) -> Report:
        """The report, with the stages of workers or hosts in place of the node that stands for them."""
        return report if self._is_here else report.with_parts("rollouts", self._environments.stages(report.elapsed_s))
