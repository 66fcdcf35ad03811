"""StepCosts: measured seconds of the parts of a vector step, which placements and simulations are reckoned from."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Line = Callable[[int], float]  # rows -> seconds


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Costs of the parts of a vector step, in seconds.

    slots           in all
    env             a step of so many environments, in one thread: slots -> seconds in the mean
    waits           the share of that in which the processor is free
    rest            connectors, forward pass and recording, of so many slots: slots -> seconds
    start_s         for one environment to be made and to be reset for the first time
    stages          parts of `rest` by the stages that do them; empty: the module does all of it
    spread          times of single steps, resets included, over their mean
    is_apart        whether slots step one after the other, each with a time of its own
    env_releases    the share of the environments' work in which other threads of the process go on
    rest_releases   the same of `rest`
    updates         seconds for which the reader had its last rounds, of `update_rows` steps each; empty: no time
    step_bytes      of one transition in a fragment's columns
    """

    slots: int
    env: Line
    waits: float
    rest: Line
    start_s: float = 0.0
    stages: Mapping[str, Line] = field(default_factory=dict)
    spread: Sequence[float] = (1.0,)
    is_apart: bool = True
    env_releases: float = 0.0
    rest_releases: float = 0.0
    updates: Sequence[float] = ()
    update_rows: int = 1
    step_bytes: float = 0.0

    @property
    def parts(self) -> Mapping[str, Line]:
        """Stages that `rest` is made of."""
        return self.stages or {"module": self.rest}

    def draws(self, slots: int, count: int, rng: np.random.Generator) -> NDArray[np.float64]:
        """Times of `count` steps of so many environments, drawn from those that were measured, f64[count]."""
        spread = np.asarray(self.spread, np.float64)
        if len(spread) == 1:
            return np.full(count, self.env(slots))
        drawn = rng.choice(spread, (count, slots if self.is_apart else 1)).mean(axis=1)
        return self.env(slots) * drawn

    def update_draws(self, rows: int) -> list[float]:
        """Times of the reader's rounds of so many steps; it takes as long for each step as it did."""
        return [seconds * rows / self.update_rows for seconds in self.updates] or [0.0]
