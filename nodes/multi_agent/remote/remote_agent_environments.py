"""Environments with several agents on other hosts, as a node: the same lanes as everywhere, whose hosts come and go."""

import copy
from functools import cached_property
from typing import Any

from rollflow.nodes.multi_agent.agent_environments import AgentEnvironments
from rollflow.nodes.multi_agent.workers.agent_codec import AgentsElsewhere, InfoCodec
from rollflow.nodes.remote.remote_host import RemoteHost
from rollflow.nodes.remote.stepped_lanes import SteppedLanes
from rollflow.stream.multi_agent.multi_agent_lane import MultiAgentLane
from rollflow.stream.multi_agent.vector_step import Observed, PartStep, VectorStep
from rollflow.stream.wire import AgentRows, Hello, Step


def agents_on(host: RemoteHost) -> list[AgentsElsewhere]:
    """What is known here of a host's environments, lane by lane."""
    hello = host.session.hello
    known = AgentsElsewhere(_told(hello) | {"num_envs": hello.num_envs})
    lanes = []
    for slots in hello.slots:
        lanes.append(copy.copy(known))
        lanes[-1].num_envs = slots
    return lanes


class RemoteAgentEnvironments(SteppedLanes, AgentEnvironments):
    """`AgentEnvironments` on hosts that a gateway takes in: see `SteppedLanes`.

    An agent that has acted and waits when its environment is lost has made no step: it is one of `lost_steps`.
    """

    role = "agents"
    envs_on = staticmethod(agents_on)

    # What SteppedLanes leaves open

    def _lane_for(self, index: int, env: Any, first_slot: int) -> MultiAgentLane:
        if index == len(self.lanes):
            self.lanes.append(self._lane(index, env, first_slot))
        return self.lanes[index]

    def _step_of(self, lane: MultiAgentLane, number: int) -> Step:
        slots, actions = zip(*lane.actions, strict=True)
        return Step(lane.index, number, list(actions), slots)

    def _record_reset(self, lane: MultiAgentLane, answer: AgentRows) -> None:
        lane.reset(_observed(answer.agent_slots, answer.obs), self._codec.infos(answer.infos))

    def _record_step(self, lane: MultiAgentLane, answer: AgentRows) -> None:
        assert answer.ended is not None
        assert answer.ended_truncated is not None
        columns: Any = (answer.rewards, answer.terminateds, answer.truncateds)
        parts = zip(_observed(answer.agent_slots, answer.obs), *columns, strict=True)
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

    @cached_property
    def _codec(self) -> InfoCodec:
        return InfoCodec(self.envs[0].possible_agents)

    def _lose_lane(self, lane: MultiAgentLane, reason: str, *, is_under_way: bool) -> int:
        return lane.lose(reason, is_under_way=is_under_way)


def _observed(agent_slots: Any, trees: Any) -> list[Observed]:
    return [Observed(*each) for each in zip(agent_slots, trees, strict=True)]


def _told(hello: Hello) -> dict[str, Any]:
    """A host's agents as `AgentsElsewhere` is made of them; its Hello has been found to be right."""
    spaces = (hello.observation_space["parts"], hello.action_space["parts"])
    return {"agents": hello.agents, "parts": list(zip(hello.agents_by_part, *spaces, strict=True))}
