"""A trainer in the trace of the rollout that feeds it, and the trace of a trainer's own loop."""

from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from time import perf_counter_ns
from types import SimpleNamespace
from typing import Any

import pytest
from feeding_rollouts import fed, trainer
from numbered_module import NumberedEnv, NumberedModule
from remote_hosts import listening
from shifted_processes import shifted_host, shifted_trainer
from traces import arrows, assert_valid, events_of, processes, tracks

from rollflow.nodes import RemoteRollouts, Rollout, RolloutHost
from rollflow.sinks import feed
from rollflow.sinks.trainer.trainer_side import loop_trace
from rollflow.sinks.trainer.trainer_side.loop_trace import LoopTrace
from rollflow.sinks.trainer.trainer_side.stream_reader import UPDATE, UsedItem

ENVS = [partial(NumberedEnv, number) for number in range(4)]
OPTIONS: dict[str, Any] = {"fragment_length": 8, "num_fragments": 3, "seed": 0}


@pytest.mark.slow
@pytest.mark.parametrize("sends", ["fragments", "batches"])
def test_arrows_lead_from_a_host_over_the_rollout_to_the_update_of_a_trainer(tmp_path: Path, sends: Any) -> None:
    remote: Any = listening(RemoteRollouts)
    path = tmp_path / "run.trace"
    count = 2 if sends == "fragments" else None
    with shifted_trainer(420, count) as (address, process), shifted_host(remote.addresses[0], RolloutHost, 300):
        feed(Rollout(remote, module=NumberedModule(), **OPTIONS), address, sends=sends, trace=str(path))
        assert process.stdout is not None
        assert process.stdout.read().strip() == "3"
    events = events_of(path)
    assert_valid(events)
    program, *others = processes(events)
    (host,) = [name for name in others if name.startswith("host sim")]
    (loop,) = [name for name in others if name.startswith("trainer tcp://")]
    found = [stops for stops in arrows(events) if stops[-1][0] == loop]
    assert sorted((stops[0][:2], stops[1][:2]) for stops in found) == sorted(
        ((host, f"rollout/lane {lane}"), (program, f"rollout/lane {lane}")) for lane in range(2) for _ in range(3)
    )
    updates = [span for span in tracks(events, processes(events)[loop])["loop"] if span[2]["name"] == "update"]
    assert len(updates) == 3
    fragments = [span for spans in tracks(events).values() for span in spans if span[2]["name"].startswith("fragment")]
    uncertainty_ns = events[-1]["args"]["clocks"][loop]["uncertainty_us"] * 1e3
    ends = sorted(end for _, end, _ in fragments)
    assert len(ends) == 6
    for number, (begin, _, _) in enumerate(updates):  # each begins when the two fragments were there that it used
        assert ends[2 * number + 1] <= begin + uncertainty_ns


def test_a_trainer_and_the_rollout_that_feeds_it_write_a_trace_each(tmp_path: Path) -> None:
    rollout = Rollout(ENVS, lanes=2, module=NumberedModule(), **OPTIONS)
    stream = trainer(module=NumberedModule(), fragments_per_batch=2, trace=str(tmp_path / "trainer.trace"))
    with fed(stream, rollout, name="sim", trace=str(tmp_path / "feed.trace.gz")):
        assert sum(1 for _ in stream) == 3
    of_trainer, of_feed = events_of(tmp_path / "trainer.trace"), events_of(tmp_path / "feed.trace.gz")
    for events in (of_trainer, of_feed):
        assert_valid(events)
    (program,) = processes(of_trainer)
    assert program == f"rollflow TrainerStream {stream.address}"
    here = tracks(of_trainer)
    (arrivals,) = [name for name in here if name.startswith("from sim (tcp://")]
    names = [each["name"] for _, _, each in here["loop"]]
    assert [name for name in names if name.startswith("update")] == ["update 0", "update 1", "update 2"]
    assert names.count("makes its batch") == 3
    assert {each["args"]["steps"] for _, _, each in here[arrivals]} == {16}
    expected = [((program, arrivals), (program, "loop", f"update {number // 2}")) for number in range(6)]
    assert [(stops[0][:2], stops[1]) for stops in arrows(of_trainer)] == expected
    _, loop = processes(of_feed)
    ways = [stops for stops in arrows(of_feed) if stops[-1][0] == loop]
    assert sorted(begins[:2] for begins, _ in ways) == [
        ("rollflow feed", f"rollout/lane {lane}") for lane in (0, 0, 0, 1, 1, 1)
    ]
    assert {ends for _, ends in ways} == {(loop, "loop", "update")}


def item_of(name: str, number: int, token: bytes) -> Any:
    """An item that has come from a rollout."""
    source = SimpleNamespace(name=name, called=name, session=SimpleNamespace(token=token))
    return SimpleNamespace(source=source, number=number, lane=0, num_steps=8)


def test_a_rollout_is_not_taken_for_one_that_has_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever stands in memory where the rollout before stood."""
    monkeypatch.setattr(loop_trace, "id", lambda what: 0, raising=False)
    trace = LoopTrace(str(tmp_path / "run.trace"), "loop")
    first, second = item_of("first", 3, b"first"), item_of("second", 3, b"second")
    now = perf_counter_ns()
    for item in (first, second):
        trace.arrives(item, now, now + 10)
    for item in (first, second):
        trace.record(UPDATE, now + 100, now + 200, [UsedItem(item.source, item.number)])
    trace.end()
    events = events_of(tmp_path / "run.trace")
    assert_valid(events)
    assert [stops[0][1] for stops in arrows(events)] == ["from first", "from second"]


def test_items_arrive_while_others_are_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest item, which is about to be forgotten, is used meanwhile."""
    monkeypatch.setattr(loop_trace, "MOST_ARROWS", 1)
    trace = LoopTrace(str(tmp_path / "run.trace"), "loop")
    oldest, newest = item_of("first", 0, b"first"), item_of("first", 1, b"first")
    now = perf_counter_ns()
    with ThreadPoolExecutor() as threads:

        class Used(dict[Any, Any]):
            def __iter__(self) -> Any:
                found = super().__iter__()
                used = UsedItem(oldest.source, oldest.number)
                uses.append(threads.submit(trace.record, UPDATE, now + 100, now + 200, [used]))
                wait(uses, 0.2)  # if it can be used now, it is
                return found

        uses: list[Future[None]] = []
        monkeypatch.setattr(trace, "_arrived", Used())
        for item in (oldest, newest):
            trace.arrives(item, now, now + 10)
        assert [use.result() for use in uses] == [None]
    trace.end()
    assert_valid(events_of(tmp_path / "run.trace"))


def test_a_trace_that_can_not_be_written_is_told_at_once(tmp_path: Path) -> None:
    path = str(tmp_path / "none" / "run.trace")
    with pytest.raises(ValueError, match="expected a file in a folder that is there"):
        feed(Rollout(ENVS, module=NumberedModule(), **OPTIONS), "unix:/nowhere", trace=path)
    with pytest.raises(ValueError, match="expected a file in a folder that is there"):
        trainer(trace=path)
