"""One lane of a host: environments with several agents that are stepped, in a thread, as requests come."""

from collections.abc import Iterator, Sequence
from typing import Any

from rollflow.nodes.env_source import is_whole
from rollflow.nodes.multi_agent.agent_environments import lane_makers
from rollflow.nodes.multi_agent.array_envs import ArrayEnvs
from rollflow.nodes.multi_agent.array_vector import MultiAgentVectorEnv
from rollflow.nodes.multi_agent.lane_envs import LaneEnvs, lane_envs
from rollflow.nodes.multi_agent.workers.agent_codec import InfoCodec
from rollflow.nodes.remote.lane_threads import all_made
from rollflow.nodes.remote.served_environments import ServedEnvironments
from rollflow.stream.errors import EnvError
from rollflow.stream.multi_agent.vector_step import Observed
from rollflow.stream.space_codec import describe_space
from rollflow.stream.wire import AgentRows, Reset, Step


class AgentHostLane(ServedEnvironments[AgentRows]):
    """Environments with several agents each.

    makers       as `lane_envs` takes them, or a vector environment that has been made already
    first_env    the number of the first among the host's, in errors
    """

    def __init__(self, makers: Sequence[Any] | MultiAgentVectorEnv, first_env: int) -> None:
        self._makers, self._first_env = makers, first_env
        super().__init__(can_be_remade=not isinstance(makers, MultiAgentVectorEnv))

    def describe(self) -> dict[str, Any]:
        """What a Hello says of them. Raises EnvError where their agents' ids can't be sent."""
        parts, agents = self.env.parts, [_sent(agent) for agent in self.env.possible_agents]
        part_of = {agent: place for place, part in enumerate(parts) for agent in part.agents}
        return {
            "observation_space": _tuple_of([part.observation_space for part in parts]),
            "action_space": _tuple_of([part.action_space for part in parts]),
            "autoreset": "SAME_STEP",
            "agents": tuple(agents),
            "parts": tuple(part_of[agent] for agent in self.env.possible_agents),
        }

    # Inside

    def _make(self) -> None:
        self.env: LaneEnvs
        if isinstance(self._makers, MultiAgentVectorEnv):
            self.env = ArrayEnvs(self._makers, first_env=self._first_env)
        else:
            self.env = lane_envs(self._makers, first_env=self._first_env)
        self._infos = InfoCodec(self.env.possible_agents, self._first_env)

    def _reset(self, request: Reset) -> AgentRows:
        observed, infos = self.env.reset(request.seeds)
        nothing = dict.fromkeys(
            ("rewards", "terminateds", "truncateds", "ended", "ended_truncated", "first_agent_slots", "first_obs")
        )
        slots, obs = _columns(observed)
        told = self._infos.sent(infos, range(self.env.num_envs))
        return AgentRows(request.lane, request.number, slots, obs, **nothing, infos=told, first_infos=())

    def _step(self, request: Step) -> AgentRows:
        assert request.agent_slots is not None
        step = self.env.step(list(zip(request.agent_slots, request.actions, strict=True)))
        slots, obs = _columns([part.observed for part in step.parts])
        first_slots, first_obs = _columns(step.first) if len(step.ended) else (None, None)
        return AgentRows(
            request.lane,
            request.number,
            slots,
            obs,
            tuple(part.rewards for part in step.parts),
            tuple(part.terminateds for part in step.parts),
            tuple(part.truncateds for part in step.parts),
            step.ended,
            step.truncated,
            first_slots,
            first_obs,
            self._infos.sent(step.infos, range(self.env.num_envs)),
            self._infos.sent(step.first_infos, step.ended.tolist()),
        )


def agent_lanes(env: Any, num_envs: int | None, lanes: int | None, *, are_vectors: bool) -> list[AgentHostLane]:
    """The lanes of a host. Raises EnvError where they can't be made.

    are_vectors    whether callables make vector environments, each of which is a lane by itself
    """
    given: list[Any] = [env]
    if not isinstance(env, MultiAgentVectorEnv):
        given = lane_makers(env, num_envs, lanes)
        if are_vectors and lanes is None:
            given = [[make] for make in given[0]]

    def made() -> Iterator[AgentHostLane]:
        count = 0
        for makers in given:
            yield (lane := AgentHostLane(makers, count))
            count += lane.env.num_envs
        if num_envs not in (None, count) or lanes not in (None, len(given)):
            raise EnvError(
                f"num_envs is {num_envs} and lanes is {lanes}, but the vector environments have {count} environments "
                f"in {len(given)} lanes; expected them to be left out"
            )

    return all_made(made())


def _sent(agent: Any) -> str | int:
    """An agent's id as it goes over the wire. Raises EnvError where it can't."""
    if isinstance(agent, str):
        return str(agent)
    if is_whole(agent):
        return int(agent)
    raise EnvError(f"agent {agent!r}: its id can't be sent to another host; expected a string or a whole number")


def _columns(observed: Sequence[Observed]) -> Any:
    return tuple(each.slots for each in observed), tuple(each.observations for each in observed)


def _tuple_of(spaces: Sequence[Any]) -> dict[str, Any]:
    return {"kind": "Tuple", "parts": [describe_space(space) for space in spaces]}
