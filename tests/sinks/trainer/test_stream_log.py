"""What a trainer's stream logs."""

import json
import socket
from pathlib import Path
from typing import Any

import pytest
from feeding_rollouts import fed, rollout_of, trainer

from rollflow import TrainerStream, Watch
from rollflow.stream.data.errors import MetricsError
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


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"log": "nowhere"}, "kinds: jsonl, "),
        ({"watch": Watch(trace="run.trace")}, "trace of Watch is of a rollout, expected it there"),
    ],
    ids=["log", "trace"],
)
def test_what_cannot_be_written_to_is_refused_when_it_is_made(options: dict[str, Any], told: str) -> None:
    with pytest.raises((MetricsError, ValueError), match=told):
        trainer(**options)
