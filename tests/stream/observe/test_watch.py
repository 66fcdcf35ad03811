"""The rules of the stall doctor, on looks that are made up and a clock that stands still."""

import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from doctor_clock import Looking, ToldClock
from hypothesis import given, strategies as st

from rollflow.stream.data.system import memory_bound, process_memory
from rollflow.stream.observe.stacks import StackFrame
from rollflow.stream.observe.waits import CALLER, Exit, Look, Sign, Wait, by_name, is_closed, way_from
from rollflow.stream.observe.watch import LongCalls, StallRules, StallWatch


def reader(items: int = 0, *, waits: bool = True, on: tuple[str, ...] = ("env",)) -> Wait:
    kind: Any = "waits" if waits else "works"
    return Wait(CALLER, kind, "waits", on=on if waits else (), mark=(items, waits), calls=items)


class Told:
    """A probe that tells what it was told."""

    def __init__(self, *waits: Wait, items: int = 0, is_waiting: bool = True) -> None:
        self.items, self.is_waiting, self.is_running = items, is_waiting, True
        self.waits = waits
        self.notes: tuple[Sign, ...] = ()

    def look(self) -> Look | None:
        if not self.is_running:
            return None
        waits = by_name([reader(self.items, waits=self.is_waiting), *self.waits])
        return Look((Exit(CALLER, self.items, self.is_waiting),), waits, noun="fragment")

    def signs(self) -> tuple[Sign, ...]:
        return self.notes


STEP = Wait("env", "call", "is in step()", mark=1, calls=500, where="lane 2", remedy="have it return")


def on_lane(wait: Wait) -> tuple[Wait, Wait]:
    return Wait("env", "waits", "waits", on=(wait.name,), is_part=True), wait


def test_a_step_that_lasts_is_told_once_it_has_lasted_for_stall_after() -> None:
    looking = Looking(Told(*on_lane(STEP)))
    assert looking.for_s(4.5) == []
    assert looking.until_told(5.5).splitlines() == [
        "no fragment for 5.0 s: env (lane 2) is in step() since 5.0 s; caller waits for it",
        "do: have it return; see docs/how_to/find_what_holds_back.md#when-it-stands-still",
    ]


def test_a_stack_begins_with_the_users_own_code_and_ends_in_the_call_it_is_in(tmp_path: Any) -> None:
    source = tmp_path / "sim.py"
    source.write_text("import threading\nlock.acquire()\n")
    own = StackFrame(str(source), 2, "Sim.step"), StackFrame(__file__, 1, "main")
    stack = (StackFrame(threading.__file__, 10, "Lock.acquire"), *own)
    text = Looking(Told(*on_lane(replace(STEP, stack=lambda: stack)))).until_told(9.0)
    assert text.splitlines()[1:4] == [
        f"  at {source}:2 in Sim.step: lock.acquire()",
        f'  by {__file__}:1 in main: """The rules of the stall doctor, on looks that are made up and a clock that '
        'stands still."""',
        f"  which is now in {StackFrame(threading.__file__, 10, 'Lock.acquire')}",
    ]


@pytest.mark.slow
def test_it_is_told_again_after_one_five_and_thirty_minutes() -> None:
    looking = Looking(Told(*on_lane(STEP)))
    looking.until_told(5.5)
    times = [looking.spent for _ in range(4 * 3600) if looking.once()]
    assert [round(time / 30) * 30 for time in times] == [60, 300, 1800, 3600, 5400, 7200][: len(times)]
    assert len(times) >= 4


def test_it_does_not_go_on_while_the_reader_still_waits_for_another_party() -> None:
    probe = Told(*on_lane(STEP))
    looking = Looking(probe)
    looking.until_told(5.5)
    probe.waits = on_lane(replace(STEP, mark=2))  # another step has begun, and nothing has left
    assert looking.for_s(2.0) == []
    probe.items += 1
    assert looking.once() == [f"it goes on: it stood still for {looking.spent:.1f} s"]
    assert looking.for_s(3.0) == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["holds back", "works"])
def test_who_holds_back_on_purpose_is_no_stall(kind: Any) -> None:
    trainer = Wait("the trainer", kind, "has what it wants")
    assert Looking(Told(*on_lane(trainer))).for_s(600.0) == []


