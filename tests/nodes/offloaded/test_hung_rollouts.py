"""Workers that do whole rollouts, and are taken for hung when they are, and only then. The clock is the test's own."""

import os
import re
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from held_envs import LONGEST_S, Held, await_file, await_held, let_go, times_made
from numbered_module import NumberedEnv, NumberedModule
from piece_forms import OneByOne

from rollflow import Rollout, Timeouts
from rollflow.stream import EnvError

pytestmark = [pytest.mark.slow, pytest.mark.wait_times(first_pause_s=0.0)]

Forward = Callable[[float], None]


@pytest.fixture
def started() -> Iterator[Callable[..., Any]]:
    """Starts nodes that do whole rollouts, each in one process: the node, and its lanes."""
    nodes: list[Any] = []

    def start(makers: Any, **options: Any) -> Any:
        given: dict[str, Any] = {"workers": 1, "fragment_length": 5, "seed": 0, "module": NumberedModule(), **options}
        nodes.append(Rollout(makers, where="rollouts", **given).environments)
        return nodes[-1], *nodes[-1].start()

    yield start
    for node in nodes:
        node.close()


def come_back(node: Any, count: int = 1, until: Callable[[], bool] = lambda: True) -> list[Any]:
    """The lanes that come back until there are so many and something holds."""
    lanes: list[Any] = []
    latest = time.monotonic() + LONGEST_S
    while len(lanes) < count or not until():
        assert time.monotonic() < latest
        select.select([node], [], [], 0.05)
        lanes += node.completed()
    return lanes


def test_a_steady_worker_is_not_taken_for_hung(tmp_path: Path, forward: Forward, started: Any) -> None:
    node, lane = started(partial(Held, 0, tmp_path, steps=[3, 8, 13]), timeouts=Timeouts(step=1.0, reset=1.0))
    for times in range(3):
        node(lane)
        await_held(tmp_path, 0, times)
        forward(1.5)
        assert list(node.completed()) == []
        let_go(tmp_path, 0, times)
        assert come_back(node) == [lane]
        assert lane.fragment.num_rows == 5
    assert node.lost_steps == 0


def test_one_that_stands_still_is(tmp_path: Path, forward: Forward, started: Any) -> None:
    node, lane = started(partial(Held, 0, tmp_path, steps=[8]), timeouts=Timeouts(step=1.0))
    node(lane)
    come_back(node)
    node(lane)
    await_held(tmp_path, 0)
    forward(1.5)
    list(node.completed())
    assert node.lost_steps == 0  # it has made steps in this time
    forward(1.5)
    assert list(node.completed()) == []
    assert node.lost_steps == 3 + 1  # of its unfinished fragment, and the one under way
    assert come_back(node) == [lane]
    assert (lane.fragment.sequence, lane.fragment.num_rows, node.lost_steps) == (1, 5, 4)


