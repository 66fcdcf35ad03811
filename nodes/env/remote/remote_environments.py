"""Environments on other hosts, as nodes: the same lanes as everywhere, whose hosts come and go."""

import copy
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rollflow.nodes.env.environments import Environments, actions_of, record_taken
from rollflow.nodes.env.multi_agent.agent_environments import AgentEnvironments
from rollflow.nodes.env.observation_check import CHECKED_STEPS, LaneCheck, ObservationCheck, checks_of
from rollflow.nodes.env.remote.host_carrier import HostCarrier
from rollflow.nodes.env.remote.remote_envs import RemoteHosts
from rollflow.nodes.env.remote.remote_host import HostEvent, RemoteHost, RemoteLane, vectors_on
from rollflow.nodes.env.workers.agent_codec import InfoCodec, RemoteAgentEnvs
from rollflow.nodes.env.workers.carrier import Carried
from rollflow.nodes.env.workers.lane_supervisor import LaneLimits, LanePhase, RaisedError
from rollflow.nodes.env.workers.watch import Activity, ProgressMark
from rollflow.stream.data.cached_property import cached_property
from rollflow.stream.data.tree import map_tree
from rollflow.stream.fragments.lane import Lane
from rollflow.stream.multi_agent.agent_lane import AgentLane
from rollflow.stream.multi_agent.agent_part import Observed, PartStep, VectorStep
from rollflow.stream.multi_agent.multi_agent_lane import MultiAgentLane
from rollflow.stream.wire import AgentRows, Failed, Reset, Rows, Step


class SteppingDialogue:
    """A `HostDialogue` of resets and steps, for the lanes of a node.

    A lane that is late has its episodes given up, and begins anew once its host has answered after all. Where a host
    leaves, open episodes end as truncated; its lanes give the fragment that they have begun, and no more.
    """

    takes_late = False

    def __init__(
        self,
        node: "RemoteEnvironments | RemoteAgentEnvironments",
        role: str,
        envs_on: Callable[[RemoteHost], list[Any]],
    ) -> None:
        self.role, self.envs_on = role, envs_on
        self._node: Any = weakref.proxy(node)  # it holds the carrier, which holds this

    def new_lane(self, index: int, env: Any, first_slot: int) -> Any:
        """A lane, as it goes round."""
        return self._node.new_lane(index, env, first_slot)

    def progress(self, lane: int) -> ProgressMark:
        """Nothing is seen of a step or a reset until it is answered."""
        phase = self._node.carrier.supervisor.lanes[lane].phase
        return 0, Activity.STEP if phase is LanePhase.STEPPING else Activity.RESET

    def set_out(self, remote: RemoteLane) -> bool:
        status, carrier = remote.status, self._node.carrier
        seeds = tuple(self._node.seeds_of_slots(remote.first_slot, remote.num_slots, status.starts))
        status.starts += 1
        if not status.is_waited:
            carrier.supervisor.wait_for(status)
        number = carrier.gateway.next_number(status.index)
        carrier.request(remote, Reset(status.index, number, seeds, None), LanePhase.RESETTING)
        return False

    def ask(self, remote: RemoteLane) -> None:
        carrier = self._node.carrier
        number = carrier.gateway.next_number(remote.status.index)
        carrier.request(remote, self._node.step_request(remote.lane, number), LanePhase.STEPPING)

    def note(self, event: HostEvent) -> None:
        """Hosts that step environments say nothing between their answers."""

    def take(self, remote: RemoteLane, answer: Any) -> Iterator[Any]:
        status = remote.status
        if status.phase is LanePhase.RESETTING:
            self._node.record_first(remote.lane, answer)
        else:
            self._node.record_step(remote.lane, answer)
            status.made_step(self._node.fragment_length)
        status.phase = LanePhase.READY
        yield self._node.carrier.come_back(remote)

    def failed(self, remote: RemoteLane, answer: Failed) -> None:
        """Take note of an error of a lane's environments. Raises EnvError where every lane's raise from the first."""
        where = f"on host {remote.host.name}"
        remote.status.raised = RaisedError(answer.type, answer.text, answer.notes, answer.traceback, where)
        self._node.carrier.supervisor.check_first_errors()

    def late(self, remote: RemoteLane, reason: str) -> None:
        self._node.carrier.lose(remote, reason)

    def lose(self, remote: RemoteLane, reason: str) -> int:
        if remote.status.phase is not LanePhase.STEPPING:
            return 0
        return int(remote.lane.lose(reason, is_under_way=not remote.host.has_drained))

    def lose_idle(self, remote: RemoteLane) -> int:
        return int(remote.lane.lose(remote.status.reason, is_under_way=False))

    def is_given_up(self, remote: RemoteLane) -> bool:
        return remote.status.phase is not LanePhase.STEPPING or remote.host.lost_at is not None


