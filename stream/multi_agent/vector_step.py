"""One vector step of environments with several agents: what a lane records of it.

A *part* is all agents that have the same observation space and the same action space. In N environments a part with A
agents has S = N * A *agent slots*: slot = environment * A + place of the agent in the part.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from rollflow.stream.multi_agent.agent_part import AgentPart
from rollflow.stream.tree import Tree


class Observed(NamedTuple):
    """Observations of one part: K of its S agent slots have one."""

    slots: NDArray[np.int64] | None  # i64[K], ascending: agent slots that got an observation; None: all
    observations: Tree  # any[K, ...] in the part's space


class PartStep(NamedTuple):
    """What a vector step gave to the agents of one part.

    An agent that ended without ever having had an observation in the episode is in neither flag: it has no episode.
    """

    observed: Observed  # after the step; of agents that ended with it: their last one, where they got one
    rewards: NDArray[np.float32]  # f32[S], 0.0 where none came
    # bool[S]: agents that ended with this step (of an env whose episode ended: all its live agents)
    terminateds: NDArray[np.bool_]
    truncateds: NDArray[np.bool_]


class VectorStep(NamedTuple):
    """What a vector step gave."""

    parts: Sequence[PartStep]
    ended: NDArray[np.int64]  # i64[E] envs whose episode ended with this step; they have been reset
    truncated: NDArray[np.bool_]  # bool[E]: whether that was by truncation; False where the episode was terminated
    first: Sequence[Observed]  # per part, the first observations after that; () where none ended
    infos: Sequence[Mapping[Any, Mapping[str, Any]]]  # per env: agent -> info, of the step; () where all are empty
    first_infos: Sequence[Mapping[Any, Mapping[str, Any]]]  # per env in `ended`; () likewise


Actions = Sequence[tuple[NDArray[np.int64] | None, Tree]]
"""Per part: i64[K], ascending, the agent slots that act (None: all), and their actions, any[K, ...]."""


class AgentEnvs(Protocol):
    """N environments with several agents that step together, here or elsewhere."""

    num_envs: int
    possible_agents: tuple[Any, ...]
    observation_spaces: Mapping[Any, gym.Space[Any]]
    action_spaces: Mapping[Any, gym.Space[Any]]
    parts: tuple[AgentPart, ...]

    def reset(
        self, seeds: Sequence[int] | None = None
    ) -> tuple[Sequence[Observed], Sequence[Mapping[Any, Mapping[str, Any]]]]:
        """Begin an episode in every environment, each with a seed of its own.

        Returns the first observations per part, and per environment agent -> info; () where all are empty.
        """
        ...

    def step(self, actions: Actions) -> VectorStep:
        """Step every environment; those whose episode ends are reset.

        Arrays that are returned may be written over by the next call.
        """
        ...

    def close(self) -> None:
        """Close the environments."""
        ...
