"""The numbers of agents in N environments.

Beside the slots of each part there is one *number* for every agent of every environment: the parts' slots one part
after the other, `number = first number of the part + environment * A + place in the part`.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollflow.stream.data.cached_property import cached_property
from rollflow.stream.data.errors import EnvError, shown
from rollflow.stream.multi_agent.agent_part import AgentPart


class AgentSlots:
    """Numbers of `count` agent slots over all parts, and the words in which errors name them.

    first_env   the number of the first environment, in errors
    bounds      first number of each part, and `count`
    of_env      i64[N, agents], the same as an array
    envs        i64[count], the environment of each number
    agents      the agent of each number
    steps       i64[N], env steps of each environment's episode; -1: it is being reset
    """

    def __init__(self, parts: Sequence[AgentPart], num_envs: int, first_env: int) -> None:
        self.parts, self.num_envs, self._first_env = parts, num_envs, first_env
        self.steps: NDArray[np.int64] = np.full(num_envs, -1)
        sizes = [len(part.agents) for part in parts]
        self.bounds = [0, *np.cumsum([size * num_envs for size in sizes]).tolist()]
        self.count: int = self.bounds[-1]
        numbers = [
            np.arange(first, stop).reshape(num_envs, size)
            for (first, stop), size in zip(pairwise(self.bounds), sizes, strict=True)
        ]
        self.of_env: NDArray[np.int64] = np.concatenate(numbers, axis=1)
        self.envs: NDArray[np.int64] = np.empty(self.count, np.int64)
        self.envs[self.of_env] = np.arange(num_envs)[:, None]
        self.agents: list[Any] = [agent for part in parts for agent in part.agents * num_envs]

    @cached_property
    def by_env(self) -> list[dict[Any, int]]:
        """One dict per environment: agent -> number."""
        agents = [agent for part in self.parts for agent in part.agents]
        return [dict(zip(agents, row, strict=True)) for row in self.of_env.tolist()]

    def split(self, numbers: NDArray[np.int64]) -> list[slice]:
        """Which of the ascending `numbers` each part has."""
        cuts = [0, *np.searchsorted(numbers, self.bounds[1:]).tolist()]
        return [slice(start, stop) for start, stop in pairwise(cuts)]

    def slots_of(self, part: int, numbers: NDArray[np.int64]) -> NDArray[np.int64] | None:
        """The slots in a part of ascending numbers in it; None: all of the part's."""
        first, stop = self.bounds[part : part + 2]
        if len(numbers) == stop - first:
            return None
        return numbers - first if first else numbers

    def check_acting(self, part: int, given: NDArray[np.int64] | None, expected: NDArray[np.int64] | None) -> None:
        """Raise EnvError unless the slots in a part that are given actions are those that must act; None: all."""
        everybody = np.arange(self.bounds[part + 1] - self.bounds[part])
        acting, must_act = (everybody if each is None else each for each in (given, expected))
        if not np.array_equal(acting, must_act):
            wrong = np.flatnonzero(np.isin(everybody, acting) != np.isin(everybody, must_act)).tolist()
            who = self.named(self.bounds[part] + wrong[0]) if wrong else f"agents {list(self.parts[part].agents)}"
            raise EnvError(
                f"{who}: actions of slots {shown(acting.tolist())}, expected those that have an observation to act on, "
                f"{shown(must_act.tolist())}"
            )

    # Words for errors

    def env_named(self, env: int) -> str:
        """The environment and its step."""
        step = self.steps[env]
        return f"environment {self._first_env + env}, {'reset' if step < 0 else f'env step {step}'}"

    def agent_named(self, env: int, agent: Any) -> str:
        """The environment, its step, and an agent."""
        return f"{self.env_named(env)}, agent {agent!r}"

    def named(self, number: int) -> str:
        """Environment, step and agent of a number."""
        return self.agent_named(int(self.envs[number]), self.agents[number])
