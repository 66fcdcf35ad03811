"""What a log is written to: files, trackers, servers that are scraped, and what is refused."""

import json
import math
import os
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from extras import needs

from rollflow.nodes.logs.destinations import KINDS, LogOptions, Prometheus, destination_of
from rollflow.nodes.logs.figures import Row
from rollflow.stream.data.errors import MetricsError


def row_of(steps: int, axis: Any = "steps", **values: float) -> Row:
    return Row(steps, steps // 10, 1000.5 + steps, steps / 4, values, axis=axis)


def write(text: str, *rows: Row, last: Row | None = None) -> None:
    destination = destination_of(text)
    destination.open(last)
    for row in rows:
        destination.write(row)
    destination.close()


def test_json_lines_have_an_object_each_and_null_for_what_json_does_not_know(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    write(f"jsonl:{path}", row_of(10, a=1.5))
    write(f"jsonl:{path}", row_of(20, a=math.nan, b=-math.inf, c=2))
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"steps": 10, "updates": 1, "time": 1010.5, "a": 1.5},
        {"steps": 20, "updates": 2, "time": 1020.5, "a": None, "b": None, "c": 2},
    ]


@pytest.mark.parametrize("left", ["", '{"steps": 40, "upd'])
def test_rows_that_are_made_again_go(left: str, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    write(f"jsonl:{path}", *map(row_of, (10, 20, 30)))
    path.write_text(path.read_text() + left)
    write(f"jsonl:{path}", row_of(25), last=row_of(20))
    assert [json.loads(line)["steps"] for line in path.read_text().splitlines()] == [10, 20, 25]


def test_tensorboard_passes_over_scalars_that_are_made_again(tmp_path: Path) -> None:
    EventAccumulator = needs("tensorboard.backend.event_processing.event_accumulator").EventAccumulator

    write(f"tensorboard:{tmp_path}", *(row_of(steps, a=steps) for steps in (10, 20, 30)))
    write(f"tensorboard:{tmp_path}", row_of(25, a=26), last=row_of(20))
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(each.step, each.value) for each in events.Scalars("a")] == [(10, 10), (20, 20), (25, 26)]


@pytest.mark.parametrize(("axis", "places"), [("steps", [10, 20]), ("updates", [1, 2]), ("time", [2, 5])])
def test_tensorboard_has_a_scalar_for_each_figure(tmp_path: Path, axis: Any, places: list[int]) -> None:
    EventAccumulator = needs("tensorboard.backend.event_processing.event_accumulator").EventAccumulator

    rows = row_of(10, axis, **{"train/loss": 0.5}), row_of(20, axis, **{"train/loss": 0.25})
    write(f"tensorboard:{tmp_path}/runs/1", *rows)
    events = EventAccumulator(f"{tmp_path}/runs/1")
    events.Reload()
    assert events.Tags()["scalars"] == ["train/loss"]
    scalars = events.Scalars("train/loss")
    seen = [(each.step, each.wall_time, each.value) for each in scalars]
    assert seen == [(places[0], 1010.5, 0.5), (places[1], 1020.5, 0.25)]


def scraped(server: Prometheus) -> dict[str, float]:
    """Sample, as Prometheus writes it -> value."""
    with urllib.request.urlopen("http://{}:{}/metrics".format(*server.address), timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))}


def test_prometheus_scrapes_the_newest_row() -> None:
    server = Prometheus("0")
    server.open()
    assert server.address[0] == "127.0.0.1"
    assert scraped(server) == {}
    server.write(row_of(10, **{"time/fps": 5.0}))
    names = {
        "time/fps": 7.0,
        "time/total_timesteps": 20,
        "busy/env": 0.5,
        "busy/module": 0.25,
        "policy/version/hunter": 3,
        "metrics/filter/mean": 1.5,
        "train/loss": 0.125,
    }
    server.write(row_of(20, **names))
    shown = {"rollflow_fps": 7.0, "rollflow_timesteps_total": 20.0, 'rollflow_busy_ratio{stage="env"}': 0.5}
    shown |= {'rollflow_busy_ratio{stage="module"}': 0.25, 'rollflow_module_policy_version{module="hunter"}': 3.0}
    shown |= {'rollflow_metric{name="filter/mean"}': 1.5, 'rollflow_logged{name="train/loss"}': 0.125}
    assert scraped(server) == shown
    server.close()
    with pytest.raises(OSError, match="refused"):
        scraped(server)


def test_a_port_that_is_taken_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=f"log='prometheus:127.0.0.1:{port}': Address already in use"):
            Prometheus(str(port)).open()


def said_by(program: str, argument: str, **environment: str) -> list[str]:
    """The words of the last line of a program, in a process of its own."""
    command, every = [sys.executable, "-c", program, argument], os.environ | environment
    done = subprocess.run(command, env=every, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1].split()


