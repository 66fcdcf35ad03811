"""Returns and lengths of finished multi-agent episodes, in all and by module."""

from collections import Counter, deque
from collections.abc import Callable
from typing import Any

import numpy as np

from rollflow.nodes.episode_returns import EpisodeReturns
from rollflow.stream.columns import Columns
from rollflow.stream.multi_agent.agent_fragment import AgentFragment
from rollflow.stream.multi_agent.multi_agent_fragment import EnvClock, MultiAgentFragment


class AgentReturns:
    """Adds up rewards over the fragments that episodes lie in, and keeps the last `window` finished ones.

        count        episodes of environments that have finished so far
        returns      undiscounted sums of all their agents' rewards, of the last `window`, oldest first
        lengths      their env steps
        by_module    module id -> the returns of the agents that it served, each agent's episode by itself. Those of a
                     module for which `is_there` is False go with the last fragments that it served in

    An episode counts from its reset on. One of which a fragment is missing is left out, and so is one that ended
    because its environment was lost.
    """

    def __init__(self, is_there: Callable[[Any], bool], window: int = 100) -> None:
        self.count = 0
        self.returns: deque[float] = deque(maxlen=window)
        self.lengths: deque[int] = deque(maxlen=window)
        self.by_module: dict[Any, EpisodeReturns] = {}
        self._is_there, self._window = is_there, window
        self._serving: dict[int, set[Any]] = {}  # lane -> the modules of its last fragment
        self._open: dict[int, tuple[int, np.ndarray[Any, np.dtype[np.float64]]]] = {}  # lane -> last fragment, so far

    def __call__(self, fragments: MultiAgentFragment) -> None:
        """Add one fragment."""
        self._add_agents(fragments)
        clock, num_envs = fragments.clock, fragments.num_envs
        last, so_far = self._open.get(fragments.lane, (-1, np.full(num_envs, np.nan)))
        if fragments.sequence != last + 1:
            so_far = np.full(num_envs, np.nan)
        begun_here = clock.started >= clock.first
        sums = np.zeros((num_envs, 1 + max((clock.count(env) for env in range(num_envs)), default=1)))
        sums[:, 0] = np.where(begun_here, 0.0, so_far)
        for part in fragments.parts:
            _add_chunks(sums, part, clock)
        ended: Counter[int] = Counter()
        for end, env, _ in clock.ends:
            nth = ended[env]
            ended[env] += 1
            if not (np.isnan(sums[env, nth]) or clock.was_lost(env, nth)):
                self.count += 1
                self.returns.append(float(sums[env, nth]))
                self.lengths.append(end - clock.start(env, nth))
        going = np.array([clock.count(env) - 1 for env in range(num_envs)])
        self._open[fragments.lane] = fragments.sequence, sums[np.arange(num_envs), going]
        if fragments.is_last:
            self._forget(fragments.lane, len(fragments.parts))

    @property
    def mean(self) -> float:
        """Mean return of the last `window` finished episodes, all agents added up; NaN before the first."""
        return float(np.mean(self.returns)) if self.returns else float("nan")

    def _add_agents(self, fragments: MultiAgentFragment) -> None:
        for place, part in enumerate(fragments.parts):
            for module_id in part.outputs:
                # Also of a fragment in which its agents only wait: one that is missing would be taken for lost.
                returns = self.by_module.setdefault(module_id, EpisodeReturns(self._window))
                returns.add(part.of_module(module_id), (place, fragments.lane))
        self._serving[fragments.lane] = set(fragments.module_ids)
        for module_id in self.by_module.keys() - set().union(*self._serving.values()):
            if not self._is_there(module_id):
                del self.by_module[module_id]

    def _forget(self, lane: int, num_parts: int) -> None:
        """Keep nothing of a lane that has left, but what is finished."""
        del self._serving[lane], self._open[lane]
        for returns in self.by_module.values():
            for place in range(num_parts):
                returns.forget((place, lane), lane)


def _add_chunks(sums: Any, part: AgentFragment, clock: EnvClock) -> None:
    """Add the rewards of a part's chunks to the sums of their environments' episodes."""
    chunks = part.chunks
    if not len(chunks.slot):
        return
    lengths = chunks.stop - chunks.start
    rewards = np.add.reduceat(part.gather(Columns.REWARDS), np.cumsum(lengths) - lengths, dtype=np.float64)
    envs = chunks.slot // len(part.part.agents)
    np.add.at(sums, (envs, clock.nth_of(envs, part.clock[chunks.start, chunks.slot])), rewards)
