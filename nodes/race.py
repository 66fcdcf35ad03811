"""Places that are expected to be about as fast, tried for a moment each: what they make is what counts."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from statistics import median
from typing import Any, NamedTuple

from rollflow.nodes.choice import Asked, Choice

_ROUNDS, _ROUND_S = 3, 0.2
_FRAGMENT_S = 0.05  # what a fragment is to take at most
_SLOW_S = 0.1  # steps that take longer are not tried: what is expected of them is true enough


class Race(NamedTuple):
    """What was seen.

    choices    those that ran, with the steps a second that they made
    failed     place -> why nothing could be made there
    """

    choices: list[Choice]
    failed: dict[str, str]


def is_worth_while(choices: Sequence[Choice], slots: int) -> bool:
    """Whether there are several, and a vector step is short enough to make some of them in a moment."""
    return len(choices) > 1 and all(_turn_s(choice, slots) < _SLOW_S for choice in choices)


def race(choices: Sequence[Choice], make: Callable[..., Any], slots: int, asked: Asked) -> Race:
    """Run each of them in turn, several times, and take the median.

    make    (where, lanes, workers, fragment_length) -> a Rollout of all slots, run as it is to be run
    """
    runners: list[_Runner] = []
    failed: dict[str, str] = {}
    with ExitStack() as opened:
        for choice in choices:
            with _failing(choice, failed):
                length = max(1, min(asked.fragment_length, int(_FRAGMENT_S / _turn_s(choice, slots))))
                rollout = make(where=choice.where, lanes=choice.lanes, workers=choice.workers, fragment_length=length)
                runners.append(_Runner(choice, opened.enter_context(rollout), asked.prefetch))
        for runner in _ROUNDS * runners:
            if runner.choice.where not in failed:
                with _failing(runner.choice, failed):
                    runner.run()
    return Race([runner.found() for runner in runners if runner.choice.where not in failed], failed)


@contextmanager
def _failing(choice: Choice, failed: dict[str, str]) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # whatever an environment, a piece or a module may raise there
        failed[choice.where] = f"tried, it raised {type(error).__name__}: {error}"


class _Runner:
    """A rollout that makes fragments while they are taken, as many more as it may, and then stands still."""

    def __init__(self, choice: Choice, rollout: Any, prefetch: int) -> None:
        self.choice = choice
        self._rates: list[float] = []
        self._fragments = iter(rollout.fragments())
        self._waiting = rollout.environments.num_lanes * (prefetch + 1)
        next(self._fragments)  # starts whatever there is to be started

    def run(self) -> None:
        for _ in range(self._waiting):
            next(self._fragments)  # made while others ran
        steps, fragments, taken, began = 0, 0, 0.0, time.perf_counter()
        while taken < _ROUND_S:
            steps += next(self._fragments).num_steps
            fragments += 1
            taken = time.perf_counter() - began
        self._rates.append(steps / taken)
        time.sleep(self._waiting * taken / fragments)  # it runs ahead once more

    def found(self) -> Choice:
        """The same with the steps a second that it made."""
        return replace(self.choice, steps_per_s=median(self._rates))


def _turn_s(choice: Choice, slots: int) -> float:
    """Seconds that a vector step of all slots is expected to take."""
    return slots / choice.steps_per_s
