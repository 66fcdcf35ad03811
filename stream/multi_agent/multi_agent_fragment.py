"""MultiAgentFragment: T vector steps of a lane of environments with several agents each."""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollflow.stream.data.loss_ledger import Origin
from rollflow.stream.episodes.multi_agent import MultiAgentEpisode
from rollflow.stream.fragments.fragment import Fragment, FragmentEpisodes
from rollflow.stream.multi_agent.agent_fragment import AgentFragment, ModuleFragment
from rollflow.stream.multi_agent.env_episodes import sealed_episode


class EnvClock:
    """Begins and ends of the episodes of N environments in one fragment, in vector steps since the first reset.

    first      vector step at which the fragment began
    started    i64[N]  vector step at which the episode began that was going on then
    numbers    i64[N]  number of episodes that the environment had before that one
    ends       (vector step, environment, whether the episode was truncated), in the order of time
    losses     (vector step after which the environments were lost, reason)
    """

    def __init__(self, first: int, started: NDArray[np.int64], numbers: NDArray[np.int64]) -> None:
        self.first, self.started, self.numbers = first, started, numbers
        self.ends: list[tuple[int, int, bool]] = []
        self.losses: list[tuple[int, str]] = []
        self._ends_of: dict[int, list[tuple[int, bool]]] = {}  # of each environment: vector step, and if truncated
        self._lost: set[tuple[int, int]] = set()

    def end(self, envs: NDArray[np.int64], vector_step: int, truncated: NDArray[np.bool_]) -> None:
        """Record that episodes of `envs`, i64[E], ended with a vector step (`truncated`, bool[E]), and others began."""
        for env, is_truncated in zip(envs.tolist(), truncated.tolist(), strict=True):
            self.ends.append((vector_step, env, is_truncated))
            self._ends_of.setdefault(env, []).append((vector_step, is_truncated))

    def lose(self, vector_step: int, reason: str) -> None:
        """Record that all episodes ended with a vector step, since the environments were lost."""
        envs = np.arange(len(self.numbers))
        self.losses.append((vector_step, reason))
        self._lost |= {(env, self.count(env) - 1) for env in envs.tolist()}
        self.end(envs, vector_step, np.ones(len(envs), np.bool_))

    def was_lost(self, env: int, nth: int) -> bool:
        """True if an episode ended because its environment was lost."""
        return (env, nth) in self._lost

    def nth(self, env: int, vector_step: int) -> int:
        """Number of episodes of the environment that had ended in the fragment when a vector step began."""
        return bisect_right(self._ends_of.get(env, ()), (vector_step, True))

    def nth_of(self, envs: NDArray[np.int64], vector_steps: NDArray[np.int64]) -> NDArray[np.int64]:
        """`nth` of several environments, i64[K], at vector steps, i64[K]: i64[K]."""
        ends = np.array(sorted((env, end) for end, env, _ in self.ends), np.int64).reshape(-1, 2)
        most = 1 + max(int(vector_steps.max(initial=0)), int(ends[:, 1].max(initial=0)))
        ordered = ends[:, 0] * most + ends[:, 1]
        before: NDArray[np.int64] = np.searchsorted(ordered, envs * most + vector_steps, side="right")
        return before - np.searchsorted(ordered, envs * most)

    def number(self, env: int, vector_step: int) -> int:
        """The number of the episode that the environment was in at a vector step."""
        return int(self.numbers[env]) + self.nth(env, vector_step)

    def start(self, env: int, nth: int) -> int:
        """The vector step at which an episode began."""
        return self._ends_of[env][nth - 1][0] if nth else int(self.started[env])

    def count(self, env: int) -> int:
        """Number of episodes of the environment in the fragment, with the one that goes on at its end."""
        return 1 + len(self._ends_of.get(env, ()))

    def end_of(self, env: int, nth: int) -> tuple[int, bool] | None:
        """The vector step that ended an episode, and whether it was truncated; None: it goes on."""
        ends = self._ends_of.get(env, ())
        return ends[nth] if nth < len(ends) else None

    def begin_after_loss(self, reason: str) -> None:
        """Put before the first vector step the episodes that were lost then."""
        envs = range(len(self.numbers))
        self.started, self.numbers = np.full_like(self.started, self.first), self.numbers - 1
        self.losses.insert(0, (self.first, reason))
        self._lost = {(env, nth + 1) for env, nth in self._lost} | {(env, 0) for env in envs}
        self.ends[:0] = [(self.first, env, True) for env in envs]
        for env in envs:
            self._ends_of.setdefault(env, []).insert(0, (self.first, True))

    def next(self, vector_step: int) -> "EnvClock":
        """The clock of the fragment that begins now."""
        started, numbers = self.started.copy(), self.numbers.copy()
        for end, env, _ in self.ends:
            started[env], numbers[env] = end, numbers[env] + 1
        return EnvClock(vector_step, started, numbers)