def test_steps_that_get_on_are_no_stall_though_no_fragment_comes() -> None:
    probe = Told()
    looking = Looking(probe)
    for number in range(200):
        probe.waits = on_lane(replace(STEP, mark=number // 4))  # two seconds each
        assert looking.once() == []


def test_a_call_may_take_ten_times_what_all_but_one_in_a_hundred_took() -> None:
    probe = Told()
    looking = Looking(probe)
    for number in range(40):
        probe.waits = on_lane(replace(STEP, mark=number, calls=number))
        assert looking.for_s(2.0) == []
        probe.items += 1
    probe.waits = on_lane(replace(STEP, mark="hangs", calls=40))
    begun = looking.spent
    looking.until_told(60.0)
    assert 19.0 <= looking.spent - begun <= 26.0  # of 2.0 s, as far as looks each half a second can tell


@pytest.mark.parametrize(("limit", "seconds"), [("reset", 30.0), ("compile", 300.0), (None, 30.0)])
def test_first_calls_and_compilation_have_their_own_time(limit: Any, seconds: float) -> None:
    looking = Looking(Told(*on_lane(replace(STEP, calls=0, limit=limit))))
    looking.until_told(400.0)
    assert looking.spent == pytest.approx(seconds, abs=1.0)


def test_a_watcher_that_comes_late_begins_anew() -> None:
    looking = Looking(Told(*on_lane(STEP)))
    looking.for_s(4.5)
    looking.clock.time += 3600.0  # suspended
    assert looking.for_s(4.5) == []
    looking.until_told(1.5)


def test_a_stack_that_takes_its_time_does_not_make_the_next_look_late() -> None:
    def stack() -> tuple[StackFrame, ...]:
        looking.clock.time += 1.6
        return (StackFrame("train.py", 3, "step"),)

    looking = Looking(Told(*on_lane(replace(STEP, stack=stack))))
    assert "train.py:3 in step" in looking.until_told(5.5)
    assert looking.for_s(20.0) == []  # it does not go on


def test_under_a_debugger_it_begins_anew() -> None:
    clock, debugged = ToldClock(), [True]
    watch = StallWatch(Told(*on_lane(STEP)), StallRules(5.0, clock=clock), lambda: debugged[0])
    told = []
    for number in range(60):
        clock.time += 0.5
        debugged[0] = number < 30
        told.append(bool(watch.look()[0]))
    assert told.index(True) >= 30 + 7


def test_the_final_blocker_is_followed_to_and_a_closed_way_is_a_deadlock() -> None:
    closed = [Wait(a, "waits", f"waits for room in {a} → {b}", on=(b,)) for a, b in ("ab", "ba")]
    waits = by_name([reader(on=("a",)), *closed])
    way = way_from(CALLER, waits)
    assert is_closed(way)
    assert [wait.party for wait in way] == ["a", "b"]
    waits["b"] = replace(waits["b"], on=("a", "c"))
    waits["c"] = Wait("c", "call", "is in its call")
    open_way = way_from(CALLER, waits)
    assert [wait.party for wait in open_way] == [CALLER, "a", "b", "c"]


def test_a_stall_that_ends_with_the_run_is_over() -> None:
    probe = Told(*on_lane(STEP))
    looking = Looking(probe)
    looking.until_told(6.0)
    probe.is_running = False
    assert looking.once() == [f"it has ended: it stood still for {looking.spent:.1f} s"]
    assert looking.for_s(60.0) == []
    assert str(looking.watch.diagnose()) == "it is not running"


def test_a_silent_fault_is_told_once_and_again_where_it_was_gone_for_a_minute() -> None:
    probe = Told()
    looking = Looking(probe)

    def told_in(seconds: float, *notes: Sign) -> list[str]:
        probe.notes = notes
        probe.items += 1  # it flows
        return looking.for_s(seconds)

    fault = Sign("obs", "observations are NaN")
    assert told_in(2.0, fault) == ["observations are NaN"]
    for _ in range(5):
        assert told_in(2.0) == told_in(2.0, fault) == []
    assert told_in(2.0, fault, Sign("lag", "too old")) == ["too old"]
    for _ in range(30):
        assert told_in(2.0) == []
    assert told_in(2.0, fault) == ["observations are NaN"]


@given(st.lists(st.floats(0.5, 100.0), min_size=1, max_size=50), st.integers(0, 10_000))
def test_the_limit_is_never_below_stall_after_nor_above_ten_of_the_longest(seconds: list[float], calls: int) -> None:
    times, wait = LongCalls(), replace(STEP, calls=calls + 10)
    for each in seconds:
        times.add(wait, each)
    limit = times.limit(wait, 5.0)
    assert 5.0 <= limit <= max(5.0, 10.0 * max(seconds))
    assert times.limit(replace(wait, limit="reset"), 5.0) == max(5.0, 10.0 * max(seconds))
    ordered = sorted(seconds, reverse=True)
    left_out = max(wait.calls, len(seconds)) // 100
    p99 = ordered[left_out] if left_out < len(ordered) else 0.0
    assert limit == max(5.0, 10.0 * p99)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"after": 0}, "stall_after is 0, expected a number of seconds above 0, or None"),
        ({"after": True}, "stall_after is True"),
        ({"after": "5"}, "stall_after is '5'"),
        ({"on_stall": "kill"}, "on_stall is 'kill', expected 'log' or 'raise'"),
        ({"after": None, "on_stall": "raise"}, "expected a number of seconds"),
    ],
)
def test_rules_that_make_no_sense_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        StallRules(**options)


def test_a_process_that_keeps_more_has_more() -> None:
    before = process_memory()
    kept = np.ones(256 * 10**6, np.uint8)
    after = process_memory()
    assert kept.nbytes == 256 * 10**6
    assert min(b - a for a, b in zip(before, after, strict=True)) > 200 * 10**6  # others may give some back meanwhile
    assert process_memory()[1] < memory_bound()