def test_steps_that_are_made_while_a_turn_is_still_handed_over_count(
    tmp_path: Path, forward: Forward, started: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    node, lane = started(partial(Held, 0, tmp_path, steps=[8]), timeouts=Timeouts(step=1.0))
    node(lane)
    come_back(node)
    link = node.remotes[0]
    hand_over = link.step

    def hand_over_slowly() -> None:
        hand_over()
        await_held(tmp_path, 0)

    monkeypatch.setattr(link, "step", hand_over_slowly)
    node(lane)
    forward(1.5)
    assert list(node.completed()) == []
    let_go(tmp_path, 0)
    assert come_back(node) == [lane]
    assert node.lost_steps == 0


@pytest.mark.parametrize("reset_timeout", [None, 100.0])
def test_one_that_hangs_in_its_first_step_has_the_time_of_a_step(
    tmp_path: Path, forward: Forward, started: Any, reset_timeout: float | None
) -> None:
    node, lane = started(partial(Held, 0, tmp_path, steps=[0]), timeouts=Timeouts(step=1.0, reset=reset_timeout))
    node(lane)
    await_held(tmp_path, 0)
    list(node.completed())
    forward(0.5)
    list(node.completed())
    assert node.lost_steps == 0
    forward(1.0)
    list(node.completed())
    assert node.lost_steps == 1


def test_one_that_hangs_in_its_reset_has_the_time_of_a_reset(tmp_path: Path, forward: Forward, started: Any) -> None:
    node, lane = started(partial(Held, 0, tmp_path, resets=[0]), timeouts=Timeouts(step=1.0, reset=5.0))
    node(lane)
    await_held(tmp_path, 0)
    forward(4.0)
    list(node.completed())
    assert times_made(tmp_path, 0) == 1
    forward(2.0)
    assert come_back(node) == [lane]
    assert (times_made(tmp_path, 0), node.lost_steps) == (2, 0)


@pytest.mark.wait_times(first_pause_s=0.0)
def test_one_killed_between_turns_is_told_of_by_the_next(started: Any, caplog: pytest.LogCaptureFixture) -> None:
    node, lane = started(partial(NumberedEnv, 0, lengths=(100, 100)))
    node(lane)
    come_back(node)
    first = lane.fragment
    os.kill(node._workers[0].process.pid, signal.SIGKILL)
    come_back(node, 0, until=lambda: "lane 0 is lost" in caplog.text)
    node(lane)
    come_back(node)
    [loss] = lane.fragment.losses
    assert (loss.row, loss.slots.tolist(), loss.cut.tolist()) == (lane.fragment.first_row, [0], [])
    assert "was killed by SIGKILL" in loss.reason
    assert lane.fragment.chunk(0).id_ != first.chunk(0).id_
    assert node.lost_steps == 0  # none was under way


def test_one_that_is_given_up_and_then_killed_comes_back_once(started: Any) -> None:
    node, lane = started(partial(NumberedEnv, 0, lengths=(100, 100)))
    node(lane)
    come_back(node)
    node.hasten()
    node(lane)
    assert node.in_flight == 1
    assert list(node._process_lost(node._workers[0])) == []
    assert list(node.completed()) == [lane]
    assert (node.in_flight, lane.is_set_aside) == (0, True)


class HangsInForward(NumberedModule):
    """Takes a lock that it has taken already, as nothing releases it."""

    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        lock = threading.Lock()
        lock.acquire()
        (self.folder / "hangs").touch()
        lock.acquire()
        return super()._forward(batch, **kwargs)


def test_its_place_is_named(tmp_path: Path, forward: Forward, started: Any, caplog: pytest.LogCaptureFixture) -> None:
    module = HangsInForward()
    module.folder = tmp_path
    node, lane = started(partial(NumberedEnv, 0), num_envs=1, module=module, timeouts=Timeouts(step=1.0, reset=1.0))
    node(lane)
    await_file(tmp_path / "hangs")
    forward(1.5)
    list(node.completed())
    forward(1.5)
    list(node.completed())
    assert "it has been in node 'module' for" in caplog.text


def test_lanes_that_share_a_worker_that_hangs_say_so(
    tmp_path: Path, forward: Forward, started: Any, caplog: pytest.LogCaptureFixture
) -> None:
    envs = [partial(Held, slot, tmp_path, steps=[1] if slot else []) for slot in range(2)]
    node, *lanes = started(envs, lanes=2, timeouts=Timeouts(step=1.0))
    for lane in lanes:
        node(lane)
    await_held(tmp_path, 1)
    assert come_back(node) == lanes[:1]  # nothing is awaited of it any more: it can't be the one that is late
    for _ in range(2):
        forward(1.5)
        list(node.completed())
    first, second = (
        next(record.message for record in caplog.records if record.message.startswith(f"lane {lane} is lost"))
        for lane in (0, 1)
    )
    shared = r"no answer to a step .*; lanes 0, 1 share worker process \d+, which is killed"
    assert re.search(f": lane 1 gave {shared}", first)
    assert re.search(f"made again in [0-9.]+ s: {shared}", second)  # without saying once more which lane it is


def locked(env: Any) -> OneByOne:
    """A piece that can't be pickled."""
    piece = OneByOne()
    piece.lock = threading.Lock()
    return piece


def test_what_can_not_be_pickled_is_named() -> None:
    rollout = Rollout(partial(NumberedEnv, 0), where="rollouts", workers=1, env_to_module_connector=locked)
    told = "env_to_module, piece 'OneByOne' can't be handed to a worker process: "
    with rollout, pytest.raises(EnvError, match=told):
        next(iter(rollout.fragments()))
