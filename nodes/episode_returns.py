"""Returns and lengths of finished episodes, added up over the fragments that they lie in."""

from collections import deque

import numpy as np
from numpy.typing import NDArray

from rollflow.stream.columns import Columns
from rollflow.stream.fragment import Fragment


class EpisodeReturns:
    """A node without outputs that adds up each episode's rewards and keeps the last `window` finished ones.

        count      episodes finished so far
        returns    undiscounted sums of rewards of the last `window` episodes, oldest first
        lengths    their steps

    An episode counts from its reset on, whatever fragments it is cut into, so no fragment of a lane may be left
    out. Rewards are those in the column, before a learner piece changes them.
    """

    def __init__(self, window: int = 100) -> None:
        self.count = 0
        self.returns: deque[float] = deque(maxlen=window)
        self.lengths: deque[int] = deque(maxlen=window)
        self._open: dict[int, NDArray[np.float64]] = {}  # lane -> f64[N], so far in the slots' open episodes

    def __call__(self, fragments: Fragment) -> None:
        """Add one fragment."""
        chunks = fragments.chunks
        lengths = chunks.stop - chunks.start
        if not len(lengths):
            return
        starts = np.cumsum(lengths) - lengths
        rewards = np.add.reduceat(fragments.gather(Columns.REWARDS), starts, dtype=np.float64)
        so_far = self._open.setdefault(fragments.lane, np.zeros(fragments.layout.num_slots))
        rewards += np.where(chunks.t_started > 0, so_far[chunks.slot], 0.0)
        done = chunks.terminated | chunks.truncated
        so_far[chunks.slot[~done]] = rewards[~done]
        self.count += int(done.sum())
        self.returns.extend(rewards[done].tolist())
        self.lengths.extend((chunks.t_started + lengths)[done].tolist())

    @property
    def mean(self) -> float:
        """Mean return of the last `window` finished episodes; NaN before the first."""
        return float(np.mean(self.returns)) if self.returns else float("nan")
