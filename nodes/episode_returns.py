"""Returns and lengths of finished episodes, added up over the fragments that they lie in."""

from collections import deque
from collections.abc import Hashable, Iterable

import numpy as np
from numpy.typing import NDArray

from rollflow.stream.columns import Columns
from rollflow.stream.fragment import Fragment


class EpisodeReturns:
    """A node without outputs that adds up each episode's rewards and keeps the last `window` finished ones.

        count      episodes finished so far
        returns    undiscounted sums of rewards of the last `window` episodes, oldest first
        lengths    their steps

    An episode counts from its reset on, whatever fragments it is cut into. One of which a fragment is missing, since
    an edge dropped it, is left out, and so is one that ended because its environment was lost. Rewards are those in
    the column, before a learner piece changes them. A call is for the fragments of one rollout; `add` for several's.
    """

    def __init__(self, window: int = 100) -> None:
        self.count = 0
        self._window = window
        self.returns: deque[float] = deque(maxlen=window)
        self.lengths: deque[int] = deque(maxlen=window)
        # (source, lane) -> its last fragment's number, and f64[N]: so far in open episodes, NaN where unknown
        self._open: dict[tuple[Hashable, int], tuple[int, NDArray[np.float64]]] = {}

    def __call__(self, fragments: Fragment) -> None:
        """Add one fragment."""
        self.add(fragments, None)

    def add(self, fragments: Fragment, source: Hashable) -> None:
        """Add one fragment of one of several rollouts."""
        chunks, lane = fragments.chunks, (source, fragments.lane)
        known = self._open.get(lane)
        if known is not None and fragments.sequence == known[0] + 1:
            so_far = known[1]
        else:
            so_far = np.full(fragments.layout.num_slots, np.nan)
        self._open[lane] = fragments.sequence, so_far
        if not len(chunks.slot):
            return
        lengths = chunks.stop - chunks.start
        if len(chunks.slot) == len(so_far) and fragments.row_order is None:  # one for each slot, of all rows
            rewards = np.add.reduce(fragments.column(Columns.REWARDS), 0, np.float64)
        else:
            starts = lengths.cumsum() - lengths
            rewards = np.add.reduceat(fragments.gather(Columns.REWARDS), starts, dtype=np.float64)
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
        self.count += len(finished)
        kept = finished[-self._window :]  # the others would be pushed out again
        self.returns.extend(rewards[kept].tolist())
        self.lengths.extend((chunks.t_started[kept] + lengths[kept]).tolist())

    def take(self, count: int, returns: Iterable[float], lengths: Iterable[int]) -> None:
        """Add `count` episodes that somebody else has added up: what is kept of them, oldest first."""
        self.count += count
        self.returns.extend(returns)
        self.lengths.extend(lengths)

    def forget(self, source: Hashable, lane: int) -> None:
        """Keep nothing of a lane of which no fragment comes any more, but what is finished."""
        self._open.pop((source, lane), None)

    @property
    def mean(self) -> float:
        """Mean return of the last `window` finished episodes; NaN before the first."""
        return float(np.mean(self.returns)) if self.returns else float("nan")
