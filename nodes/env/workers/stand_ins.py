"""Stand-ins for environments that are elsewhere, and the descriptions that they are made of: fields of a Hello."""

from collections.abc import Mapping
from typing import Any

import gymnasium as gym
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space

from rollflow.nodes.env.lane_envs import LaneEnvs
from rollflow.nodes.env.stepping import LaneVectorEnv, autoreset_mode
from rollflow.stream.data.space import describe_space, space_of
from rollflow.stream.multi_agent.agent_part import AgentPart


class RemoteVectorEnv:
    """Stand-in for a vector environment that is elsewhere, with the names that it has there."""

    _known = (
        "num_envs, metadata['autoreset_mode'], single_observation_space, single_action_space, observation_space, "
        "action_space"
    )

    def __init__(self, description: Mapping[str, Any]) -> None:
        self.num_envs: int = description["num_envs"]
        self.takes_one_seed = bool(description.get("takes_one_seed", True))
        self.metadata = {"autoreset_mode": AutoresetMode[description["autoreset"]]}
        self.single_observation_space: gym.Space[Any] = space_of(description["observation_space"])
        self.single_action_space: gym.Space[Any] = space_of(description["action_space"])
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)

    @property
    def unwrapped(self) -> "RemoteVectorEnv":
        """This object: wrappers are where the environments are."""
        return self

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"these environments are elsewhere, where '{name}' can't be asked for; known here: {self._known}"
        )


class RemoteAgentEnvs:
    """Stand-in for environments with several agents that are elsewhere, with the names that they have there."""

    _known = "num_envs, possible_agents, observation_spaces, action_spaces, parts"
    __getattr__ = RemoteVectorEnv.__getattr__

    def __init__(self, description: Mapping[str, Any]) -> None:
        self.num_envs: int = description["num_envs"]
        self.possible_agents: tuple[Any, ...] = tuple(description["agents"])
        part_of = list(zip(self.possible_agents, description["parts"], strict=True))
        spaces = zip(description["observation_space"]["parts"], description["action_space"]["parts"], strict=True)
        self.parts = tuple(
            AgentPart(tuple(agent for agent, part in part_of if part == number), space_of(observed), space_of(done))
            for number, (observed, done) in enumerate(spaces)
        )
        self.observation_spaces = {agent: part.observation_space for part in self.parts for agent in part.agents}
        self.action_spaces = {agent: part.action_space for part in self.parts for agent in part.agents}


def stand_in_for(description: Mapping[str, Any]) -> Any:
    """Stand-in for the environments of a description, which have one agent each, or several."""
    return RemoteVectorEnv(description) if description.get("agents") is None else RemoteAgentEnvs(description)


def description_of(env: LaneVectorEnv | LaneEnvs) -> dict[str, Any]:
    """Fields of a Hello about the environments of a lane."""
    if isinstance(env, LaneVectorEnv):
        spaces = describe_space(env.env.single_observation_space), describe_space(env.env.single_action_space)
        return {"observation_space": spaces[0], "action_space": spaces[1], "autoreset": autoreset_mode(env.env).name}
    part_of = {agent: place for place, part in enumerate(env.parts) for agent in part.agents}
    return {
        "observation_space": _tuple_of([part.observation_space for part in env.parts]),
        "action_space": _tuple_of([part.action_space for part in env.parts]),
        "autoreset": "SAME_STEP",
        "agents": tuple(env.possible_agents),
        "parts": tuple(part_of[agent] for agent in env.possible_agents),
    }


def _tuple_of(spaces: list[gym.Space[Any]]) -> dict[str, Any]:
    return {"kind": "Tuple", "parts": [describe_space(space) for space in spaces]}
