"""Two programs timed in turn, so that a machine whose speed drifts slows both."""

import json
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

Run = Callable[[], int]
"""Does some of a workload; how many environment steps that were."""


def steps_per_s(run: Run, at_least_s: float) -> float:
    """Environment steps in a second, over as many runs as take so long."""
    steps, began = 0, time.perf_counter()
    while (taken := time.perf_counter() - began) < at_least_s:
        steps += run()
    return steps / taken


def paired(
    workload: str, slots: int, ours: Run, beside: Run, *, aim: float, rounds: int, at_least_s: float, **told: Any
) -> dict[str, Any]:
    """Medians over so many pairs, each of which begins with the other one."""
    for run in (ours, beside):
        steps_per_s(run, at_least_s)  # warm up
    pairs = []
    for number in range(rounds):
        if number % 2:
            mine, other = steps_per_s(ours, at_least_s), steps_per_s(beside, at_least_s)
        else:
            other, mine = steps_per_s(beside, at_least_s), steps_per_s(ours, at_least_s)
        pairs.append((mine, other))
    return {
        "workload": workload,
        "slots": slots,
        "steps_per_s": round(statistics.median(mine for mine, _ in pairs)),
        "beside": round(statistics.median(other for _, other in pairs)),
        "ratio": round(statistics.median(mine / other for mine, other in pairs), 3),
        "aim": aim,
        "runs": rounds,
        **told,
    }


def show(results: Sequence[dict[str, Any]]) -> None:
    """One JSON line each, then a table."""
    for result in results:
        print(json.dumps(result))
    print(f"\n{'workload':<24} {'slots':>6} {'rollflow':>12} {'beside':>12} {'ratio':>7} {'aim':>6}")
    for each in results:
        figures = f"{each['steps_per_s']:>12,} {each['beside']:>12,} {each['ratio']:>7.2f} {each['aim']:>6.2f}"
        print(f"{each['workload']:<24} {each['slots']:>6} {figures}")