class MultiAgentFragment:
    """T vector steps of N environments with several agents each; read-only.

    lane, sequence    number of the lane, and of the fragment in it
    parts             the agents' steps, one fragment for each part
    num_envs          N
    num_rows          T
    clock             begins and ends of episodes
    custom_data       (environment, number of its episode) -> data that pieces keep with the episode
    is_last           whether this is the lane's last fragment
    """

    origin: Origin | None = None  # which counts lost transitions; set at the cut

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
        """Number of agent steps, without lookback."""
        return sum(part.num_steps for part in self.parts)

    @property
    def is_empty(self) -> bool:
        """True if there are no environment steps; a fragment with some may still have no agent step."""
        return not self.num_rows

    @property
    def nbytes(self) -> int:
        """Bytes in the columns."""
        return sum(part.nbytes for part in self.parts)

    @property
    def module_ids(self) -> list[Any]:
        """The modules that have acted so far, part by part."""
        return [module_id for part in self.parts for module_id in part.outputs]

    @property
    def losses(self) -> list[tuple[int, str]]:
        """Losses of the environments: (vector step since the first reset, reason).

        Ongoing episodes ended as truncated. An agent without a step in this fragment has no chunk to mark so.
        """
        return self.clock.losses

    def of_module(self, module_id: Any) -> ModuleFragment:
        """The agents' chunks in which a module acted. Raises KeyError for one that has not acted so far."""
        for part in self.parts:
            if module_id in part.outputs:
                return part.of_module(module_id)
        raise KeyError(f"module '{module_id}' has not acted in {self!r}, expected one of {self.module_ids}")

    def by_module(self) -> dict[Any, ModuleFragment]:
        """Module id -> its agents' chunks, of modules that have made steps here."""
        return {module_id: parts[0] for module_id, parts in parts_by_module([self]).items()}

    def policy_versions(self) -> dict[Any, int]:
        """Module id -> the oldest version that an action was computed with, of modules that acted."""
        return {module_id: part.policy_version for module_id, part in self.by_module().items()}

    def agent_episodes(self, module_id: Any) -> FragmentEpisodes:
        """The chunks of one module's agents as a sequence of `SingleAgentEpisode`, made on demand."""
        return FragmentEpisodes([self.of_module(module_id)])

    def episodes(self) -> Iterator[MultiAgentEpisode]:
        """The chunks of the environments' episodes, environment by environment, in the order of time.

        The rewards of an agent that waits for its next observation count as received in the last env step.
        """
        for env in range(self.num_envs):
            for nth in range(self.clock.count(env)):
                episode = sealed_episode(self, env, nth)
                if len(episode) and episode.agent_ids:  # after a loss, no agent may be left
                    yield episode

    def env_slot(self, env: int) -> int:
        """The number in the lane of an environment."""
        return env

    def begin_after_loss(self, reason: str) -> None:
        """Record that the environments were lost before this fragment's first step: all open episodes ended."""
        self.clock.begin_after_loss(reason)
        for part in self.parts:
            part.begin_after_loss(reason)

    def __repr__(self) -> str:
        return (
            f"<MultiAgentFragment {self.sequence} of lane {self.lane}: {self.num_rows} vector steps × {self.num_envs} "
            "environments>"
        )


AnyFragment = Fragment | MultiAgentFragment


def parts_by_module(
    fragments: Iterable[MultiAgentFragment], is_wanted: Callable[[Any], bool] | None = None
) -> dict[Any, list[ModuleFragment]]:
    """Module id -> its agents' chunks, fragment by fragment, of modules that have made steps there.

    is_wanted    False for ids of modules that are left out; None: none is
    """
    found: dict[Any, list[ModuleFragment]] = {}
    for part in (part for fragment in fragments for part in fragment.parts):
        for module_id in part.outputs if is_wanted is None else filter(is_wanted, part.outputs):
            mine = part.of_module(module_id)
            if len(mine.chunks.slot):
                found.setdefault(module_id, []).append(mine)
    return found
