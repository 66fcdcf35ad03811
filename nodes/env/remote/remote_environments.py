"""Environments on other hosts, as a node: the same lanes as everywhere, whose hosts come and go."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from rollflow.nodes.env.observation_check import CHECKED_STEPS, LaneCheck, ObservationCheck, checks_of
from rollflow.nodes.env.remote.hosted_node import HostedNode
from rollflow.nodes.env.stepping import Stepped
from rollflow.nodes.env.workers.agent_codec import InfoCodec
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

    # What comes over the wire, from environments with one agent each or several

    def _step_request(self, lane: Any, number: int) -> Step:
        if not self.kind.has_several:
            return Step(lane.index, number, lane.actions)
        slots, actions = zip(*lane.actions, strict=True)
        return Step(lane.index, number, list(actions), slots)

    def _record_first(self, lane: Any, answer: Any) -> None:
        observed, infos = self._observations_in(answer)
        self._check(lane, observed)
        lane.reset(observed, infos)

    def _record(self, lane: Any, answer: Any) -> None:
        observed, infos = self._observations_in(answer)
        if lane.vector_steps in CHECKED_STEPS:
            self._check(lane, observed, lane.vector_steps)
        columns = answer.rewards, answer.terminateds, answer.truncateds
        step: Any
        if self.kind.has_several:
            step = VectorStep(
                parts=[PartStep(*part) for part in zip(observed, *columns, strict=True)],
                ended=answer.ended,
                truncated=answer.ended_truncated,
                first=() if answer.first_obs is None else _observed(answer.first_agent_slots, answer.first_obs),
                infos=infos,
                first_infos=self._codec.infos(answer.first_infos),
            )
        else:
            final = (map_tree(np.array, answer.final_obs), answer.final_infos) if answer.final_slots else None
            step = Stepped(observed, *columns, infos, final)
        with noted(f"lane {lane.index}, vector step {lane.vector_steps}"):
            self.kind.record(lane, step)

    def _observations_in(self, answer: Any) -> tuple[Any, Any]:
        """Observations and infos as a lane takes them."""
        if not self.kind.has_several:
            return answer.obs, answer.infos
        return _observed(answer.agent_slots, answer.obs), self._codec.infos(answer.infos)

    def _check(self, lane: Any, observed: Any, step: int | None = None) -> None:
        """Check a lane's observations, first ones or those of a step, which have come in the dtypes of their spaces."""
        if not self.kind.has_several:
            check = LaneCheck(self.observation_space, self.deviations, f"lane {lane.index}, ", is_by_items=True)
            check.rows(observed, step)
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
