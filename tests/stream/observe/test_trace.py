"""Trace: events of spans, what is dropped, and files that end or break."""

import io
import json
import os
import threading
from collections import Counter
from pathlib import Path
from time import perf_counter_ns
from types import SimpleNamespace
from typing import Any

import pytest
from traces import assert_valid, events_of

from rollflow.stream.observe.trace import FragmentTrace, Trace, check_trace, open_trace


class Held(io.BytesIO):
    """File whose writer waits until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.goes_on, self.text = threading.Event(), b""

    def write(self, data: Any) -> int:
        self.goes_on.wait(60)
        return super().write(data)

    def close(self) -> None:
        self.text = self.getvalue()
        super().close()


@pytest.mark.parametrize("name", ["run.trace", "run.trace.gz"])
def test_a_span_comes_with_its_times_and_its_track(tmp_path: Path, name: str) -> None:
    ended = threading.Event()
    trace = Trace(open_trace(str(tmp_path / name)), "mine", ended.set)
    trace.recorder("env", "env")(trace.began + 1_234_567, trace.began + 2_000_000)
    trace.recorder("env", "waits for room", "blocked")(trace.began - 5, trace.began + 1000)
    trace.close()
    trace.close()
    assert ended.is_set()
    process, track, order, *spans, end = events_of(tmp_path / name)
    assert (process["args"], track["args"], order["tid"]) == ({"name": "mine"}, {"name": "env"}, track["tid"])
    assert [(each["name"], each["cat"], each["ts"], each["dur"]) for each in spans] == [
        ("env", "busy", 1234.567, 765.433),
        ("waits for room", "blocked", 0.0, 1.0),  # what began before the trace did
    ]
    assert {each["tid"] for each in spans} == {track["tid"]}
    assert end["args"] == {"dropped": 0}


def test_the_oldest_spans_are_dropped_and_counted_where_a_file_takes_none() -> None:
    file = Held()
    trace = Trace(file, "mine", file.goes_on.set, most=10)
    record = trace.recorder("env", "env")
    for number in range(25):
        begin = trace.began + number * 1000
        record(begin, begin + 1)
        trace.span("lane 0", f"fragment {number}", begin, begin + 1, {})
    file.goes_on.set()
    trace.close()
    events = json.loads(file.text)
    spans = [event for event in events if event["ph"] == "X"]
    for name in ("env", "fragment"):
        left = [int(event["ts"]) for event in spans if event["name"].startswith(name)]
        assert left == list(range(25 - len(left), 25))
        assert 5 <= len(left) <= 10
    assert [event["args"]["name"] for event in events if event["name"] == "thread_name"] == ["env", "lane 0"]
    assert events[-1]["args"]["dropped"] == 50 - len(spans)
    assert any(event["name"].startswith(f"{50 - len(spans)} spans dropped") for event in events)


@pytest.mark.slow
def test_a_file_that_takes_no_more_ends_the_trace(caplog: pytest.LogCaptureFixture) -> None:
    ended = threading.Event()
    trace = Trace(Path("/dev/full").open("wb"), "mine", ended.set)
    trace.recorder("env", "env")(trace.began, trace.began + 1)
    assert ended.wait(60)
    trace.close()
    assert [record.getMessage() for record in caplog.records] == ["the trace ends: [Errno 28] No space left on device"]


@pytest.mark.slow
def test_a_trace_that_gets_large_ends_whole_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, ended = tmp_path / "run.trace", threading.Event()
    trace = Trace(open_trace(str(path)), "mine", ended.set, size=1000)
    record = trace.recorder("env", "env")
    while not ended.wait(0.01):
        record(trace.began, trace.began + 1)
    events = events_of(path)
    assert events[-1]["name"] == "end of the trace"
    assert path.stat().st_size > 1000
    [text] = [record.getMessage() for record in caplog.records]
    assert text == "the trace ends after 1,000 bytes: trace seconds or minutes"


@pytest.mark.parametrize("path", [3, "", "/", "/nowhere/run.trace"])
def test_a_path_that_can_not_be_is_refused(path: Any) -> None:
    told = r"^trace is .*, expected (a file in a folder that is there|a file's path such as)"
    with pytest.raises(ValueError, match=told):
        check_trace(path)


@pytest.mark.parametrize(
    ("name", "data"),
    [("train.py", b"print()\n"), ("train.gz", b"print()\n"), ("mine.gz", b"\x1f\x8b\x08\x00" + bytes(range(60)))],
    ids=["plain", "not compressed", "hardly compressed"],
)
def test_a_file_of_somebody_else_is_not_taken_for_a_trace(tmp_path: Path, name: str, data: bytes) -> None:
    path = tmp_path / name
    path.write_bytes(data)
    with pytest.raises(ValueError, match=f"{name}'.*, where another file is, expected a new file, or an older trace's"):
        check_trace(path)


@pytest.mark.parametrize("name", ["run.trace", "run.trace.gz"])
def test_an_older_trace_makes_way(tmp_path: Path, name: str) -> None:
    for _ in range(2):
        check_trace(tmp_path / name)
        Trace(open_trace(tmp_path / name), "mine", lambda: None).close()
    (tmp_path / name).write_bytes(b"")  # of one that was killed
    check_trace(tmp_path / name)


def test_a_pipe_takes_a_trace(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    check_trace(tmp_path / "pipe")


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