class RemoteEnvironments(Carried, Environments):
    """`Environments` on hosts that a gateway takes in: see `HostCarrier`."""

    carrier: HostCarrier
    has_fixed_lanes = False

    def __init__(self, env: RemoteHosts, **options: Any) -> None:
        limits = LaneLimits.taken_from(options)
        self.carrier = HostCarrier(self, SteppingDialogue(self, "env", vectors_on), env, limits)
        self._checks_of: dict[int, LaneCheck] = {}
        with self.carrier.closing_on_error():
            super().__init__(env, **options)  # type: ignore[arg-type]

    def __call__(self, actions: Lane) -> Lane | None:
        """Have the lane's host step its environments with the actions that it brings."""
        return self.carrier.hand_over(actions)

    # What comes over the wire

    def new_lane(self, index: int, env: Any, first_slot: int) -> Lane:
        """A lane, as it goes round."""
        if index == len(self.lanes):
            lane = self._lane(index, env)
            lane.first_step = self.vector_steps
            self.lanes.append(lane)
        return self.lanes[index]

    def step_request(self, lane: Lane, number: int) -> Step:
        """The request, of this number, to step a lane with its actions."""
        return Step(lane.index, number, actions_of(lane))

    def record_first(self, lane: Lane, answer: Rows) -> None:
        """Have a lane take what a reset gave."""
        self._check_of(lane).reset(answer.obs)
        lane.reset(answer.obs, answer.infos)

    def record_step(self, lane: Lane, answer: Rows) -> None:
        """Have a lane take what a step gave."""
        assert answer.rewards is not None
        assert answer.terminateds is not None
        assert answer.truncateds is not None
        if lane.vector_steps in CHECKED_STEPS:
            self._check_of(lane).step(answer.obs, lane.vector_steps)
        final = None
        if answer.final_slots:
            last = [map_tree(lambda leaf, i=i: leaf[i], answer.final_obs) for i in range(len(answer.final_slots))]
            final = last, answer.final_infos
        if lane.layout.num_slots == 1:
            record_taken(lane, answer.infos)
        lane.record_step(answer.obs, answer.rewards, answer.terminateds, answer.truncateds, answer.infos, final)

    # Inside

    def _made(self, env: Any, num_envs: int | None, lanes: int | None) -> Sequence[Any]:
        return self.carrier.first_envs(env.hosts, num_envs, lanes)

    def _check_of(self, lane: Lane) -> LaneCheck:
        """The check of a lane's observations, which have come in the dtypes of their space."""
        if lane.index not in self._checks_of:
            where = f"lane {lane.index}, "
            self._checks_of[lane.index] = LaneCheck(self.observation_space, self.deviations, where, is_by_items=True)
        return self._checks_of[lane.index]


class RemoteAgentEnvironments(Carried, AgentEnvironments):
    """`AgentEnvironments` on hosts that a gateway takes in: see `HostCarrier`.

    An agent that has acted and waits when its environment is lost has made no step: it is one of `lost_steps`.
    """

    carrier: HostCarrier
    has_fixed_lanes = False

    def __init__(self, env: RemoteHosts, **options: Any) -> None:
        limits = LaneLimits.taken_from(options)
        self.carrier = HostCarrier(self, SteppingDialogue(self, "agents", agents_on), env, limits)
        with self.carrier.closing_on_error():
            super().__init__(env, **options)

    def __call__(self, actions: MultiAgentLane) -> MultiAgentLane | None:
        """Have the lane's host step its environments with the actions that it brings."""
        return self.carrier.hand_over(actions)

    # What comes over the wire

    def new_lane(self, index: int, env: Any, first_slot: int) -> MultiAgentLane:
        if index == len(self.lanes):
            lane = self._lane(index, env, first_slot)
            lane.first_step = self.vector_steps
            self.lanes.append(lane)
        return self.lanes[index]

    def step_request(self, lane: MultiAgentLane, number: int) -> Step:
        slots, actions = zip(*lane.actions, strict=True)
        return Step(lane.index, number, list(actions), slots)

    def record_first(self, lane: MultiAgentLane, answer: AgentRows) -> None:
        observed = _observed(answer.agent_slots, answer.obs)
        self._check(lane, observed, "reset")
        lane.reset(observed, self._codec.infos(answer.infos))

    def record_step(self, lane: MultiAgentLane, answer: AgentRows) -> None:
        assert answer.ended is not None
        assert answer.ended_truncated is not None
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

    # Inside

    def _made(self, env: Any, num_envs: int | None, lanes: int | None) -> Sequence[Any]:
        return self.carrier.first_envs(env.hosts, num_envs, lanes)

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


def agents_on(host: RemoteHost) -> list[RemoteAgentEnvs]:
    """Stand-ins for a host's environments with several agents, lane by lane."""
    hello = host.session.hello  # which has been found to be right
    spaces = hello.observation_space["parts"], hello.action_space["parts"]
    parts = list(zip(hello.agents_by_part, *spaces, strict=True))
    first = RemoteAgentEnvs({"agents": hello.agents, "parts": parts, "num_envs": hello.num_envs})
    lanes = []
    for slots in hello.slots:
        lanes.append(copy.copy(first))
        lanes[-1].num_envs = slots
    return lanes


def _observed(agent_slots: Any, trees: Any) -> list[Observed]:
    return [Observed(*each) for each in zip(agent_slots, trees, strict=True)]
