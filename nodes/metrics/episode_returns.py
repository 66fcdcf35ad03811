"""Returns and lengths of finished episodes, of one agent or several, added up over the fragments that they lie in."""

from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from rollflow.nodes.argument_checks import checked_count
from rollflow.stream.data.columns import Columns
from rollflow.stream.fragments.fragment import Fragment
from rollflow.stream.multi_agent.agent_fragment import AgentFragment, EnvClock
from rollflow.stream.multi_agent.multi_agent_fragment import MultiAgentFragment

_NEVER: tuple[int, NDArray[np.float64]] = (-2, np.empty(0))  # the last fragment of a lane that has given none


class FinishedEpisode(NamedTuple):
    """An episode that has ended, as the functions of `rollout.on_episode` get it.

    id_               of the episode
    lane, slot        numbers of its environment's lane, and of the environment in it
    episode_return    undiscounted sum of its rewards; of several agents, of all of them
    length            steps since its reset
    is_terminated     False: it was truncated
    custom_data       dict that connector pieces keep with the episode
    """

    id_: str
    lane: int
    slot: int
    episode_return: float
    length: int
    is_terminated: bool
    custom_data: dict[Any, Any]


class EpisodeWindow:
    """The last `window` finished episodes.

    count          number of episodes finished so far
    returns        undiscounted sums of rewards of the last `window` episodes, oldest first
    lengths        their numbers of steps
    on_finished    is called with every episode that is counted here; None: nothing is
    """

    def __init__(self, window: int = 100) -> None:
        # Key of a lane -> number of its last fragment, and f64[N]: rewards of open episodes so far, NaN where unknown.
        self._open: dict[tuple[Any, ...], tuple[int, NDArray[np.float64]]] = {}
        self.count = 0
        self.on_finished: Callable[[FinishedEpisode], None] | None = None
        self._window = window = checked_count("window", window, 1)
        self.returns: deque[float] = deque(maxlen=window)
        self.lengths: deque[int] = deque(maxlen=window)

    def get_state(self) -> dict[str, Any]:
        """The episodes counted, and the rewards of open ones."""
        opened = [[*key, last, so_far.copy()] for key, (last, so_far) in self._open.items()]
        return {"count": self.count, "returns": list(self.returns), "lengths": list(self.lengths), "open": opened}

    def set_state(self, state: Mapping[str, Any], *, goes_on: bool = True) -> None:
        """Count on from what `get_state` gave.

        goes_on    whether episodes that were open go on
        """
        self.count = 0
        self.take(state["count"], state["returns"], state["lengths"])
        opened = state["open"] if goes_on else ()
        self._open = {tuple(key): (last, so_far.copy()) for *key, last, so_far in opened}

    def take(self, count: int, returns: Iterable[float], lengths: Iterable[int]) -> None:
        """Add `count` episodes that were added up elsewhere; of the newest come returns and lengths, oldest first."""
        self.count += count
        self.returns.extend(returns)
        self.lengths.extend(lengths)

    @property
    def mean(self) -> float:
        """Mean return of the last `window` finished episodes; NaN before the first."""
        return float(np.mean(self.returns)) if self.returns else float("nan")

    def __repr__(self) -> str:
        mean = f", mean return {self.mean:.4g} of the last {len(self.returns)}" if self.returns else ""
        return f"<{type(self).__name__}: {self.count} finished episodes{mean}>"


