"""Strategies for where a rollout's stages run: forward passes and connectors here, or whole rollouts elsewhere.

`execution_for` chooses one, once. Everything that differs between the two places stands here.
"""

from collections.abc import Mapping
from typing import Any

from rollflow.nodes.connectors.connector_v2 import Batch
from rollflow.nodes.modules.loaded_weights import Loaded
from rollflow.nodes.offloaded.offloaded import OffloadedRollouts, ring_of_turns
from rollflow.nodes.offloaded.replica import Replica
from rollflow.nodes.rollout.policy import Policy, StageOptions
from rollflow.nodes.stages.credits import GateRelay, LaneGate
from rollflow.nodes.stages.env_to_module import EnvToModule
from rollflow.nodes.stages.ring import ring_of
from rollflow.stream.graph.graph import Graph
from rollflow.stream.graph.report import Report


class StagesHere:
    """Forward passes and connectors in this process, wherever the environments step.

    counting    stages that count the lanes that come by
    policy      what acts
    """

    loaded = None

    def __init__(self, environments: Any, policy: Policy, options: StageOptions) -> None:
        self._environments, self.policy, self._seed = environments, policy, options.seed
        self._relay = GateRelay(environments)
        self._prepare, self._forward, self._act = policy.stages(environments, options, self._relay)
        self.counting = [self._prepare]

    def ring(self, gate: LaneGate | None) -> Graph:
        """The ring of the four stages, with the output `fragments`; the gate lets a lane go on to its next step."""
        self._relay.gate = gate
        return ring_of(self._environments, self._prepare, self._forward, self._act, gate)

    def explain(self, gate: LaneGate | None) -> str:
        """A text on the ring with this gate; no stage reports to the gate."""
        return ring_of(self._environments, self._prepare, self._forward, self._act, gate).explain()

    def let_go(self) -> None:
        """Let go of the gate: the run is over."""
        self._relay.gate = None

    def begin_lane(self, lane: Any) -> None:
        """Give a lane that comes what its actions are sampled with."""
        self.policy.begin_lane(lane, self._seed)

    def publish(self, weights: Any) -> Any:
        """Have the next forward pass use these weights; their version, or versions."""
        return self.policy.publish(weights)[0]

    def publish_as(self, version: int, weights: Any) -> bool:
        """Have the next forward pass use weights of this version; False where they are not newer."""
        return self.policy.publish_as(version, weights)

    def digest_loaded(self) -> None:
        """Do nothing: weights are loaded here."""

    def check_train_batch(self, batch: Batch) -> None:
        """Warn where a train batch's observations have other shapes than the module got while acting."""
        if isinstance(self._prepare, EnvToModule):
            self._prepare.compare_with_train_batch(batch)

    def with_stages(self, report: Report) -> Report:
        """The report as it is: it has all stages."""
        return report


class StagesElsewhere:
    """Whole rollouts in worker processes or on hosts: owner of what they are done with, and of what they report.

    counting   stages that count the lanes that come by
    policy     what acts
    digests    whether weights are digested there when they have been loaded
    loaded     lane -> the weights that its worker or host has reported as loaded
    """

    def __init__(self, rollouts: OffloadedRollouts, policy: Policy, options: StageOptions) -> None:
        self.digests = False
        self.loaded: dict[int, Loaded] = {}
        self.policy, self.pass_options = policy, policy.pass_options
        self._rollouts, self._metrics = rollouts, options.metrics
        self._pipelines = policy.pipelines
        self._states: dict[int, Any] = {}  # of the connectors there, by lane
        self._relay = GateRelay(rollouts)
        self._emitter = policy.emitter(rollouts.num_lanes, options.num_fragments, options.ledger, self._relay)
        self.counting = [self._emitter]
        for pipeline in self._pipelines:
            pipeline.refuse_edits_while_run_by(self, has_states=True)
        rollouts.work_for(self)

    def ring(self, gate: LaneGate | None) -> Graph:
        """The ring in which each turn of a lane is a fragment, with the output `fragments`; the gate lets it begin."""
        self._relay.gate = gate
        return ring_of_turns(self._rollouts, self._emitter, gate)

    def explain(self, gate: LaneGate | None) -> str:
        """A text on the ring with this gate; no stage reports to the gate."""
        return ring_of_turns(self._rollouts, self._emitter, gate).explain()

    def let_go(self) -> None:
        """Let go of the gate: the run is over."""
        self._relay.gate = None

    def begin_lane(self, lane: Any) -> None:
        """Do nothing: a lane that comes is seeded where it is."""

    def publish(self, weights: Any) -> Any:
        """Send these weights to every lane; their version, or versions."""
        version, published = self.policy.publish(weights)
        self._rollouts.broadcast(published)
        return version

    def publish_as(self, version: int, weights: Any) -> bool:
        """Send weights of this version to every lane; False where they are not newer."""
        published = self.policy.published_as(version, weights)
        if published is not None:
            self._rollouts.broadcast(published)  # first: a turn may begin once the version is there
        return self.policy.publish_as(version, weights)

    def digest_loaded(self) -> None:
        """Have weights digested where they are loaded."""
        self.digests = True

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

    def replica(self) -> Replica:
        """Copy of what acts, for a lane that begins."""
        return self.policy.replica()

    def take_message(self, lane: int, message: Mapping[str, Any]) -> None:
        """Take in what a lane's connectors have learnt and logged, and the weights that it has loaded."""
        if "loaded" in message:
            self.loaded[lane] = Loaded(*message["loaded"])
        else:
            self.loaded.pop(lane, None)  # that of a worker before this one
        if "states" in message:
            self._merge_states(self._states | {lane: message["states"]})
        if "metrics" in message:
            self._metrics.merge([message["metrics"]])

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


def execution_for(environments: Any, policy: Policy, options: StageOptions) -> Execution:
    """The strategy for the place of the environments. Raises ValueError where a lane does not fit into a pass."""
    if isinstance(environments, OffloadedRollouts):
        return StagesElsewhere(environments, policy, options)
    return StagesHere(environments, policy, options)
