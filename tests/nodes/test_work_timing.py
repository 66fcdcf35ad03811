"""Times of work: processes that work beside a part, and what is left of them."""

import os
import time
from pathlib import Path

import pytest

from rollflow.nodes import work_timing
from rollflow.nodes.work_timing import in_turns, slow_down

pytestmark = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="who works where can't be fixed here")


class Spins:
    """A millisecond of work, and whose children were there at each call."""

    steps = 1

    def __init__(self) -> None:
        self.children: list[str] = []

    def __call__(self) -> None:
        self.children.append(Path("/proc/thread-self/children").read_text())
        until = time.thread_time() + 1e-3
        while time.thread_time() < until:
            pass


def test_work_is_timed_alone_and_beside_others_and_none_of_them_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work_timing, "_PAIRS", 1)
    part, cores = Spins(), os.sched_getaffinity(0)
    before = Path("/proc/thread-self/children").read_text()
    assert slow_down(part) >= 1.0
    assert all(len(each.split()) - len(before.split()) == len(cores) - 1 for each in part.children)
    assert Path("/proc/thread-self/children").read_text() == before
    assert os.sched_getaffinity(0) == cores


def test_an_error_in_the_part_leaves_no_process_and_all_cores() -> None:
    def fails() -> None:
        raise OSError("broken")

    fails.steps = 1  # type: ignore[attr-defined]
    cores, before = os.sched_getaffinity(0), Path("/proc/thread-self/children").read_text()
    with pytest.raises(OSError, match="broken"):
        slow_down(fails)  # type: ignore[arg-type]
    assert Path("/proc/thread-self/children").read_text() == before
    assert os.sched_getaffinity(0) == cores


def test_on_one_core_there_is_nobody_beside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    part = Spins()
    assert slow_down(part) == 1.0
    assert part.children == []


def test_parts_are_timed_in_turns() -> None:
    first, second = in_turns([Spins(), Spins()])
    assert first.least > 0
    assert second.least > 0