class EpisodeReturns(EpisodeWindow):
    """Sink that adds up each episode's rewards and keeps the last `window` finished episodes.

    An episode counts from its reset on, whatever fragments it is cut into. It is left out if an edge dropped one of its
    fragments, or if it ended because its environment was lost. Rewards are those in the column `rewards`, f32[T, N],
    before a learner piece changes them. Call it with the fragments of one rollout; use `add` for several rollouts.
    """

    def __call__(self, fragments: Fragment) -> None:
        """Add one fragment; one that has been added changes nothing, as if two nodes of a graph see it."""
        if fragments.sequence > self._open.get((None, fragments.lane), _NEVER)[0]:
            self.add(fragments, None)

    def add(self, fragments: Fragment, source: Hashable) -> None:
        """Add one fragment of `source`, one of several rollouts."""
        given, fragments = fragments, fragments.outline
        chunks, lane = fragments.chunks, (source, fragments.lane)
        last, so_far = self._open.get(lane, _NEVER)
        if fragments.sequence != last + 1:
            so_far = np.full(fragments.layout.num_slots, np.nan)
        self._open[lane] = fragments.sequence, so_far
        if not len(chunks.slot):
            return
        rewards = fragments.chunk_sums(Columns.REWARDS)
        rewards += np.where(chunks.t_started > 0, so_far[chunks.slot], 0.0)
        done = chunks.terminated | chunks.truncated
        if not np.count_nonzero(done):
            so_far[chunks.slot] = rewards
            return
        so_far[chunks.slot[~done]] = rewards[~done]
        whole = done & ~np.isnan(rewards)
        for loss in fragments.losses:
            whole &= ~((chunks.stop == loss.row) & np.isin(chunks.slot, loss.cut))
        (finished,) = np.nonzero(whole)
        if self.on_finished is not None:
            for place in finished.tolist():
                self.on_finished(_finished(given, place, float(rewards[place])))
        kept = finished[-self._window :]  # the others would be pushed out again
        self.take(len(finished), rewards[kept].tolist(), (chunks.t_started + chunks.stop - chunks.start)[kept].tolist())

    def forget(self, source: Hashable, lane: int) -> None:
        """Forget the open episodes of a lane that has ended."""
        self._open.pop((source, lane), None)


class AgentReturns(EpisodeWindow):
    """Sink that adds up rewards over fragments of several agents, and keeps the last `window` finished episodes.

        count        number of environments' episodes finished so far
        returns      undiscounted sums of all their agents' rewards, of the last `window`, oldest first; with those
                     that came before an agent's first observation, which are in no step
        lengths      their numbers of env steps
        by_module    module id -> returns of the agents that it served, each agent's episode by itself

    An episode counts from its reset on. It is left out if one of its fragments is missing, or if it ended because its
    environment was lost.
    """

    def __init__(self, window: int = 100) -> None:
        super().__init__(window)
        self.by_module: dict[Any, EpisodeReturns] = {}

    def __call__(self, fragments: MultiAgentFragment) -> None:
        """Add one fragment; one that has been added changes nothing, as if two nodes of a graph see it."""
        key = (fragments.lane,)
        if fragments.sequence <= self._open.get(key, _NEVER)[0]:
            return
        self._add_agents(fragments)
        clock, num_envs = fragments.clock, fragments.num_envs
        last, so_far = self._open.get(key, (-1, np.full(num_envs, np.nan)))
        if fragments.sequence != last + 1:
            so_far = np.full(num_envs, np.nan)
        begun_here = clock.started >= clock.first
        counts = np.bincount([env for _, env, *_ in clock.ends], minlength=num_envs)  # of ends
        sums = np.zeros((num_envs, 2 + int(counts.max(initial=0))))
        sums[:, 0] = np.where(begun_here, 0.0, so_far)
        for part in fragments.parts:
            _add_chunks(sums, part, clock)
        ended: Counter[int] = Counter()
        for end, env, is_truncated, is_lost in clock.ends:
            nth = ended[env]
            ended[env] += 1
            if np.isnan(sums[env, nth]) or is_lost:
                continue
            episode, total = (env, int(clock.numbers[env]) + nth), float(sums[env, nth])
            length = end - clock.start(env, nth)
            self.take(1, [total], [length])
            if self.on_finished is not None:
                custom_data = dict(fragments.custom_data.get(episode, {}))
                id_, lane = fragments.episode_id(*episode), fragments.lane
                self.on_finished(FinishedEpisode(id_, lane, env, total, length, not is_truncated, custom_data))
        self._open[key] = fragments.sequence, sums[np.arange(num_envs), counts]
        if fragments.is_last:
            self._forget(fragments.lane, len(fragments.parts))

    def get_state(self) -> dict[str, Any]:
        """The episodes counted, in all and by module, and the rewards of open ones."""
        by_module = [[module_id, each.get_state()] for module_id, each in self.by_module.items()]
        return {**super().get_state(), "by_module": by_module}

    def set_state(self, state: Mapping[str, Any], *, goes_on: bool = True) -> None:
        super().set_state(state, goes_on=goes_on)
        for module_id, each in state["by_module"]:
            self.by_module[module_id] = returns = EpisodeReturns(self._window)
            returns.set_state(each, goes_on=goes_on)

    def _add_agents(self, fragments: MultiAgentFragment) -> None:
        for place, part in enumerate(fragments.parts):
            for module_id in part.outputs:
                # Add also a fragment in which its agents only wait: without it, the next would seem to follow a gap.
                returns = self.by_module.setdefault(module_id, EpisodeReturns(self._window))
                returns.add(part.of_module(module_id), (place, fragments.lane))

    def _forget(self, lane: int, num_parts: int) -> None:
        """Forget the open episodes of a lane that has ended."""
        del self._open[lane,]
        for returns in self.by_module.values():
            for place in range(num_parts):
                returns.forget((place, lane), lane)


