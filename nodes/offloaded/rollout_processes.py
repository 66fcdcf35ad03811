"""Whole rollouts in worker processes: environments, connectors and copies of the modules in each."""

import selectors
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rollflow.nodes.env.workers.frames import FrameKind, frame
from rollflow.nodes.env.workers.lane_supervisor import LanePhase
from rollflow.nodes.env.workers.worker_node import WorkerNode
from rollflow.nodes.modules.policy_weights import Weights, pack_weights
from rollflow.nodes.offloaded.offloaded import AgentRollouts, OffloadedRollouts, OneAgentRollouts, TurnToken
from rollflow.nodes.offloaded.replica import LanePlan, Replica
from rollflow.nodes.offloaded.rollout_link import RolloutLink
from rollflow.stream.data.blocks import SharedBlock, written_block
from rollflow.stream.data.packing import pack
from rollflow.stream.graph.seeding import seed_for
from rollflow.stream.graph.wakeup import Wakeup


class WorkerRollouts(WorkerNode, OffloadedRollouts):
    """A node that has each lane's rollout done in a worker process: takes turns, gives fragments.

    What `replica` gives is pickled. A lost worker takes with it what it had made of its fragment, counted in
    `lost_steps`, and what its connectors had learnt and logged since the one before.
    """

    program, link_of = "rollflow.nodes.offloaded.rollout_worker", RolloutLink
    steps_while_draining = False
    remotes: list[RolloutLink]  # type: ignore[assignment]  # as `link_of` makes them

    def __init__(self, env: Any, **options: Any) -> None:
        self._bell = Wakeup()  # rung when there are new weights
        super().__init__(env, **options)
        self._selector.register(self._bell, selectors.EVENT_READ, WorkerRollouts._spread)

    def start(self) -> Iterator[Any]:
        """The lanes, each of which may take its first turn."""
        self._begin()
        for link, env in zip(self.remotes, self.envs, strict=True):
            link.lane = self._token(link.index, env.num_envs)
            yield link.lane

    def hand_on(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Have every worker's connectors take over states before its next turn."""
        data = pack(list(states), "the connectors' state")
        self.states = written_block(data)

    def hasten(self) -> None:
        """Have every worker give what there is of the fragment that it is making; from now on none is made again."""
        for link in self.remotes:
            if link.phase in (LanePhase.RESETTING, LanePhase.STEPPING):
                link.send(frame(FrameKind.DRAIN))
        super().hasten()

    def replica_for(self, token: TurnToken, starts: int) -> tuple[Replica, LanePlan]:
        """The replica that acts in a lane's rollout that begins with its next fragment, and its plan."""
        lane, is_listed = token.index, self.slot_seeds is not None and not starts
        environments = {
            "first_lane": lane,
            "first_slot": self.first_slots()[lane],
            "fragment_length": self.fragment_length,
            "seed": seed_for(self.seed, "restart", starts) if starts else self.seed,
            "slot_seeds": tuple(self.seeds_of_lane(lane, 0)) if is_listed else None,
        }
        return Replica.of(self.acting), LanePlan(environments, token.sequence, token.step, self.lookback, self.how)

    # Inside

    def _end(self) -> None:
        super()._end()
        self._bell.close()

    def _packed(self, module_id: Any, version: int, weights: Weights) -> SharedBlock:
        return written_block(pack_weights(version, weights, module_id))

    def _announce(self) -> None:
        self._bell.ring()

    def _spread(self) -> Iterator[Any]:
        """Offer every worker the newest weights."""
        self._bell.silence()
        for link in self.remotes:
            link.offer()
        return iter(())


class RolloutProcesses(WorkerRollouts, OneAgentRollouts):  # type: ignore[misc]  # turns go round, and no lanes
    """`WorkerRollouts` of environments with one agent each."""


class AgentRolloutProcesses(WorkerRollouts, AgentRollouts):  # type: ignore[misc]  # as above
    """`WorkerRollouts` of environments with several agents each."""
