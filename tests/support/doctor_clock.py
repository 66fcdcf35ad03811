"""A clock that tests move, and looks of the stall doctor that follow it."""

import time

from rollflow.stream.observe.waits import Probe
from rollflow.stream.observe.watch import StallRules, StallWatch


class ToldClock:
    """Time that stands still until it is moved."""

    def __init__(self) -> None:
        self.time = 1000.0

    def __call__(self) -> float:
        return self.time


class Looking:
    """Looks at a run as the watcher does, on a clock of its own.

    spent    seconds since the first look
    """

    def __init__(self, probe: Probe | None, after: float = 5.0) -> None:
        assert probe is not None
        self.clock = ToldClock()
        self.rules = StallRules(after, clock=self.clock)
        self.watch = StallWatch(probe, self.rules, lambda: False)
        self.spent = 0.0
        self.watch.look()

    def for_s(self, seconds: float) -> list[str]:
        """All texts of so many seconds of looks."""
        texts: list[str] = []
        end = self.spent + seconds
        while self.spent < end - 1e-9:
            texts += self.once()
        return texts

    def until_told(self, most_s: float) -> str:
        """The first text, within so many seconds from now."""
        end = self.spent + most_s
        while self.spent < end:
            texts = self.once()
            if texts:
                return texts[0]
        raise AssertionError(f"nothing was told in {most_s:g} s: {self.watch.diagnose()}")

    def once(self) -> list[str]:
        time.sleep(0.0005)  # lets the run's threads have the interpreter: a look is no half second of theirs
        return self.once_inside()

    def once_inside(self) -> list[str]:
        """All texts of a look from within a call of the run."""
        self.clock.time += self.rules.look_s
        self.spent += self.rules.look_s
        return self.watch.look()[0]
