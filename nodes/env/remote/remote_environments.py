"""Environments on other hosts, as a node: the same lanes as everywhere, whose hosts come and go."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from rollflow.nodes.env.observation_check import CHECKED_STEPS, ObservationCheck, checks_of
from rollflow.nodes.env.remote.hosted_node import HostedNode, RemoteLane
from rollflow.nodes.env.stepping import Stepped
from rollflow.nodes.env.workers.agent_codec import InfoCodec
from rollflow.nodes.env.workers.lane_status import LanePhase
from rollflow.stream.data.cached_property import cached_property
from rollflow.stream.data.errors import noted
from rollflow.stream.data.tree import map_tree
from rollflow.stream.multi_agent.agent_lane import AgentLane
from rollflow.stream.multi_agent.agent_part import Observed, PartStep, VectorStep
from rollflow.stream.wire import Step


class RemoteEnvironments(HostedNode):
    """A node whose lanes step on hosts that a gateway takes in: see `HostedNode`.

    An agent that has acted and waits when its environment is lost has made no step: it is one of `lost_steps`.
    """

    # What goes over the wire, for environments with one agent each or several

    def ask(self, remote: RemoteLane) -> None:
        """Have a lane's host step its environments with the actions that it brings."""
        lane, slots, actions = remote.lane, None, remote.lane.actions
        if self.kind.has_several:
            slots, actions = zip(*actions, strict=True)
            actions = list(actions)
        self.request(remote, Step(lane.index, remote.next_number, actions, slots), LanePhase.STEPPING)

    def take(self, remote: RemoteLane, answer: Any) -> Iterator[Any]:
        """Have a lane take the answer to a reset or a step."""
        lane, observed, infos = remote.lane, answer.obs, answer.infos
        if self.kind.has_several:
            observed, infos = _observed(answer.agent_slots, observed), self._codec.infos(infos)
        if remote.phase is LanePhase.RESETTING:
            self._check(lane, observed)
            lane.reset(observed, infos)
        else:
            if lane.vector_steps in CHECKED_STEPS:
                self._check(lane, observed, lane.vector_steps)
            with noted(lane.where):
                self.kind.record(lane, self._step_in(answer, observed, infos))
            remote.made_step(self.fragment_length)
        remote.phase = LanePhase.READY
        yield self.come_back(remote)

    def _step_in(self, answer: Any, observed: Any, infos: Any) -> Any:
        """The step in an answer, as a lane takes it."""
        columns = answer.rewards, answer.terminateds, answer.truncateds
        if not self.kind.has_several:
            final = (map_tree(np.array, answer.final_obs), answer.final_infos) if answer.final_slots else None
            return Stepped(observed, *columns, infos, final)
        parts = [PartStep(*part) for part in zip(observed, *columns, strict=True)]
        first = () if answer.first_obs is None else _observed(answer.first_agent_slots, answer.first_obs)
        first_infos = self._codec.infos(answer.first_infos)
        return VectorStep(parts, answer.ended, answer.ended_truncated, first, infos, first_infos)

    def _check(self, lane: Any, observed: Any, step: int | None = None) -> None:
        """Check a lane's observations, first ones or those of a step, which have come in the dtypes of their spaces."""
        if not self.kind.has_several:
            check = ObservationCheck(self.observation_space, self.deviations, f"lane {lane.index}, ")
            check.slots(observed, step, dtypes=False)
            return
        when = "reset" if step is None else f"vector step {step}"
        for part_check, part, (slots, observations) in zip(self._checks, lane.parts, observed, strict=True):

            def whose(place: int, part: AgentLane = part, slots: Any = slots) -> str:
                env, agent = divmod(place if slots is None else int(slots[place]), len(part.part.agents))
                return f"environment {part.first_env + env}, {when}, agent {part.part.agents[agent]!r}"

            part_check.rows(observations, whose)

    @cached_property
    def _checks(self) -> list[ObservationCheck]:
        return checks_of(self.parts, self.deviations)

    @cached_property
    def _codec(self) -> InfoCodec:
        return InfoCodec(self.envs[0].possible_agents)


def _observed(agent_slots: Any, trees: Any) -> Sequence[Observed]:
    return [Observed(*each) for each in zip(agent_slots, trees, strict=True)]
