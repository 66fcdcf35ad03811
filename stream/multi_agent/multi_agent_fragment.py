"""A fragment of a lane of environments with several agents each."""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollflow.stream.fragment_episodes import FragmentEpisodes
from rollflow.stream.multi_agent.agent_chunks import episode_of
from rollflow.stream.multi_agent.agent_fragment import AgentFragment, ModuleFragment
from rollflow.stream.multi_agent_episode import MultiAgentEpisode


class EnvClock:
    """When the episodes of N environments began and ended in one fragment, in vector steps since the first reset.

    first      vector step at which the fragment began
    started    i64[N] at which the episode began that was going on then
    numbers    i64[N] how many episodes the environment had before that one
    ends       in their order: (vector step, environment, whether it was truncated)
    losses     (vector step after which the environments were lost, why)
    """

    def __init__(self, first: int, started: NDArray[np.int64], numbers: NDArray[np.int64]) -> None:
        self.first, self.started, self.numbers = first, started, numbers
        self.ends: list[tuple[int, int, bool]] = []
        self.losses: list[tuple[int, str]] = []
        self._ends_of: dict[int, list[int]] = {}
        self._truncated_of: dict[int, list[bool]] = {}
        self._lost: set[tuple[int, int]] = set()

    def end(self, envs: NDArray[np.int64], vector_step: int, truncated: NDArray[np.bool_]) -> None:
        """The episodes of these environments have ended with a vector step, and others have begun."""
        for env, is_truncated in zip(envs.tolist(), truncated.tolist(), strict=True):
            self.ends.append((vector_step, env, is_truncated))
            self._ends_of.setdefault(env, []).append(vector_step)
            self._truncated_of.setdefault(env, []).append(is_truncated)

    def lose(self, vector_step: int, reason: str) -> None:
        """All episodes that were going on after a vector step have ended with it, since the environments were lost."""
        envs = np.arange(len(self.numbers))
        self.losses.append((vector_step, reason))
        self._lost |= {(env, self.count(env) - 1) for env in envs.tolist()}
        self.end(envs, vector_step, np.ones(len(envs), np.bool_))

    def was_lost(self, env: int, nth: int) -> bool:
        """Whether an episode ended because its environment was lost."""
        return (env, nth) in self._lost

    def nth(self, env: int, vector_step: int) -> int:
        """How many episodes of the environment had ended in the fragment when a vector step began."""
        return bisect_right(self._ends_of.get(env, ()), vector_step)

    def nth_of(self, envs: NDArray[np.int64], vector_steps: NDArray[np.int64]) -> NDArray[np.int64]:
        """`nth`, i64[K], of several."""
        ends = np.array(sorted((env, end) for end, env, _ in self.ends), np.int64).reshape(-1, 2)
        most = 1 + max(int(vector_steps.max(initial=0)), int(ends[:, 1].max(initial=0)))
        ordered = ends[:, 0] * most + ends[:, 1]
        before: NDArray[np.int64] = np.searchsorted(ordered, envs * most + vector_steps, side="right")
        return before - np.searchsorted(ordered, envs * most)

    def number(self, env: int, vector_step: int) -> int:
        """The number of the episode that the environment was in then."""
        return int(self.numbers[env]) + self.nth(env, vector_step)

    def start(self, env: int, nth: int) -> int:
        """The vector step at which an episode began."""
        return self._ends_of[env][nth - 1] if nth else int(self.started[env])

    def count(self, env: int) -> int:
        """How many episodes of the environment there are in the fragment, one of them going on at its end."""
        return 1 + len(self._ends_of.get(env, ()))

    def end_of(self, env: int, nth: int) -> tuple[int, bool] | None:
        """The vector step that ended an episode, and whether it was truncated; None: it goes on."""
        ends = self._ends_of.get(env, ())
        return (ends[nth], self._truncated_of[env][nth]) if nth < len(ends) else None

    def next(self, vector_step: int) -> "EnvClock":
        """Of the fragment that begins now."""
        started, numbers = self.started.copy(), self.numbers.copy()
        for end, env, _ in self.ends:
            started[env], numbers[env] = end, numbers[env] + 1
        return EnvClock(vector_step, started, numbers)


class MultiAgentFragment:
    """T vector steps of N environments with several agents each; read-only.

    lane, sequence    number of the lane, and of the fragment in it
    parts             the agents' steps, by their spaces
    num_envs          N
    num_rows          T
    clock             when episodes began and ended
    custom_data       (environment, number of its episode) -> what pieces keep with the episode
    is_last           whether the lane has left: no other comes after this one
    """

    def __init__(
        self,
        lane: int,
        sequence: int,
        parts: Sequence[AgentFragment],
        *,
        num_envs: int,
        num_rows: int,
        clock: EnvClock,
        episode_id: Callable[[int, int], str],
        custom_data: Mapping[tuple[int, int], Mapping[Any, Any]],
    ) -> None:
        self.lane, self.sequence, self.parts = lane, sequence, tuple(parts)
        self.num_envs, self.num_rows, self.clock = num_envs, num_rows, clock
        self.episode_id, self.custom_data = episode_id, custom_data
        self.is_last = False

    @property
    def num_steps(self) -> int:
        """Agent steps held, lookback left out."""
        return sum(part.num_steps for part in self.parts)

    @property
    def is_empty(self) -> bool:
        """Whether there are no environment steps; agents may wait all the while, and have made no step."""
        return not self.num_rows

    @property
    def num_env_steps(self) -> int:
        """Environment steps held."""
        return self.num_rows * self.num_envs

    @property
    def nbytes(self) -> int:
        """Bytes held in columns."""
        return sum(part.nbytes for part in self.parts)

    @property
    def module_ids(self) -> list[Any]:
        """The modules that have acted so far, part by part."""
        return [module_id for part in self.parts for module_id in part.outputs]

    @property
    def losses(self) -> list[tuple[int, str]]:
        """When the environments were lost, in vector steps since the first reset, and why.

        Episodes that were going on ended with it, as truncated; an agent without a step in this fragment has no chunk
        that could say so.
        """
        return self.clock.losses

    def of_module(self, module_id: Any) -> ModuleFragment:
        """The agents' chunks in which a module acted. Raises KeyError for one that has not acted so far."""
        for part in self.parts:
            if module_id in part.outputs:
                return part.of_module(module_id)
        raise KeyError(f"module '{module_id}' has not acted in {self!r}, expected one of {self.module_ids}")

    def policy_versions(self) -> dict[Any, int]:
        """Module id -> the oldest version that an action was computed with, for those that acted."""
        mine = {module_id: self.of_module(module_id) for module_id in self.module_ids}
        return {module_id: part.policy_version for module_id, part in mine.items() if len(part.chunks.slot)}

    def agent_episodes(self, module_id: Any) -> FragmentEpisodes:
        """The chunks of one module's agents as a sequence of `SingleAgentEpisode`, made when asked for."""
        return FragmentEpisodes([self.of_module(module_id)])

    def episodes(self) -> Iterator[MultiAgentEpisode]:
        """The chunks of the environments' episodes, environment by environment, in the order of time.

        Of an agent that waits for its next observation, what it received since the last one counts as received in
        the last env step.
        """
        for env in range(self.num_envs):
            for nth in range(self.clock.count(env)):
                episode = episode_of(self, env, nth)
                if len(episode) and episode.agent_ids:  # who waits as environments are lost may be all there are
                    yield episode

    def __repr__(self) -> str:
        return (
            f"<MultiAgentFragment {self.sequence} of lane {self.lane}: {self.num_rows} vector steps x {self.num_envs} "
            "environments>"
        )
