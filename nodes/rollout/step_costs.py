"""Costs that placements and simulations are reckoned from: of the parts of a vector step, and of a machine."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from rollflow.stream.graph.report import CALLER

Line = Callable[[int], float]  # rows -> seconds


@dataclass(frozen=True, slots=True)
class Machine:
    """Cores, and what handing over takes, in seconds of work.

    hand_over    of a lane, to another thread or process and back, in the ring's thread; half as long in the other one
    wake         from the hand-over to the beginning of what is to be done
    fragment     of a fragment that comes from another process, or from a thread that goes on meanwhile
    to_reader    as `fragment`, of an inline rollout that goes on in a thread; None: the same
    beside       times as long as work takes while all other cores are at work for the rollout, too
    to_process   as `hand_over`, twice `wake`, where a lane goes to a worker process; None: the same
    in_worker    times as long as the work of a vector step takes in a worker of whole rollouts
    """

    cores: int = 1
    hand_over: float = 60e-6
    wake: float = 30e-6
    fragment: float = 500e-6
    beside: float = 1.0
    to_process: float | None = None
    to_reader: float | None = None
    in_worker: float = 1.0

    def slow_down(self, others: int) -> float:
        """Times as long as work takes beside work on so many other cores."""
        return 1 + (self.beside - 1) * others / max(1, self.cores - 1)


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
    update_s        float: seconds that the reader takes for a round of `update_rows` steps, in the mean
    update_releases    the share of that in which other threads go on: torch and numpy let the interpreter go
    step_bytes      of one transition in a fragment's columns
    machine         that they were measured on
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
    update_s: float = 0.0
    update_rows: int = 1
    update_releases: float = 1.0
    step_bytes: float = 0.0
    machine: Machine = field(default_factory=Machine)

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
        times: NDArray[np.float64] = self.env(slots) * drawn
        return times

    def update(self, rows: int) -> float:
        """Seconds of the reader's round of so many steps: it takes as long for each step as it did."""
        return self.update_s * rows / self.update_rows

    def on(self, cores: int, where: str) -> Machine:
        """A machine like the one that they were measured on, with so many cores, as it is for a place."""
        in_worker = self.machine.in_worker if where == "rollouts" else 1.0
        machine, to_process = replace(self.machine, cores=cores, in_worker=in_worker), self.machine.to_process
        if where == "inline" and machine.to_reader is not None:
            return replace(machine, fragment=machine.to_reader)
        if where != "processes" or to_process is None:
            return machine
        return replace(machine, hand_over=to_process, wake=to_process / 2)

    def halved(self, stage: str) -> "StepCosts":
        """The costs with one stage, or the reader, that takes half the time."""
        if stage == CALLER:
            return replace(self, update_s=self.update_s / 2)
        if stage == "env":
            return replace(self, env=scaled(self.env, 0.5))
        return replace(self, stages={**self.parts, stage: scaled(self.parts[stage], 0.5)})


def scaled(line: Line, factor: float) -> Line:
    """A line that is so many times as high."""
    return lambda count: factor * line(count)
