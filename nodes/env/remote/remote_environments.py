"""Environments on other hosts, as nodes: the same lanes as everywhere, whose hosts come and go."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from rollflow.nodes.env.environments import AgentEnvironments, Environments
from rollflow.nodes.env.observation_check import CHECKED_STEPS, LaneCheck, ObservationCheck, checks_of
from rollflow.nodes.env.remote.hosted_node import HostedNode
from rollflow.nodes.env.stepping import Stepped
from rollflow.nodes.env.workers.agent_codec import InfoCodec
from rollflow.stream.data.cached_property import cached_property
from rollflow.stream.data.tree import map_tree
from rollflow.stream.fragments.lane import Lane
from rollflow.stream.multi_agent.agent_lane import AgentLane
from rollflow.stream.multi_agent.agent_part import Observed, PartStep, VectorStep
from rollflow.stream.multi_agent.multi_agent_lane import MultiAgentLane
from rollflow.stream.wire import AgentRows, Rows, Step


class RemoteEnvironments(HostedNode, Environments):
    """`Environments` on hosts that a gateway takes in: see `HostedNode`."""

    role = "env"

    # What comes over the wire

    def _step_request(self, lane: Lane, number: int) -> Step:
        return Step(lane.index, number, lane.actions)

    def _record_first(self, lane: Lane, answer: Rows) -> None:
        self._check_of(lane).rows(answer.obs)
        lane.reset(answer.obs, answer.infos)

    def _record(self, lane: Lane, answer: Any) -> None:
        if lane.vector_steps in CHECKED_STEPS:
            self._check_of(lane).rows(answer.obs, lane.vector_steps)
        final = (map_tree(np.array, answer.final_obs), answer.final_infos) if answer.final_slots else None
        steps = answer.obs, answer.rewards, answer.terminateds, answer.truncateds, answer.infos
        super()._record(lane, Stepped(*steps, final))

    def _check_of(self, lane: Lane) -> LaneCheck:
        """A check of the lane's observations, which have come in the dtypes of their space."""
        return LaneCheck(self.observation_space, self.deviations, f"lane {lane.index}, ", is_by_items=True)


class RemoteAgentEnvironments(HostedNode, AgentEnvironments):
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
