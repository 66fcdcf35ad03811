"""What workers and hosts say of environments with several agents, in words: their agents, their infos."""

from collections.abc import Mapping, Sequence
from typing import Any

from rollflow.nodes.multi_agent.dict_vector import Infos
from rollflow.nodes.multi_agent.lane_envs import LaneEnvs
from rollflow.stream.errors import ColumnError, EnvError
from rollflow.stream.multi_agent.agent_part import AgentPart
from rollflow.stream.packing import pack
from rollflow.stream.space_codec import describe_space, space_of


class AgentsElsewhere:
    """What is known here of environments that are elsewhere; it has the names that it has there."""

    def __init__(self, told: Mapping[str, Any]) -> None:
        self.num_envs: int = told["num_envs"]
        self.possible_agents: tuple[Any, ...] = tuple(told["agents"])
        self.parts = tuple(
            AgentPart(tuple(self.possible_agents[place] for place in places), space_of(observations), space_of(actions))
            for places, observations, actions in told["parts"]
        )
        self.observation_spaces = {agent: part.observation_space for part in self.parts for agent in part.agents}
        self.action_spaces = {agent: part.action_space for part in self.parts for agent in part.agents}

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"these environments are elsewhere, where '{name}' can't be asked for; known here: num_envs, "
            "possible_agents, observation_spaces, action_spaces, parts"
        )


def describe(envs: LaneEnvs) -> bytes:
    """What `AgentsElsewhere` is made of. Raises EnvError for agents that have no packed form."""
    place = {agent: place for place, agent in enumerate(envs.possible_agents)}
    told = {
        "num_envs": envs.num_envs,
        "parts": [
            [
                [place[agent] for agent in part.agents],
                describe_space(part.observation_space),
                describe_space(part.action_space),
            ]
            for part in envs.parts
        ],
    }
    try:
        return pack(told | {"agents": list(envs.possible_agents)}, "the environments")
    except ColumnError as error:
        raise EnvError(str(error)) from error


class InfoCodec:
    """Infos of a lane's environments as plain lists, with numbers in place of agents.

    first_env    the number of the lane's first environment, in errors
    """

    def __init__(self, agents: Sequence[Any], first_env: int = 0) -> None:
        self._agents = list(agents)
        self._place = {agent: place for place, agent in enumerate(agents)}
        self._first_env = first_env

    def plain(self, infos: Infos) -> list[list[Any]]:
        """Per environment: [place of the agent, its info]."""
        return [[[self._place[agent], dict(info)] for agent, info in each.items() if info] for each in infos]

    def infos(self, plain: Sequence[Sequence[Any]]) -> list[dict[Any, Mapping[str, Any]]]:
        """Per environment: agent -> info."""
        return [{self._agents[place]: info for place, info in each} for each in plain]

    def sent(self, infos: Infos, envs: Sequence[int]) -> list[list[Any]]:
        """The same of environments with these numbers. Raises EnvError for what has no packed form."""
        self.packed({"infos": (infos, envs)})
        return self.plain(infos)

    def packed(self, told: Mapping[str, tuple[Infos, Sequence[int]]]) -> bytes:
        """Infos by kinds, each with the environments that they are of, as bytes; b"" where there are none.

        Raises EnvError for what has no packed form.
        """
        plain = {kind: self.plain(infos) for kind, (infos, _) in told.items() if len(infos)}
        if not plain:
            return b""
        try:
            return pack(plain)
        except ColumnError:
            for infos, envs in told.values():
                self._check(infos, envs)
            raise

    def _check(self, infos: Infos, envs: Sequence[int]) -> None:
        for env, each in zip(envs, infos, strict=False):
            for agent, info in each.items():
                try:
                    pack(info, "its info")
                except ColumnError as error:
                    raise EnvError(f"environment {self._first_env + env}, agent {agent!r}: {error}") from error