def _finished(fragment: Fragment, place: int, total: float) -> FinishedEpisode:
    """The episode that the chunk at this place of a fragment has ended."""
    chunk = fragment.chunk(place)
    slot, length = chunk.slot or 0, chunk.t_started + len(chunk)
    return FinishedEpisode(chunk.id_, fragment.lane, slot, total, length, chunk.is_terminated, chunk.custom_data)


def _add_chunks(sums: NDArray[np.float64], part: AgentFragment, clock: EnvClock) -> None:
    """Add a part's rewards to `sums`, f64[environments, episodes in the fragment]: of chunks, and early ones."""
    chunks, agents = part.chunks, len(part.part.agents)
    for vector_step, slot, reward in part.early:
        if vector_step > clock.first:
            sums[slot // agents, clock.nth(slot // agents, vector_step - 1)] += reward
    if not len(chunks.slot):
        return
    envs = chunks.slot // agents
    nths = clock.nth_of(envs, part.clock[chunks.start, chunks.slot])
    np.add.at(sums, (envs, nths), part.chunk_sums(Columns.REWARDS))


C = TypeVar("C", bound=Callable[..., Any])
V = TypeVar("V")


class Hooks:
    """Functions to be called by a rollout. What one of them raises, the call or the loop raises that it is called in.

    returns    counts the episodes: an `EpisodeWindow` that is called with every fragment
    """

    def __init__(self, returns: Any) -> None:
        self._returns = returns
        self._ended: deque[FinishedEpisode] = deque()
        self._functions: dict[str, list[Callable[[Any], Any]]] = {"batch": [], "episode": [], "publish": []}

    def add(self, kind: str, function: C) -> C:
        """Have a function be called from now on with every "batch", "episode" or "publish"; the function."""
        if not callable(function):
            raise TypeError(f"on_{kind} got {function!r}, expected a function that takes one argument")
        self._functions[kind].append(function)
        if kind == "episode":
            self._returns.on_finished = self._ended.append
        return function

    def tell_episodes(self) -> None:
        """Call functions with the episodes that have ended meanwhile, each once."""
        while self._ended:
            self.tell("episode", self._ended.popleft())

    def tell(self, kind: str, value: V) -> V:
        """Call functions of a kind with a value, such as a "batch", which is returned."""
        for function in self._functions[kind]:
            function(value)
        return value

    def tell_if_new(self, version: Any, *, is_new: bool) -> bool:
        """Call functions with a version, or module id -> version, that is new, and return whether it is."""
        if is_new:
            self.tell("publish", version)
        return is_new
