"""Environments on other hosts, as nodes: the same lanes as everywhere, whose hosts come and go."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from rollflow.nodes.env.environments import Environments, actions_of, record_taken
from rollflow.nodes.env.multi_agent.agent_environments import AgentEnvironments
from rollflow.nodes.env.observation_check import CHECKED_STEPS, LaneCheck, ObservationCheck, checks_of
from rollflow.nodes.env.remote.hosted_node import HostedNode
from rollflow.nodes.env.remote.remote_host import HostEvent, RemoteLane
from rollflow.nodes.env.workers.agent_codec import InfoCodec
from rollflow.nodes.env.workers.lane_supervisor import LanePhase, RaisedError
from rollflow.nodes.env.workers.watch import Activity, ProgressMark
from rollflow.stream.data.cached_property import cached_property
from rollflow.stream.data.tree import map_tree
from rollflow.stream.fragments.lane import Lane
from rollflow.stream.multi_agent.agent_lane import AgentLane
from rollflow.stream.multi_agent.agent_part import Observed, PartStep, VectorStep
from rollflow.stream.multi_agent.multi_agent_lane import MultiAgentLane
from rollflow.stream.wire import AgentRows, Failed, Reset, Rows, Step


class SteppedOnHosts(HostedNode):
    """A node whose lanes' hosts are asked for resets and steps.

    A lane that is late has its episodes given up, and begins anew once its host has answered after all. Where a host
    leaves, open episodes end as truncated; its lanes give the fragment that they have begun, and no more.
    """

    # What one kind of environments has differently

    def _step_request(self, lane: Any, number: int) -> Step:
        """The request, of this number, to step a lane with its actions."""
        raise NotImplementedError

    def _record_first(self, lane: Any, answer: Any) -> None:
        """Have a lane take what a reset gave."""
        raise NotImplementedError

    # For the base

    def new_lane(self, index: int, env: Any, first_slot: int) -> Any:
        lanes: Any = self.lanes
        if index == len(lanes):
            lanes.append(self._lane(index, env, first_slot))
            lanes[index].first_step = self.vector_steps
        return lanes[index]

    def progress(self, lane: int) -> ProgressMark:
        """Nothing is seen of a step or a reset until it is answered."""
        phase = self.supervisor.lanes[lane].phase
        return 0, Activity.STEP if phase is LanePhase.STEPPING else Activity.RESET

    def set_out(self, remote: RemoteLane) -> bool:
        status = remote.status
        seeds = tuple(self.seeds_of_slots(remote.first_slot, remote.num_slots, status.starts))
        status.starts += 1
        if not status.is_waited:
            self.supervisor.wait_for(status)
        number = self.gateway.next_number(status.index)
        self.request(remote, Reset(status.index, number, seeds, None), LanePhase.RESETTING)
        return False

    def ask(self, remote: RemoteLane) -> None:
        number = self.gateway.next_number(remote.status.index)
        self.request(remote, self._step_request(remote.lane, number), LanePhase.STEPPING)

    def note(self, event: HostEvent) -> None:
        """Hosts that step environments say nothing between their answers."""

    def take(self, remote: RemoteLane, answer: Any) -> Iterator[Any]:
        status = remote.status
        if status.phase is LanePhase.RESETTING:
            self._record_first(remote.lane, answer)
        else:
            self._record(remote.lane, answer)
            status.made_step(self.fragment_length)
        status.phase = LanePhase.READY
        yield self.come_back(remote)

    def failed(self, remote: RemoteLane, answer: Failed) -> None:
        """Take note of an error of a lane's environments. Raises EnvError where every lane's raise from the first."""
        where = f"on host {remote.host.name}"
        remote.status.raised = RaisedError(answer.type, answer.text, answer.notes, answer.traceback, where)
        self.supervisor.check_first_errors()

    def late(self, remote: RemoteLane, reason: str) -> None:
        self.give_up(remote, reason)

    def lose(self, remote: RemoteLane, reason: str) -> int:
        if remote.status.phase is not LanePhase.STEPPING:
            return 0
        return int(remote.lane.lose(reason, is_under_way=not remote.host.has_drained))

    def lose_idle(self, remote: RemoteLane) -> int:
        return int(remote.lane.lose(remote.status.reason, is_under_way=False))

    def is_given_up(self, remote: RemoteLane) -> bool:
        return remote.status.phase is not LanePhase.STEPPING or remote.host.lost_at is not None


class RemoteEnvironments(SteppedOnHosts, Environments):
    """`Environments` on hosts that a gateway takes in: see `HostedNode`."""

    role = "env"

    # What comes over the wire

    def _step_request(self, lane: Lane, number: int) -> Step:
        return Step(lane.index, number, actions_of(lane))

    def _record_first(self, lane: Lane, answer: Rows) -> None:
        self._check_of(lane).reset(answer.obs)
        lane.reset(answer.obs, answer.infos)

    def _record(self, lane: Lane, answer: Any) -> None:
        if lane.vector_steps in CHECKED_STEPS:
            self._check_of(lane).step(answer.obs, lane.vector_steps)
        final = None
        if answer.final_slots:
            final = map_tree(np.array, answer.final_obs), answer.final_infos
        if lane.layout.num_slots == 1:
            record_taken(lane, answer.infos)
        lane.record_step(answer.obs, answer.rewards, answer.terminateds, answer.truncateds, answer.infos, final)

    def _check_of(self, lane: Lane) -> LaneCheck:
        """A check of the lane's observations, which have come in the dtypes of their space."""
        return LaneCheck(self.observation_space, self.deviations, f"lane {lane.index}, ", is_by_items=True)


