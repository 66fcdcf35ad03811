"""Rollouts that stand still: what they hang in, and those that nobody takes anything from."""

import inspect
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
from held_envs import await_that

from rollflow import Watch
from rollflow.stream import Report
from rollflow.stream.graph import inline_run

OPTIONS: Any = {"fragment_length": 8, "num_fragments": 1, "seed": 0, "watch": Watch(stall_after=None)}


def line_of(function: Any, text: str) -> str:
    """`file:line` of the line of a function that has a text."""
    lines, first = inspect.getsourcelines(function)
    return f"{inspect.getsourcefile(function)}:{first + next(i for i, line in enumerate(lines) if text in line)}"


def being_read(rollout: Any, let_all_go: Callable[[], object]) -> AbstractContextManager[None]:
    """Have another thread read the rollout, which goes on when all is let go."""

    def read() -> None:
        with rollout:
            for _ in rollout.batches():
                pass

    return in_thread(read, let_all_go)


@contextmanager
def in_thread(read: Callable[[], object], let_all_go: Callable[[], object]) -> Iterator[None]:
    """Have another thread read, which comes to its end when all is let go."""
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read)
        try:
            yield
        finally:
            let_all_go()
        reading.result()


def await_blocker(rollout: Any, party: str, calls: int = 0) -> None:
    """Wait until the rollout is at what it will hang in, and it is known that it has done so often before."""

    def is_there() -> bool:
        blocker = rollout.diagnose().blocker
        return blocker is not None and blocker.party == party and blocker.calls >= calls

    await_that(is_there, rollout.diagnose)


def await_bottleneck(report: Callable[[], Report], name: str) -> Report:
    """The first report that says that a stage holds all others back."""
    told: list[Report] = []

    def is_told() -> bool:
        told.append(report())
        return told[-1].bottleneck == name

    await_that(is_told, lambda: told[-1])
    return told[-1]


def await_end_of(rollout: Any, lane: int) -> None:
    """Wait until a lane has made its fragment, after which it is not waited for."""
    steps = OPTIONS["fragment_length"]
    await_that(lambda: rollout.environments.lanes[lane].vector_steps >= steps, rollout.diagnose)


def stalling(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Is set once a run waits though no environment is under way: it can't go on by itself."""
    can_not_go_on, wait = threading.Event(), inline_run.wait_for_any

    def waited(nodes: Any, bell: Any) -> None:
        if not any(node.in_flight for node, _ in nodes):
            can_not_go_on.set()
        wait(nodes, bell)

    monkeypatch.setattr(inline_run, "wait_for_any", waited)
    return can_not_go_on
