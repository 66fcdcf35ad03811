"""FragmentTrace: the arrows of many rollouts in one trace, and what other processes say of themselves."""

from collections import Counter
from pathlib import Path
from time import perf_counter_ns
from types import SimpleNamespace
from typing import Any

from traces import assert_valid, events_of, processes, tracks

from rollflow.stream.traces.fragment_trace import FragmentTrace
from rollflow.stream.traces.peer_spans import PeerSpan, PeerSpans
from rollflow.stream.traces.trace import Trace, open_trace


def traced(path: Path) -> Trace:
    return Trace(open_trace(str(path)), "many", lambda: None)


def fragment_of(lane: int, sequence: int) -> Any:
    return SimpleNamespace(lane=lane, sequence=sequence, num_rows=8, num_steps=8)


def test_arrows_of_many_rollouts_have_numbers_of_their_own(tmp_path: Path) -> None:
    """Also those to a trainer, and those of rollouts with many lanes."""
    path = tmp_path / "run.trace"
    trace = traced(path)
    rollouts = [FragmentTrace(trace, f"rollout {number}/") for number in range(34)]
    names = [(0, 0), (1 << 16, 0)]
    for rollout in rollouts:
        for lane, sequence in names:
            rollout.begins(lane)
            rollout.cut(fragment_of(lane, sequence))
        began = perf_counter_ns()
        rollout.update(names, began, perf_counter_ns())
    for rollout in rollouts:
        began = perf_counter_ns()
        span = PeerSpan(0, "update", began, perf_counter_ns(), (5,))
        rollout.take_updates(PeerSpans("trainer", [span], 0, 0, 0), lambda item: names)
    trace.close()
    numbers = Counter(event["id"] for event in events_of(path) if event["ph"] == "s")
    assert len(numbers) == 34 * 2 * 2  # each within the process, and to the trainer
    assert set(numbers.values()) == {1}
    assert max(numbers) < 1 << 53


def test_a_process_has_so_many_names_of_spans(tmp_path: Path) -> None:
    path = tmp_path / "run.trace"
    trace = traced(path)
    rollout = FragmentTrace(trace)
    for first in (0, 40):  # of two answers
        now = perf_counter_ns()
        spans = [PeerSpan(0, f"name {first + number}", now + number, now + number + 1) for number in range(40)]
        rollout.take_there(PeerSpans("host", spans, 0, 0, 0))
    trace.close()
    events = events_of(path)
    assert_valid(events)
    names = [span["name"] for _, _, span in tracks(events, processes(events)["host"])["lane 0"]]
    assert names == [f"name {number}" for number in range(64)] + ["other"] * 16
