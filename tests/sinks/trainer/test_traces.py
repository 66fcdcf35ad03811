"""The trace of a trainer's own loop, and that of the rollout that feeds it."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from feeding_rollouts import fed, trainer
from numbered_module import NumberedEnv, NumberedModule
from traces import arrows, assert_valid, events_of, processes, tracks

from rollflow import Rollout, feed

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


def test_a_trace_that_can_not_be_written_is_told_at_once(tmp_path: Path) -> None:
    path = str(tmp_path / "none" / "run.trace")
    with pytest.raises(ValueError, match="expected a file in a folder that is there"):
        feed(Rollout(ENVS, module=NumberedModule(), **OPTIONS), "unix:/nowhere", trace=path)
    with pytest.raises(ValueError, match="expected a file in a folder that is there"):
        trainer(trace=path)
