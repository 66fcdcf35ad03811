"""What a trainer's stream logs."""

import json
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from feeding_rollouts import SHORT, trainer
from numbered_module import NumberedEnv, NumberedModule

from rollflow import Rollout, TrainerStream, feed
from rollflow.stream.data.errors import MetricsError
from rollflow.stream.observe.run_socket import snapshots


def fed_rows(path: Path, **options: Any) -> tuple[Any, list[dict[str, Any]]]:
    """A stream that has ended, and what it logged."""
    module = NumberedModule()
    rollout = Rollout([partial(NumberedEnv, 0)], module=module, fragment_length=8, num_fragments=3, seed=0)
    with ThreadPoolExecutor() as threads, trainer(log=f"jsonl:{path}", log_every=3600.0, **options) as stream:
        fed = threads.submit(feed, rollout, str(stream.address), limits=SHORT)
        for number, _ in enumerate(stream):
            stream.log("train/loss", number)
            if not number:
                stream.publish(module.state_dict())
                [snapshot] = [each for each in snapshots() if each["kind"] == "TrainerStream"]
        assert fed.result() is None
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
    stream = TrainerStream("tcp://127.0.0.1:0", log=f"prometheus:{port}", trace=folder / "run.trace")
    folder.rmdir()
    with pytest.raises(FileNotFoundError):
        stream.__enter__()
    assert set(threading.enumerate()) <= before
    with socket.create_server(("127.0.0.1", port)):
        pass


def test_what_cannot_be_logged_to_is_refused_when_it_is_made() -> None:
    with pytest.raises(MetricsError, match="kinds: csv, jsonl"):
        TrainerStream("tcp://127.0.0.1:0", log="nowhere")
