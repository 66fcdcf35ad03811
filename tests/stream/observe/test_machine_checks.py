"""Memory that rises steadily and a clock that was set are named, by figures that are made up."""

import itertools
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from doctor_clock import ToldClock

from rollflow.stream.observe.machine_checks import MachineChecks, memory_bound, process_memory
from rollflow.stream.observe.waits import Exit, Look, Sign, Wait
from rollflow.stream.observe.watch import StallRules, StallWatch

MB = 10**6
BOUND = 10_000 * MB  # a rise is 10 MB


def told(usage: Iterable[tuple[int, int]], seconds: float) -> list[Sign]:
    """The signs of looks twice a second, of a process that has so much, half minute by half minute."""
    figures = iter(usage)
    checks = MachineChecks(lambda: next(figures), BOUND)
    return [sign for look in range(round(2 * seconds)) for sign in checks.signs(look / 2)]


def test_memory_that_rises_in_each_of_ten_half_minutes_is_named() -> None:
    rising = ((MB * (500 + 12 * each), MB * (300 + 12 * each)) for each in itertools.count())
    assert told(rising, 299.0) == []
    rising = ((MB * (500 + 12 * each), MB * (300 + 12 * each)) for each in itertools.count())
    sign = told(rising, 301.0)[0]
    assert sign.kind == "memory rises"
    assert sign.text.startswith(
        "the memory of this process has risen in each of the last 10 half minutes, by 120 MB to 420 of 10,000: "
    )


@pytest.mark.parametrize(
    "usage",
    [
        [(MB * 5000, MB * 50 * each) for each in range(40)],
        [(MB * 50 * each, MB * 500) for each in range(40)],
        [(MB * 9 * each, MB * 9 * each) for each in range(40)],
        [(MB * 50 * (each - each % 9), MB * 50 * (each - each % 9)) for each in range(40)],
        [(0, 0)] * 40,
    ],
    ids=["room that fills up", "room that is asked for", "little", "now and then", "not known"],
)
def test_other_memory_is_not_named(usage: list[tuple[int, int]]) -> None:
    assert told(usage, 1100.0) == []


def test_a_process_that_keeps_more_has_more() -> None:
    before = process_memory()
    kept = np.ones(64 * MB, np.uint8)
    after = process_memory()
    assert kept.nbytes == 64 * MB
    assert min(b - a for a, b in zip(before, after, strict=True)) > 60 * MB
    assert process_memory()[1] < memory_bound()


@pytest.mark.parametrize(("by", "how"), [(3600.0, "forward by 3600.0 s"), (-5.0, "back by 5.0 s")])
def test_a_clock_that_was_set_is_named_once(by: float, how: str) -> None:
    times = {"wall": 1e9, "steady": 100.0}
    checks = MachineChecks(lambda: (0, 0), BOUND, lambda: times["wall"], lambda: times["steady"])
    texts = []
    for look in range(10):
        times["steady"] += 0.5
        times["wall"] += 0.5004 + (by if look == 5 else 0.0)  # it is a little fast, too
        texts += [sign.text for sign in checks.signs(look / 2)]
    assert [text.partition(":")[0] for text in texts] == [f"the system's clock was set {how}"]


def test_the_doctor_logs_what_the_machine_has() -> None:
    class Flows:
        def look(self) -> Look:
            return Look((Exit("reader", 1, False),), {"reader": Wait("reader", "works", "works")}, noun="fragment")

        def signs(self) -> Any:
            return ()

    clock = ToldClock()
    rising = ((MB * 100 * each, MB * 100 * each) for each in itertools.count())
    watch = StallWatch(Flows(), StallRules(clock=clock), lambda: False, MachineChecks(lambda: next(rising), BOUND))
    texts = []
    for _ in range(700):
        clock.time += 0.5
        texts += watch.look()[0]
    assert [text.partition(",")[0] for text in texts] == [
        "the memory of this process has risen in each of the last 10 half minutes"
    ]
    [note] = watch.diagnose().notes
    assert note.startswith("the memory of this process has risen")
