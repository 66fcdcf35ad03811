"""AgentPart: the agents with the same spaces, which one module can serve; and records of one vector step of theirs.

A part with A agents in N environments has S = N * A *agent slots*. The slot's number is environment * A + place of the
agent in the part.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from rollflow.stream.data.errors import ColumnError, EnvError
from rollflow.stream.data.space import check_columnar
from rollflow.stream.data.tree import Tree

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


class Observed(NamedTuple):
    """Observations of K of a part's S agent slots."""

    slots: NDArray[np.int64] | None  # i64[K] ascending: agent slots with an observation; None: all
    observations: Tree  # any[K, ...] in the part's space


class PartStep(NamedTuple):
    """Results of a vector step for the agents of one part.

    An agent that ended without any observation in the episode is in neither flag: it has no episode.
    """

    observed: Observed  # after the step; for an agent that ended with it, its last one, if it got one
    rewards: NDArray[np.float32]  # f32[S]  0.0: none came
    # bool[S]  agents that ended with this step: all live agents of an environment whose episode ended
    terminateds: NDArray[np.bool_]
    truncateds: NDArray[np.bool_]


class VectorStep(NamedTuple):
    """Results of a vector step."""

    parts: Sequence[PartStep]
    ended: NDArray[np.int64]  # i64[E]  environments whose episode ended with this step; they have been reset
    truncated: NDArray[np.bool_]  # bool[E]  True: the episode was truncated; False: it was terminated
    first: Sequence[Observed]  # first observations after the resets, for each part; () where none ended
    infos: Sequence[Mapping[Any, Mapping[str, Any]]]  # agent -> info of the step, for each environment; () if all empty
    first_infos: Sequence[Mapping[Any, Mapping[str, Any]]]  # the same of the resets, for each environment in `ended`


Actions = Sequence[tuple[NDArray[np.int64] | None, Tree]]
"""For each part: agent slots that act, i64[K] ascending (None: all), and a tree of their actions `any[K, ...]`."""
