"""What the environments of a lane are at within a vector step, as those see it who wait for them."""

from enum import Enum, auto
from typing import Any

import numpy as np
from numpy.typing import NDArray

PHASE_BYTES = 16


class Doing(Enum):
    """What takes time."""

    STEP = auto()
    RESET = auto()
    BOTH = auto()  # a step, and resets within it that nobody can tell from it


class Phase:
    """Says whether a lane's environments are being reset; told by whoever steps them, also from another process.

    memory    i64[2], both 0 at first: how often a reset within a step has begun or ended, and whether none can be told
              from the step; None: memory of this process alone
    """

    def __init__(self, memory: NDArray[np.int64] | None = None) -> None:
        self._memory: NDArray[Any] = np.zeros(PHASE_BYTES // 8, np.int64) if memory is None else memory

    def turn(self) -> None:
        """A reset within a step begins, or has ended."""
        self._memory[0] += 1

    def set_blended(self, is_blended: bool) -> None:
        """Say whether these environments reset where nobody can tell it from their step."""
        self._memory[1] = is_blended

    @property
    def turns(self) -> int:
        """How often a reset has begun or ended."""
        return int(self._memory[0])

    @property
    def doing(self) -> Doing:
        """What they are at, while they are stepped."""
        if self._memory[0] % 2:
            return Doing.RESET
        return Doing.BOTH if self._memory[1] else Doing.STEP
