"""Checks of spaces, and spaces agent by agent."""

from collections.abc import Callable
from typing import Any

import gymnasium as gym
from gymnasium import spaces

from rollflow.stream.data.errors import ConnectorError, shown
from rollflow.stream.data.space import Space as Space, is_columnar


def space_of_agent(space: Any, agent_id: Any) -> Any:
    """An agent's part of a Dict space by agent ids; any other space is the same for all agents."""
    if agent_id is not None and isinstance(space, spaces.Dict) and agent_id in space.spaces:
        return space.spaces[agent_id]
    return space


def check_is_space(space: Any, origin: str) -> None:
    """Raise ConnectorError for anything but a space; `origin` begins the text."""
    if not isinstance(space, gym.Space):
        raise ConnectorError(f"{origin} {shown(space)}, {type(space).__name__}, expected a gymnasium space").see(
            "piece"
        )


def check_has_numbers(space: Any, refusal: str) -> None:
    """Raise ConnectorError, "`refusal` in ...", for a space that is not made of numbers alone."""
    if not is_columnar(space):
        raise ConnectorError(
            f"{refusal} in {space}; expected Box, Discrete, MultiDiscrete, MultiBinary, or a Dict or Tuple of those"
        )


def space_by_agents(observation_space: Space, action_space: Any, made: Callable[[Space, Any, Any], Space]) -> Space:
    """The Dict space, agent id -> `made(observation space, action space, agent id)` of each agent's part.

    Raises ConnectorError for an observation space that is no Dict.
    """
    if not isinstance(observation_space, spaces.Dict):
        raise ConnectorError(
            f"multi_agent=True and an observation space {observation_space}, expected a Dict by agent ids; in a "
            "MultiAgentRollout, whose pieces see each agent by itself, multi_agent is to be left out"
        )
    return spaces.Dict(
        {
            agent_id: made(part, space_of_agent(action_space, agent_id), agent_id)
            for agent_id, part in observation_space.spaces.items()
        }
    )
