"""What a trainer's stream logs, and the trace of its loop."""

import json
import socket
import threading
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from feeding_rollouts import fed, rollout_of, trainer
from numbered_module import NumberedModule
from traces import arrows, assert_valid, events_of, processes, tracks

from rollflow import TrainerStream, Watch
from rollflow.sinks import Batches
from rollflow.stream.data.errors import MetricsError, RunError
from rollflow.stream.observe.run_socket import snapshots


def fed_rows(path: Path, **options: Any) -> tuple[Any, list[dict[str, Any]]]:
    """A stream that has ended, and what it logged."""
    rollout = rollout_of([0], num_fragments=3)
    with fed(trainer(log=f"jsonl:{path}", watch=Watch(log_every=3600.0), **options), rollout) as (stream, _):
        for number, _ in enumerate(stream):
            stream.log("train/loss", number)
            if not number:
                stream.publish(rollout.module.state_dict())
                [snapshot] = [each for each in snapshots() if each["kind"] == "TrainerStream"]
    assert (snapshot["name"], snapshot["figures"]["policy/version"]) == (str(stream.address), 1)
    assert snapshot["figures"]["time/iterations"] == 1
    return stream, [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("yields", ["fragments", "batches"])
def test_a_stream_logs_what_it_has_handed_over(tmp_path: Path, yields: Any) -> None:
    stream, [row] = fed_rows(tmp_path / "run.jsonl", yields=yields)
    assert (row["updates"], row["train/loss"], row["policy/version"]) == (3, 1.0, 1)
    assert row["steps"] == row["time/total_timesteps"] > 16
    assert row["rollout/episodes"] == stream.returns.count > 0
    assert row["rollout/ep_rew_mean"] == pytest.approx(stream.returns.mean)
    assert row["policy/lag"] in (0, 1)


def test_a_log_goes_on_with_the_steps_and_items_of_an_earlier_trainer(tmp_path: Path) -> None:
    path, state = tmp_path / "run.jsonl", {"version": 5, "weights": [5, "ab" * 8], "sources": {}, "counted": [1000, 30]}
    before, _ = fed_rows(path)
    with trainer() as stream:
        stream.load_state_dict(before.state_dict())
        assert stream.log.counted == before.log.counted == (json.loads(path.read_text())["steps"], 3)
    with trainer(log=f"jsonl:{tmp_path / 'other.jsonl'}") as stream:
        stream.load_state_dict(state)
        assert stream.state_dict()["counted"] == [1000, 30]
        figures = stream.log.figures()
    assert (figures["time/total_timesteps"], figures["time/iterations"], figures["time/fps"]) == (1000, 30, 0.0)


def test_a_log_that_cannot_be_opened_closes_the_socket() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        stream = TrainerStream("tcp://127.0.0.1:0", log=f"prometheus:{taken.getsockname()[1]}")
        with pytest.raises(OSError, match="expected a free port"):
            stream.__enter__()
    assert [each.fileno() for each in stream._listener.sockets] == [-1]


def test_a_trace_that_cannot_be_opened_leaves_no_log_behind(tmp_path: Path) -> None:
    folder = tmp_path / "traces"
    folder.mkdir()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    before = set(threading.enumerate())
    stream = TrainerStream("tcp://127.0.0.1:0", log=f"prometheus:{port}", watch=Watch(trace=folder / "run.trace"))
    folder.rmdir()
    with pytest.raises(FileNotFoundError):
        stream.__enter__()
    assert set(threading.enumerate()) <= before
    with socket.create_server(("127.0.0.1", port)):
        pass


def test_a_trainer_and_the_rollout_that_feeds_it_write_a_trace_each(tmp_path: Path) -> None:
    rollout = rollout_of(range(4), lanes=2, num_fragments=3, watch=Watch(trace=str(tmp_path / "feed.trace.gz")))
    batches = Batches(fragments=2)
    stream = trainer(yields=batches, module=NumberedModule(), watch=Watch(trace=str(tmp_path / "trainer.trace")))
    with fed(stream, rollout, name="sim"):
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


def test_a_batch_that_can_not_be_made_is_not_made_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = trainer(watch=Watch(trace=str(tmp_path / "trainer.trace")))
    monkeypatch.setattr(stream._item_maker, "item_of", Mock(side_effect=RunError("none can be made")))
    with fed(stream, rollout_of([0], num_fragments=1)), pytest.raises(RunError, match="none can be made"):
        next(iter(stream))
    names = [each["name"] for _, _, each in tracks(events_of(tmp_path / "trainer.trace"))["loop"]]
    assert names[-2:] == ["makes its batch", "waits for a batch"]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"log": "nowhere"}, "kinds: jsonl, "),
        ({"watch": Watch(trace="none/run.trace")}, "expected a file in a folder that is there"),
    ],
    ids=["log", "trace"],
)
def test_what_cannot_be_written_to_is_refused_when_it_is_made(options: dict[str, Any], told: str) -> None:
    with pytest.raises((MetricsError, ValueError), match=told):
        trainer(**options)
