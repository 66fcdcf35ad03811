"""AgentPart: the agents with the same spaces, which one module can serve."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import gymnasium as gym

from rollflow.stream.data.errors import ColumnError, EnvError
from rollflow.stream.data.space import check_columnar

Spaces = Mapping[Any, gym.Space[Any]]  # agent -> space


class AgentPart(NamedTuple):
    """All agents that have the same observation space and the same action space.

    action_space    space of the environments' actions
    chosen_space    space of the modules' actions, which are recorded; None: the same
    """

    agents: tuple[Any, ...]  # in the order of `possible_agents`
    observation_space: gym.Space[Any]
    action_space: gym.Space[Any]
    chosen_space: gym.Space[Any] | None = None

    @property
    def recorded_space(self) -> gym.Space[Any]:
        """The space of recorded actions."""
        return self.action_space if self.chosen_space is None else self.chosen_space


def parts_of(agents: Sequence[Any], observation_spaces: Spaces, action_spaces: Spaces) -> tuple[AgentPart, ...]:
    """The parts, in the order of their first agents. Raises EnvError for a space that has no columns."""
    parts: list[AgentPart] = []
    for agent in agents:
        spaces = observation_spaces[agent], action_spaces[agent]
        for kind, space in zip(("observation", "action"), spaces, strict=True):
            try:
                check_columnar(space, f"the {kind} space")
            except ColumnError as error:
                raise EnvError(f"agent {agent!r}: {error}") from None
        for index, part in enumerate(parts):
            if (part.observation_space, part.action_space) == spaces:
                parts[index] = part._replace(agents=(*part.agents, agent))
                break
        else:
            parts.append(AgentPart((agent,), *spaces))
    return tuple(parts)
