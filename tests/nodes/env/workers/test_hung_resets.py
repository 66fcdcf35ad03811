"""Resets after ended episodes have a time of their own, wherever environments step. The clock is the test's own."""

import select
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from held_envs import LONGEST_S, Held, let_go, times_made
from numbered_module import NumberedModule

from rollflow import Rollout, Timeouts
from rollflow.stream import EnvError

Forward = Callable[[float], None]

TICK_S = 0.25

PLACES = ["threads", "processes", "rollouts"]


@pytest.fixture
def held_in_second_reset(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Makes a node whose only lane is at the end of its first episode, in a reset that is held."""
    nodes: list[Any] = []

    def held(env: Any = None, **options: Any) -> Any:
        given: dict[str, Any] = {"module": NumberedModule(), "fragment_length": 8, "seed": 0, **options}
        node: Any = Rollout(env or partial(held_env, tmp_path), **given).environments
        nodes.append(node)
        lane = next(node.start(), None) or come_back(node)
        is_held = tmp_path / "held 0 0"
        while lane is not None:
            ask(node, lane)
            lane = come_back(node, unless=is_held)
        return node

    yield held
    let_go(tmp_path, 0)
    for node in nodes:
        node.close()


def held_env(folder: Path) -> Held:
    return Held(0, folder, resets=[1], lengths=(2, 2))


def ask(node: Any, lane: Any) -> None:
    """Have a lane step, or make a fragment."""
    if hasattr(lane, "batch"):
        lane.actions = np.zeros(1, np.int64)
        lane.batch = {"actions": lane.actions}
        lane.record_actions(lane.batch)
    node(lane)


def come_back(node: Any, unless: Path | None = None) -> Any:
    """The lane, as soon as it has come back; None once a file is there instead."""
    until = time.monotonic() + LONGEST_S
    while not (unless is not None and unless.exists()):
        assert time.monotonic() < until
        select.select([node], [], [], 0.02)
        for lane in node.completed():
            return lane
    return None


class GivenUp(NamedTuple):
    seconds: float
    reason: str


def given_up_after(node: Any, forward: Forward, caplog: pytest.LogCaptureFixture) -> GivenUp:
    """Return the seconds until the lane is given up, and the message."""
    for ticks in range(1, 100):
        forward(TICK_S)
        try:
            list(node.completed())
        except EnvError as error:
            return GivenUp(ticks * TICK_S, str(error))
        if "lane 0 is lost" in caplog.text:
            return GivenUp(ticks * TICK_S, caplog.text)
    raise AssertionError("it was not given up")


@pytest.mark.parametrize("where", PLACES)
def test_a_reset_that_takes_longer_than_a_step_may_is_waited_for(
    where: str, tmp_path: Path, forward: Forward, held_in_second_reset: Any
) -> None:
    node = held_in_second_reset(where=where, timeouts=Timeouts(step=1.0, reset=5.0))
    for _ in range(4):
        forward(1.2)
        assert list(node.completed()) == []
    let_go(tmp_path, 0)
    assert come_back(node) is not None
    assert (node.lost_steps, times_made(tmp_path, 0)) == (0, 1)


@pytest.mark.parametrize("step_timeout", [None, 1.0, 1000.0])
@pytest.mark.parametrize("where", PLACES)
def test_a_reset_that_hangs_is_given_up_after_the_time_of_a_reset(
    where: str,
    step_timeout: float | None,
    forward: Forward,
    held_in_second_reset: Any,
    caplog: pytest.LogCaptureFixture,
) -> None:
    node = held_in_second_reset(where=where, timeouts=Timeouts(step=step_timeout, reset=5.0))
    told = given_up_after(node, forward, caplog)
    assert "no answer to a reset within 5.0 s" in told.reason
    # It may have been seen for the first time only when the shorter of both times was over.
    assert 5.0 <= told.seconds <= 5.0 + min(step_timeout or 5.0, 5.0) + TICK_S
    # A step was made, in an unfinished fragment, and another was under way.
    assert node.lost_steps == {"threads": 0, "processes": 1, "rollouts": 2}[where]


def test_where_a_reset_can_not_be_told_from_its_step_both_times_are_given(
    tmp_path: Path, forward: Forward, held_in_second_reset: Any, caplog: pytest.LogCaptureFixture
) -> None:
    env = SyncVectorEnv([partial(held_env, tmp_path)], autoreset_mode=AutoresetMode.SAME_STEP, copy=False)
    node = held_in_second_reset(env, where="threads", timeouts=Timeouts(step=1.0, reset=5.0))
    told = given_up_after(node, forward, caplog)
    assert "no answer to a step within 6.0 s, its timeouts of step and reset together" in told.reason
    assert 6.0 <= told.seconds <= 6.0 + TICK_S
    let_go(tmp_path, 0)
    env.close()
