"""FragmentTrace: the arrows of many rollouts in one trace."""

from collections import Counter
from pathlib import Path
from time import perf_counter_ns
from types import SimpleNamespace
from typing import Any

from traces import assert_valid, events_of

from rollflow.stream.observe.trace import FragmentTrace, Trace, open_trace


def fragment_of(lane: int, sequence: int) -> Any:
    return SimpleNamespace(lane=lane, sequence=sequence, num_rows=8, num_steps=8)


def test_arrows_of_many_rollouts_have_numbers_of_their_own(tmp_path: Path) -> None:
    """Also those of rollouts with many lanes."""
    path = tmp_path / "run.trace"
    trace = Trace(open_trace(str(path)), "many", lambda: None)
    rollouts = [FragmentTrace(trace, f"rollout {number}/") for number in range(34)]
    names = [(0, 0), (1 << 16, 0)]
    for rollout in rollouts:
        for lane, sequence in names:
            rollout.begins(lane)
            rollout.cut(fragment_of(lane, sequence))
        began = perf_counter_ns()
        rollout.update(names, began, perf_counter_ns())
    trace.close()
    assert_valid(events_of(path))
    numbers = Counter(event["id"] for event in events_of(path) if event["ph"] == "s")
    assert len(numbers) == 34 * 2
    assert set(numbers.values()) == {1}
