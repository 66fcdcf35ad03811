"""What acts in a rollout, and where its stages run: forward passes and connectors here, or whole rollouts elsewhere."""

from collections.abc import Sequence
from typing import Any

from rollflow.nodes.connectors.connector_v2 import Batch
from rollflow.nodes.offloaded.offloaded import Emitter, OffloadedRollouts, ring_of_turns
from rollflow.nodes.offloaded.replica import Published
from rollflow.nodes.rollout.options import RolloutOptions
from rollflow.nodes.stages.acting import Acting
from rollflow.nodes.stages.env_to_module import EnvToModule
from rollflow.nodes.stages.joint_forward import joint_forward
from rollflow.nodes.stages.module_set import AgentsActing
from rollflow.nodes.stages.ring import ring_of
from rollflow.nodes.stages.rounds import LaneGates
from rollflow.stream.data.loss_ledger import Ledger
from rollflow.stream.graph.graph import Graph
from rollflow.stream.graph.node import Gate
from rollflow.stream.graph.report import Report


class Execution:
    """Stages of a rollout's ring: forward passes and connectors here, or whole rollouts in workers or on hosts.

    environments    node that steps them; of whole rollouts elsewhere each turn of a lane is a fragment
    acting          what acts
    options         of the rollout
    metrics         what pieces log into
    emitter         parts fragments from turns, if whole rollouts are elsewhere
    ledger          counts the fragments

    counting    stage that counts the lanes that come by

    Raises ValueError where a lane does not fit into a pass.
    """

    def __init__(
        self,
        environments: Any,
        acting: Acting | AgentsActing,
        options: RolloutOptions,
        metrics: Any,
        *,
        emitter: type[Emitter],
        ledger: Ledger,
    ) -> None:
        self._environments, self._acting, self._relay = environments, acting, LaneGates(environments)
        self._seed, how = options.seed, options.pass_options
        self._is_here = not isinstance(environments, OffloadedRollouts)
        self.counting: Any
        of_lanes = environments.num_lanes, options.num_fragments, ledger, self._relay
        if self._is_here:
            named = dict(zip(("num_lanes", "num_fragments", "ledger", "relay"), of_lanes, strict=True))
            self.counting, forward, act = acting.stages(environments, how, metrics, **named)
            largest = max(env.num_envs for env in environments.envs) * acting.most_agents
            self._stages = self.counting, joint_forward(forward, largest, options.forward), act
        else:
            environments.act_with(acting, how, metrics, self._relay)
            self.counting = emitter(*of_lanes)

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
            self._acting.begin_lane(lane, self._seed)

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
