"""Records of one vector step of environments with several agents.

A *part* is all agents that have the same observation space and the same action space. A part with A agents in N
environments has S = N * A *agent slots*. The slot's number is environment * A + place of the agent in the part.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from rollflow.stream.data.tree import Tree
from rollflow.stream.multi_agent.agent_part import AgentPart


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


class AgentEnvs(Protocol):
    """N environments with several agents each that step together, in this process or another."""

    num_envs: int
    possible_agents: tuple[Any, ...]
    observation_spaces: Mapping[Any, gym.Space[Any]]
    action_spaces: Mapping[Any, gym.Space[Any]]
    parts: tuple[AgentPart, ...]

    def reset(
        self, seeds: Sequence[int] | None = None
    ) -> tuple[Sequence[Observed], Sequence[Mapping[Any, Mapping[str, Any]]]]:
        """Begin an episode in every environment, each with a seed of its own.

        Returns the first observations of each part, and agent -> info of each environment; () if all are empty.
        """
        ...

    def step(self, actions: Actions) -> VectorStep:
        """Step every environment, and reset those whose episode ends.

        The next call may overwrite the arrays that are returned.
        """
        ...

    def close(self) -> None:
        """Close the environments."""
        ...
