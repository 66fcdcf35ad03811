"""Agents that one module can serve: those with the same spaces."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import gymnasium as gym

from rollflow.stream.errors import EnvError
from rollflow.stream.space import is_columnar

Spaces = Mapping[Any, gym.Space[Any]]  # agent -> space


class AgentPart(NamedTuple):
    """All agents that have the same observation space and the same action space."""

    agents: tuple[Any, ...]  # in the order of `possible_agents`
    observation_space: gym.Space[Any]
    action_space: gym.Space[Any]


def parts_of(agents: Sequence[Any], observation_spaces: Spaces, action_spaces: Spaces) -> tuple[AgentPart, ...]:
    """The parts, in the order of their first agents. Raises EnvError for a space that has no columns."""
    parts: list[AgentPart] = []
    for agent in agents:
        spaces = observation_spaces[agent], action_spaces[agent]
        for kind, space in zip(("observation", "action"), spaces, strict=True):
            if not is_columnar(space):
                raise EnvError(
                    f"agent {agent!r}: the {kind} space {space} has no columns; expected Box, Discrete, MultiDiscrete, "
                    "MultiBinary, or a Dict or Tuple of those"
                )
        for index, part in enumerate(parts):
            if part[1:] == spaces:
                parts[index] = part._replace(agents=(*part.agents, agent))
                break
        else:
            parts.append(AgentPart((agent,), *spaces))
    return tuple(parts)
