"""The numbers of agents in N environments, and who of them acts, has ended, or is yet to come.

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


class AgentNumbers:
    """Numbers of `count` agent slots over all parts, and the words in which errors name them.

    agents_of   the agents of each part
    first_env   the number of the first environment, in errors
    bounds      first number of each part, and `count`
    of_env      i64[N, agents], the same as an array
    envs        i64[count], the environment of each number
    agents      the agent of each number
    steps       i64[N], env steps of each environment's episode; -1: it is being reset
    """

    def __init__(self, agents_of: Sequence[Sequence[Any]], num_envs: int, first_env: int = 0) -> None:
        self.agents_of, self.num_envs, self.first_env = agents_of, num_envs, first_env
        self.steps: NDArray[np.int64] = np.full(num_envs, -1)
        sizes = [len(agents) for agents in agents_of]
        self.bounds = [0, *np.cumsum([size * num_envs for size in sizes]).tolist()]
        self.count: int = self.bounds[-1]
        numbers = [
            np.arange(first, stop).reshape(num_envs, size)
            for (first, stop), size in zip(pairwise(self.bounds), sizes, strict=True)
        ]
        self.of_env: NDArray[np.int64] = np.concatenate(numbers, axis=1)
        self.envs: NDArray[np.int64] = np.empty(self.count, np.int64)
        self.envs[self.of_env] = np.arange(num_envs)[:, None]
        self.agents: list[Any] = [agent for agents in agents_of for agent in [*agents] * num_envs]

    @cached_property
    def by_env(self) -> list[dict[Any, int]]:
        """One dict per environment: agent -> number."""
        agents = [agent for agents in self.agents_of for agent in agents]
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
            who = self.named(self.bounds[part] + wrong[0]) if wrong else f"agents {list(self.agents_of[part])}"
            raise EnvError(
                f"{who}: actions of slots {shown(acting.tolist())}, expected those that have an observation to act on, "
                f"{shown(must_act.tolist())}"
            )

    # Words for errors

    def env_named(self, env: int) -> str:
        """The environment and its step."""
        step = self.steps[env]
        return f"environment {self.first_env + env}, {'reset' if step < 0 else f'env step {step}'}"

    def agent_named(self, env: int, agent: Any) -> str:
        """The environment, its step, and an agent."""
        return f"{self.env_named(env)}, agent {agent!r}"

    def named(self, number: int) -> str:
        """Environment, step and agent of a number."""
        return self.agent_named(int(self.envs[number]), self.agents[number])


Ends = tuple[NDArray[np.bool_], NDArray[np.bool_]]  # bool[count] each: who is terminated, and who truncated


class AgentStates:
    """The state of every agent, by number.

    An agent acts on its newest observation, until it ends. An episode goes on as long as one of its agents is left; in
    every step of it an agent must be able to act.

    acting    i64[K], ascending: who has an observation and must act on it
    """

    def __init__(self, slots: AgentNumbers) -> None:
        self._slots = slots
        self._has_come = self._nobody()  # it has had an observation in its environment's episode
        self._hangs = self._nobody()  # it has acted since its last observation
        self._has_ended = self._nobody()
        self.acting: NDArray[np.int64] = np.zeros(0, np.int64)

    def begin(self, envs: NDArray[np.int64], seen: NDArray[np.int64]) -> None:
        """Begin episodes in `envs`, with observations of the agents `seen`. Raises EnvError if nobody is to act."""
        numbers = self._slots.of_env[envs]
        for state in self._flags:
            state[numbers] = False
        self._has_come[seen] = True
        self._check_acting(seen, np.setdiff1d(np.arange(self._slots.num_envs), envs))
        others = self.acting if len(envs) < self._slots.num_envs else self.acting[:0]
        self.acting = np.sort(np.concatenate([others, seen]))

    def step(
        self, seen: NDArray[np.int64], rewarded: NDArray[np.int64], ends: Ends | None
    ) -> tuple[Ends, NDArray[np.int64]]:
        """Take a vector step in which all of `acting` have acted.

        seen        i64[K] ascending: who has an observation after it
        rewarded    i64[R]: who has a reward
        ends        who ends with it, as the environments say; None: nobody

        Returns who of those that were there has ended, and the environments in which no agent is left, i64[E]
        ascending. Raises EnvError for what comes to an agent that has ended, and for a truncated one without a last
        observation.
        """
        self._refuse(seen[self._has_ended[seen]], "it has an observation, but has ended before")
        self._refuse(rewarded[self._has_ended[rewarded]], "it has a reward, but has ended before")
        self._hangs[self.acting] = True
        self._hangs[seen] = False
        self._has_come[seen] = True
        if ends is None:
            self.acting = seen
            if len(seen) < self._slots.count:
                self._check_acting(seen)
            return (self._nobody(), self._nobody()), np.zeros(0, np.int64)
        live = self._has_come & ~self._has_ended
        terminated, truncated = ends[0] & live, ends[1] & live
        lost = np.flatnonzero(truncated & self._hangs)
        self._refuse(lost, "it is truncated after an action without an observation, expected its last one")
        self._has_ended |= ends[0] | ends[1]
        is_left: NDArray[np.bool_] = self._has_come & ~self._has_ended
        envs = np.flatnonzero(~is_left[self._slots.of_env].any(axis=1))
        self.acting = seen[~(self._has_ended[seen] | np.isin(self._slots.envs[seen], envs))]
        self._check_acting(self.acting, envs)
        return (terminated, truncated), envs

    def get_state(self) -> NDArray[np.bool_]:
        """bool[N, 4, agents]: of each environment who has come, hangs, has ended, and acts."""
        acts = self._nobody()
        acts[self.acting] = True
        return np.stack([each[self._slots.of_env] for each in (*self._flags, acts)], axis=1)

    def set_state(self, state: NDArray[np.bool_]) -> None:
        """Go on from what `get_state` gave."""
        *flags, acts = np.moveaxis(state, 1, 0)
        for each, values in zip(self._flags, flags, strict=True):
            each[self._slots.of_env] = values
        self.acting = np.sort(self._slots.of_env[acts])

    @property
    def _flags(self) -> tuple[NDArray[np.bool_], ...]:
        return self._has_come, self._hangs, self._has_ended

    def _nobody(self) -> NDArray[np.bool_]:
        return np.zeros(self._slots.count, np.bool_)

    def _refuse(self, wrong: NDArray[np.int64], what: str) -> None:
        if len(wrong):
            raise EnvError(f"{self._slots.named(int(wrong[0]))}: {what}")

    def _check_acting(self, acting: NDArray[np.int64], others: NDArray[np.int64] | None = None) -> None:
        """Raise EnvError for an environment in which nobody acts and which is not one of the `others`."""
        counts = np.bincount(self._slots.envs[acting], minlength=self._slots.num_envs)
        if others is not None:
            counts[others] = 1
        if not counts.all():
            where = self._slots.env_named(int(np.argmin(counts)))
            raise EnvError(f"{where}: its episode goes on, but no agent has an observation to act on")
