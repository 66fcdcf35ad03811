"""Where the chunks of a fragment lie."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, eq=False)
class ChunkIndex:
    """Where they lie: slot by slot, within a slot by time. C chunks, none empty."""

    slot: NDArray[np.int64]  # i64[C]
    number: NDArray[np.int64]  # i64[C]  how many episodes the slot had before this one
    start: NDArray[np.int64]  # i64[C]  row of the first transition
    stop: NDArray[np.int64]  # i64[C]  row after the last transition
    t_started: NDArray[np.int64]  # i64[C]  episode steps before `start`
    lookback: NDArray[np.int64]  # i64[C]  rows before `start` that belong to the same episode, at most H
    terminated: NDArray[np.bool_]  # bool[C]
    truncated: NDArray[np.bool_]  # bool[C]
