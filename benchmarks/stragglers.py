"""Steps that take lognormal time, 5 ms in the mean: beside what is possible where nobody waits for anybody.

A line of its own has a pool of 64 that answers for 16 at a time, with one environment that is 100 times as slow: the
steps of the others, beside those of the same where none is slow.

In the same run stands what somebody would write by hand: a thread for each environment, and one for the forward passes.
Lines of their own have its steps beside what is possible, ours beside its, the processor seconds of a million steps
beside its, and the memory of all processes together; where less is better, `ratio` is what is allowed over what was
measured.

    python -m benchmarks.stragglers [--quick]
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import psutil

from benchmarks.command import run
from benchmarks.envs import SleepEnv, SleepPool
from benchmarks.pairs import Record, Sizes, in_turns, record, steps_per_s, within
from benchmarks.policies import Mlp
from benchmarks.threads import Threads, running
from rollflow import Forward, Fragment, Rollout

SLOTS, FRAGMENT_LENGTH = 16, 32
ALLOWED_MB = 400  # of all processes
POSSIBLE = SLOTS / SleepEnv.MEAN_S
BY_HAND = "threads by hand"

Take = Callable[[], int]  # waits for a batch; its steps


class Measured(NamedTuple):
    """Steps per second, processor seconds of a million steps, megabytes."""

    rate: float
    cpu: float
    memory: float


def measure(sizes: Sizes, places: tuple[str, ...] = ("threads", "processes")) -> list[Record]:
    """A line for a pool with a slow environment, one for threads by hand, and four for threads and processes each."""
    seconds = max(1.0, sizes.seconds)
    ways: dict[str, Any] = {BY_HAND: _by_hand} | {where: partial(_ours, where) for where in places}
    found: dict[str, list[Measured]] = {way: [] for way in ways}
    for number in range(sizes.rounds):
        for way in list(ways)[:: -1 if number % 2 else 1]:
            with ways[way]() as take:
                found[way].append(_measured(take, seconds))
    hand = found.pop(BY_HAND)
    lines = [_slow_one(sizes), _beside_possible(BY_HAND, BY_HAND, hand, aim=None)]
    for where, mine in found.items():
        lines += [_beside_possible("steps of lognormal time", where, mine, aim=0.95), *_beside_hand(where, mine, hand)]
    return lines


def processor_seconds() -> float:
    """Of this process and all below it."""
    me = psutil.Process()
    times = [process.cpu_times() for process in (me, *me.children(recursive=True))]
    return float(sum(each.user + each.system for each in times))


def memory_mb() -> float:
    """Of this process and all below it, memory that they share counted once."""
    me, total = psutil.Process(os.getpid()), 0
    for process in (me, *me.children(recursive=True)):
        lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()
        total += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total / 1024


@contextmanager
def _ours(where: Any) -> Iterator[Take]:
    options: Any = {
        "num_envs": SLOTS,
        "forward": Forward(max_batch=SLOTS, flat=True),
        "where": where,
        "prefetch": 1,
        "seed": 0,
    }
    if where == "processes":
        options["workers"] = SLOTS  # else as many as cores, in each of which environments sleep in turn
    with Rollout(SleepEnv, module=Mlp(), fragment_length=FRAGMENT_LENGTH, **options) as rollout:
        batches = iter(rollout.batches())
        yield lambda: len(next(batches)["obs"])


@contextmanager
def _by_hand() -> Iterator[Take]:
    with running(Threads(SleepEnv, Mlp(), SLOTS, FRAGMENT_LENGTH)) as threads:
        yield threads.take


def _slow_one(sizes: Sizes) -> Record:
    slow, even = (partial(_of_others, factor, max(1.0, sizes.seconds)) for factor in (100, 1))
    return record("one slow environment of 64", 64, in_turns(slow, even, sizes.rounds), aim=0.98)


def _of_others(factor: float, seconds: float) -> float:
    """Steps per second of 63 environments beside one whose steps take `factor` times as long."""
    pool = SleepPool([SleepEnv.MEAN_S * factor] + [SleepEnv.MEAN_S] * 63, 16)
    with Rollout(pool, module=Mlp(), fragment_length=FRAGMENT_LENGTH, prefetch=1) as rollout:
        fragments = iter(rollout.fragments())
        next(fragments)
        return steps_per_s(lambda: _of_all_but_first(next(fragments)), seconds)


def _of_all_but_first(fragment: Fragment) -> int:
    return int((fragment.stops - fragment.first_row)[1:].sum())


def _measured(take: Take, seconds: float) -> Measured:
    steps = 0

    def batch() -> int:
        nonlocal steps
        taken = take()
        steps += taken
        return taken

    batch()  # and what is made ready at first
    steps, before = 0, processor_seconds()
    rate = steps_per_s(batch, seconds)
    return Measured(rate, (processor_seconds() - before) / steps * 1e6, memory_mb())


def _beside_possible(workload: str, where: str, found: list[Measured], *, aim: float | None) -> Record:
    pairs = [(each.rate, POSSIBLE) for each in found]
    return record(workload, SLOTS, pairs, aim=aim, where=where, beside_name="16 / mean")


def _beside_hand(where: str, mine: list[Measured], hand: list[Measured]) -> list[Record]:
    rates = [(my.rate, its.rate) for my, its in zip(mine, hand, strict=True)]
    cpu, allowed = median(each.cpu for each in mine), median(each.cpu for each in hand)
    memory = median(each.memory for each in mine)
    told = {"where": where, "cpu_s_per_mstep": round(cpu), "beside_name": f"{BY_HAND}, {allowed:.0f} s"}
    return [
        record("the same, beside threads", SLOTS, rates, aim=None, where=where, beside_name=BY_HAND),
        within("the same, processor time", SLOTS, cpu, allowed, **told),
        within("the same, memory", SLOTS, memory, ALLOWED_MB, where=where, pss_mb=round(memory)),
    ]


if __name__ == "__main__":
    run(measure)
