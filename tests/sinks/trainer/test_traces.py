"""The trace of a trainer's own loop, and that of the rollout that feeds it."""

from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from time import monotonic
from types import SimpleNamespace
from typing import Any

import pytest
from feeding_rollouts import fed, trainer
from numbered_module import NumberedEnv, NumberedModule
from traces import arrows, assert_valid, events_of, processes, tracks

from rollflow import Rollout, feed
from rollflow.sinks.trainer import loop_trace
from rollflow.sinks.trainer.loop_trace import LoopTrace

ENVS = [partial(NumberedEnv, number) for number in range(4)]
OPTIONS: dict[str, Any] = {"fragment_length": 8, "num_fragments": 3, "seed": 0}


def test_a_trainer_and_the_rollout_that_feeds_it_write_a_trace_each(tmp_path: Path) -> None:
    rollout = Rollout(ENVS, lanes=2, module=NumberedModule(), **OPTIONS)
    stream = trainer(module=NumberedModule(), fragments_per_batch=2, trace=str(tmp_path / "trainer.trace"))
    with fed(stream, rollout, name="sim", trace=str(tmp_path / "feed.trace.gz")):
        assert sum(1 for _ in stream) == 3
    of_trainer, of_feed = events_of(tmp_path / "trainer.trace"), events_of(tmp_path / "feed.trace.gz")
    for events in (of_trainer, of_feed):
        assert_valid(events)
    assert processes(of_trainer) == [f"rollflow TrainerStream {stream.address}"]
    here = tracks(of_trainer)
    (arrivals,) = [name for name in here if name.startswith("from sim (tcp://")]
    names = [each["name"] for _, _, each in here["loop"]]
    assert [name for name in names if name.startswith("update")] == ["update 0", "update 1", "update 2"]
    assert names.count("makes its batch") == 3
    assert {each["args"]["steps"] for _, _, each in here[arrivals]} == {16}
    expected = [(arrivals, ("loop", f"update {number // 2}")) for number in range(6)]
    assert [(begins[0], ends) for begins, ends in arrows(of_trainer)] == expected
    assert processes(of_feed) == ["rollflow feed"]
    assert {f"rollout/lane {lane}" for lane in range(2)} <= tracks(of_feed).keys()


def item_of(name: str, number: int, token: bytes) -> Any:
    """An item that has come from a rollout."""
    source = SimpleNamespace(name=name, called=name, session=SimpleNamespace(token=token))
    return SimpleNamespace(source=source, number=number, lane=0, num_steps=8)


def test_a_rollout_is_not_taken_for_one_that_has_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever stands in memory where the rollout before stood."""
    monkeypatch.setattr(loop_trace, "id", lambda what: 0, raising=False)
    trace = LoopTrace()
    trace.open(str(tmp_path / "run.trace"), "loop")
    items = item_of("first", 3, b"first"), item_of("second", 3, b"second")
    for item in items:
        trace.arrives(item, monotonic())
    for item in items:
        trace.asks()
        trace.gets([item])
    trace.leaves()
    trace.close()
    events = events_of(tmp_path / "run.trace")
    assert_valid(events)
    assert [begins[0] for begins, _ in arrows(events)] == ["from first", "from second"]


def test_items_arrive_while_others_are_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest item, which is about to be forgotten, is used meanwhile."""
    monkeypatch.setattr(loop_trace, "MOST_ARROWS", 1)
    trace = LoopTrace()
    trace.open(str(tmp_path / "run.trace"), "loop")
    oldest, newest = item_of("first", 0, b"first"), item_of("first", 1, b"first")
    trace.asks()
    trace.gets([oldest])
    with ThreadPoolExecutor() as threads:

        class Used(dict[Any, Any]):
            def __iter__(self) -> Any:
                found = super().__iter__()
                uses.append(threads.submit(trace.asks))
                wait(uses, 0.2)  # if it can be used now, it is
                return found

        uses: list[Future[None]] = []
        monkeypatch.setattr(trace, "_arrived", Used())
        for item in (oldest, newest):
            trace.arrives(item, monotonic())
        assert [use.result() for use in uses] == [None]
    trace.close()
    assert_valid(events_of(tmp_path / "run.trace"))


def test_a_trace_that_can_not_be_written_is_told_at_once(tmp_path: Path) -> None:
    path = str(tmp_path / "none" / "run.trace")
    with pytest.raises(ValueError, match="expected a file in a folder that is there"):
        feed(Rollout(ENVS, module=NumberedModule(), **OPTIONS), "unix:/nowhere", trace=path)
    with pytest.raises(ValueError, match="expected a file in a folder that is there"):
        trainer(trace=path)
