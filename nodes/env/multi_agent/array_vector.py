"""Environments with several agents that are vectorized already: arrays in, arrays out, no agent by itself."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rollflow.stream.data.cached_property import cached_property
from rollflow.stream.data.tree import Tree
from rollflow.stream.multi_agent.agent_part import AgentPart, Spaces, parts_of

AgentInfos = Sequence[Mapping[Any, Mapping[str, Any]]]


class ArrayStep(NamedTuple):
    """Arrays that one step of N environments gave, per part of A agents; E of their episodes ended with it."""

    observations: Sequence[Tree]  # any[N, A, ...]: after the step; of an episode that ended, the last
    rewards: Sequence[NDArray[Any]]  # number[N, A]
    terminateds: NDArray[np.bool_]  # bool[N]
    truncateds: NDArray[np.bool_]  # bool[N]
    first: Sequence[Tree] = ()  # any[E, A, ...]: where episodes ended, the next ones' first observations; () if E is 0
    infos: AgentInfos = ()  # per environment: agent -> info; () where there are none
    first_infos: AgentInfos = ()  # per environment whose episode ended; () likewise


class MultiAgentVectorEnv(ABC):
    """N environments whose agents all act in every step, and whose episodes end for all agents at once.

        num_envs              N
        possible_agents       the agents of each environment
        observation_spaces    agent -> space of its observations
        action_spaces         agent -> space of its actions

    Agents with the same two spaces are one of `parts`, in the order of `possible_agents`. Actions and observations come
    per part, as trees of arrays `any[N, A, ...]`: environments first, then the part's agents. An episode that ends is
    followed by the next one in the same step. Arrays that are returned may be written over by the next step.
    """

    num_envs: int
    possible_agents: Sequence[Any]
    observation_spaces: Spaces
    action_spaces: Spaces

    @cached_property
    def parts(self) -> tuple[AgentPart, ...]:
        """The parts, in the order of their first agents."""
        return parts_of(self.possible_agents, self.observation_spaces, self.action_spaces)

    @abstractmethod
    def reset_arrays(self, seeds: Sequence[int] | None) -> tuple[Sequence[Tree], AgentInfos]:
        """Begin an episode everywhere, with a seed for each of N, or with the generators that there are.

        Returns the first observations per part, any[N, A, ...], and per environment agent -> info; () for none.
        """

    @abstractmethod
    def step_arrays(self, actions: Sequence[Tree]) -> ArrayStep:
        """Take everybody's actions, per part any[N, A, ...]."""

    def close(self) -> None:
        """Give back what the environments hold."""
        return None