class RemoteAgentEnvironments(SteppedOnHosts, AgentEnvironments):
    """`AgentEnvironments` on hosts that a gateway takes in: see `HostedNode`.

    An agent that has acted and waits when its environment is lost has made no step: it is one of `lost_steps`.
    """

    role = "agents"

    # What comes over the wire

    def _step_request(self, lane: MultiAgentLane, number: int) -> Step:
        slots, actions = zip(*lane.actions, strict=True)
        return Step(lane.index, number, list(actions), slots)

    def _record_first(self, lane: MultiAgentLane, answer: AgentRows) -> None:
        observed = _observed(answer.agent_slots, answer.obs)
        self._check(lane, observed, "reset")
        lane.reset(observed, self._codec.infos(answer.infos))

    def _record(self, lane: MultiAgentLane, answer: Any) -> None:
        columns: Any = (answer.rewards, answer.terminateds, answer.truncateds)
        observed = _observed(answer.agent_slots, answer.obs)
        if lane.vector_steps in CHECKED_STEPS:
            self._check(lane, observed, f"vector step {lane.vector_steps}")
        parts = zip(observed, *columns, strict=True)
        step = VectorStep(
            parts=[PartStep(*part) for part in parts],
            ended=answer.ended,
            truncated=answer.ended_truncated,
            first=() if answer.first_obs is None else _observed(answer.first_agent_slots, answer.first_obs),
            infos=self._codec.infos(answer.infos),
            first_infos=self._codec.infos(answer.first_infos),
        )
        try:
            lane.record_step(step)
        except Exception as error:
            error.add_note(f"lane {lane.index}, vector step {lane.vector_steps}")
            raise

    def _check(self, lane: MultiAgentLane, observed: Sequence[Observed], when: str) -> None:
        """Check a lane's observations, which have come in the dtypes of their spaces."""
        for check, part, (slots, observations) in zip(self._checks, lane.parts, observed, strict=True):

            def whose(place: int, part: AgentLane = part, slots: Any = slots) -> str:
                env, agent = divmod(place if slots is None else int(slots[place]), len(part.part.agents))
                return f"environment {part.first_env + env}, {when}, agent {part.part.agents[agent]!r}"

            check.rows(observations, whose)

    @cached_property
    def _checks(self) -> list[ObservationCheck]:
        return checks_of(self.parts, self.deviations)

    @cached_property
    def _codec(self) -> InfoCodec:
        return InfoCodec(self.envs[0].possible_agents)


def _observed(agent_slots: Any, trees: Any) -> list[Observed]:
    return [Observed(*each) for each in zip(agent_slots, trees, strict=True)]