@pytest.mark.slow
@pytest.mark.parametrize("is_own", [True, False], ids=["a new run", "the program's run"])
def test_wandb_works_offline(tmp_path: Path, is_own: bool) -> None:
    needs("wandb")
    program = (
        "import os, sys, wandb\n"
        "from rollflow.nodes import Rollout\n"
        "begun, init = [], wandb.init\n"
        "wandb.init = lambda **options: begun.append(init(**options)) or begun[-1]\n"
        "mine = None if sys.argv[1] == 'True' else wandb.init(project='mine')\n"
        "log = 'wandb:pole/first' if mine is None else 'wandb:'\n"
        "with Rollout('CartPole-v1', num_fragments=2, seed=0, log=log) as rollout:\n"
        "    for batch in rollout.batches():\n"
        "        rollout.log('train/loss', 0.5)\n"
        "    [writer] = rollout.log.writers\n"
        "    finish, [run] = writer.destination.close, begun\n"
        "    def close():\n"
        "        summary = dict(run.summary)\n"
        "        print(run.project, run.name, summary['train/loss'], summary['global_step'] == rollout.num_steps)\n"
        "        finish()\n"
        "    writer.destination.close = close\n"
        "assert mine is None or wandb.run is mine\n"
    )
    environment = {"WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path), "WANDB_SILENT": "true"}
    project, name, loss, steps = said_by(program, str(is_own), **environment)
    assert (project, loss, steps) == ("pole" if is_own else "mine", "0.5", "True")
    assert name == "first" or not is_own
    assert len(list(tmp_path.glob("wandb/offline-run-*/*.wandb"))) == 1


@pytest.mark.slow
@pytest.mark.parametrize("target", ["pole", "pole/first"])
def test_mlflow_has_a_run_with_a_metric_for_each_figure(tmp_path: Path, target: str) -> None:
    needs("mlflow")
    program = (
        "import sys\n"
        "from mlflow import MlflowClient\n"
        "from rollflow.nodes import Rollout\n"
        "with Rollout('CartPole-v1', num_fragments=2, seed=0, log=f'mlflow:{sys.argv[1]}') as rollout:\n"
        "    for batch in rollout.batches():\n"
        "        rollout.log('train/loss', 0.5)\n"
        "client = MlflowClient()\n"
        "[run] = client.search_runs([client.get_experiment_by_name('pole').experiment_id])\n"
        "[loss] = client.get_metric_history(run.info.run_id, 'train/loss')\n"
        "print(run.info.status, loss.value, loss.step == rollout.num_steps, run.info.run_name)\n"
    )
    # The package alone, without a database, has runs on a server, or in files, if it is allowed to.
    environment = {"MLFLOW_TRACKING_URI": f"file:{tmp_path}/runs", "MLFLOW_ALLOW_FILE_STORE": "true"}
    status, loss, is_same, name = said_by(program, target, **environment)
    assert (status, loss, is_same) == ("FINISHED", "0.5", "True")
    assert name == "first" or "/" not in target


# What is refused, before anything runs


@pytest.mark.parametrize(
    ("text", "extra"),
    [
        ("tensorboard:9100", "tensorboard"),
        ("wandb:9100", "wandb"),
        ("mlflow:9100", "mlflow"),
        ("prometheus:9100", "serve"),
        ("progress:", "view"),
    ],
)
def test_a_missing_package_is_named(text: str, extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, KINDS[text.partition(":")[0]][1], None)
    with pytest.raises(MetricsError, match=rf"takes the package \S+: pip install 'rollflow\[{extra}\]'"):
        LogOptions(text)


UNKNOWN = r"expected KIND:TARGET, such as 'tensorboard:runs/1'; kinds: jsonl, "
PORT = "expected PORT or HOST:PORT, a port from 0 to 65535"
REFUSED: list[tuple[Any, str]] = [
    *(({"log": [text]}, UNKNOWN) for text in ("tensorboard", "tensorbord:runs", ":x", "", "JSONL:run.jsonl", 7)),
    *(({"log": f"prometheus:{target}"}, PORT) for target in ("", "web", "70000", "-1", "localhost:", "1.5")),
    ({"log": "mlflow:"}, "log='mlflow:' names no experiment, expected 'mlflow:EXPERIMENT'"),
    ({"log": "progress:run"}, "log='progress:run' names a target, expected 'progress:'"),
    ({"log": 7}, "log is 7, expected a text such as 'jsonl:run.jsonl', or a list of them"),
    (
        {"log": ["jsonl:x.jsonl", "jsonl:x.jsonl"]},
        "log has 'jsonl:x.jsonl' and 'jsonl:x.jsonl', expected each place once",
    ),
    (
        {"log": ["jsonl:x.jsonl", "jsonl:./x.jsonl"]},
        "log has 'jsonl:x.jsonl' and 'jsonl:./x.jsonl', expected each place once",
    ),
    ({"every": 0}, "log_every is 0, expected a number of seconds above 0"),
    ({"every": "1"}, "log_every is '1', expected a number of seconds above 0"),
    ({"every": math.inf}, "log_every is inf, expected a number of seconds above 0"),
    ({"axis": "epochs"}, "log_x is 'epochs', expected 'steps', 'updates', 'time'"),
]


@pytest.mark.parametrize(("options", "text"), REFUSED)
def test_options_that_cannot_be_worked_with_are_refused(options: Any, text: str) -> None:
    with pytest.raises(MetricsError, match=text):
        LogOptions(**options)


@pytest.mark.parametrize("kind", ["jsonl", "tensorboard"])
@pytest.mark.parametrize("place", ["", "there/x", "other", "/dev/zero"])
def test_a_path_that_cannot_be_written_is_refused_and_nothing_is_made(tmp_path: Path, kind: str, place: str) -> None:
    is_folder = kind == "tensorboard"
    (tmp_path / "there").write_text("a file")
    (tmp_path / "other").write_text("a file") if is_folder else (tmp_path / "other").mkdir()
    target = str(tmp_path / place) if place else ""
    expected = {
        "": f"names no {'folder' if is_folder else 'file'}",
        "there/x": "there is a file, expected a",
        "other": "is no f",
        "/dev/zero": "is no f",
    }
    with pytest.raises(MetricsError, match=expected[place]):
        LogOptions(f"{kind}:{target}")
    assert sorted(os.listdir(tmp_path)) == ["other", "there"]


def test_every_kind_is_on_the_page() -> None:
    page = (Path(__file__).parents[3] / "docs/how_to/log.md").read_text()
    assert [kind for kind in KINDS if f"| `{kind}:" not in page] == []
