"""Two programs measured in turn, so that a machine whose speed drifts slows both, and how figures are shown."""

import json
import os
import platform
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from time import perf_counter
from typing import Any

from rollflow import Rollout

Run = Callable[[], int]  # does a piece of work; how many steps it took
Rate = Callable[[], float]  # measures once; steps per second
Record = dict[str, Any]

PACKAGES = ("numpy", "torch", "gymnasium", "anyio", "stable-baselines3", "torchrl", "ray")


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is measured: so many pairs, each part of at least so many seconds."""

    rounds: int
    seconds: float


QUICK, FULL = Sizes(3, 0.4), Sizes(9, 2.0)


def steps_per_s(run: Run, at_least_s: float) -> float:
    """Steps per second over at least so many seconds."""
    steps = 0
    began = perf_counter()
    while (taken := perf_counter() - began) < at_least_s:
        steps += run()
    return steps / taken


def paired(
    workload: str, slots: int, ours: Run, beside: Run, *, aim: float | None, sizes: Sizes, **told: Any
) -> Record:
    """Medians over pairs. Only for what stands still while the other is measured: see `in_turns`."""
    for run in (ours, beside):
        steps_per_s(run, sizes.seconds / 2)  # warm up
    pairs = in_turns(lambda: steps_per_s(ours, sizes.seconds), lambda: steps_per_s(beside, sizes.seconds), sizes.rounds)
    return record(workload, slots, pairs, aim=aim, **told)


def in_turns(ours: Rate, beside: Rate, rounds: int) -> list[tuple[float, float]]:
    """Pairs of steps per second, every other of which begins with the other one.

    What runs ahead of its reader must be opened and closed by `ours`: left open, it takes the processor from the other
    one, and what it makes meanwhile is handed out afterwards as if it had taken no time.
    """
    pairs = []
    for number in range(rounds):
        if number % 2:
            mine, other = ours(), beside()
        else:
            other, mine = beside(), ours()
        pairs.append((mine, other))
    return pairs


def in_steady_state(rollout: Rollout, at_least_s: float, *, dropped: int = 2) -> float:
    """Steps per second of a rollout that was just opened, without its first batches, for which it starts workers."""
    batches = iter(rollout.batches())
    for _ in range(dropped):
        next(batches)
    return steps_per_s(lambda: len(next(batches)["obs"]), at_least_s)


def record(
    workload: str, slots: int, pairs: Sequence[tuple[float, float]], *, aim: float | None, **told: Any
) -> Record:
    """One line of the table: medians of (ours, the other's) steps per second.

    `beside`, `ratio` and `aim` are None in a line that stands for itself, `aim` alone where there is none.
    """
    return {
        "workload": workload,
        "slots": slots,
        "where": "inline",
        "steps_per_s": round(statistics.median(mine for mine, _ in pairs)),
        "beside": round(statistics.median(other for _, other in pairs)),
        "ratio": round(statistics.median(mine / other for mine, other in pairs), 3),
        "aim": aim,
        "runs": len(pairs),
        **told,
    }


def within(workload: str, slots: int, measured: float, allowed: float, **told: Any) -> Record:
    """One line that stands for itself, of what is better the less it is: `ratio` is what is allowed over it."""
    alone = {
        "steps_per_s": None,
        "beside": None,
        "ratio": round(allowed / max(measured, 0.1), 2),
        "aim": 1.0,
        "runs": 1,
    }
    return {"workload": workload, "slots": slots, "where": "inline", **alone, **told}


def tell(records: Sequence[Record]) -> None:
    """One JSON line each."""
    for each in records:
        print(json.dumps(each), flush=True)


def show(records: Sequence[Record]) -> None:
    """A table, the machine and the versions."""
    print(f"\n{'workload':<34} {'slots':>6} {'where':<10} {'rollflow':>11} {'beside':>11} {'ratio':>6} {'aim':>5}")
    for each in records:
        rate = "" if each["steps_per_s"] is None else f"{each['steps_per_s']:,}"
        print(f"{each['workload']:<34} {each['slots']:>6} {each['where']:<10} {rate:>11}{_beside(each)}")
    print(f"\n{machine()}\n{versions()}")


def _beside(each: Record) -> str:
    if each["ratio"] is None:
        return ""
    rate = "" if each["beside"] is None else f"{each['beside']:,}"
    beside = f" {rate:>11} {each['ratio']:>6.2f}"
    if each["aim"] is None:
        return beside
    return f"{beside} {each['aim']:>5.2f}  {'met' if each['ratio'] >= each['aim'] else 'missed'}"


def machine() -> str:
    """What this ran on."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{os.cpu_count()} cores, {platform.machine()}, {memory:.0f} GiB, {platform.system()} {platform.release()}"


def versions() -> str:
    """The packages that take part."""
    found = [f"python {platform.python_version()}"]
    for package in PACKAGES:
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    return ", ".join(found)
