"""How long the calls of a run take, as `rollflow top` shows it."""

import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from held_envs import await_that
from numbered_module import NumberedEnv, NumberedModule

from rollflow.cli import call_times
from rollflow.cli.call_times import calls_table, measured_calls
from rollflow.nodes import Rollout
from rollflow.stream.snapshots import run_folder


def call(tid: int, name: str, us: float, **more: Any) -> dict[str, Any]:
    return {"ph": "X", "pid": 7, "tid": tid, "name": name, "cat": "busy", "ts": 0.0, "dur": us, **more}


def test_calls_are_counted_by_stage_and_lane_with_a_block_for_half_a_power_of_ten() -> None:
    names = [
        {"ph": "M", "pid": 7, "tid": tid, "name": "thread_name", "args": {"name": name}}
        for tid, name in ((1, "env"), (2, "lane 0"))
    ]
    events = [
        {"ph": "M", "pid": 7, "tid": 0, "name": "process_name", "args": {"name": "rollflow rollout"}},
        *names,
        *(call(1, "env", us) for us in (0.2, 2.0, 2.5, 40.0, 2e7)),
        *(call(2, "step", 1500.0 + number) for number in range(100)),
        call(2, "fragment 3", 9e5, args={"rows": 8}),
        {"ph": "X", "pid": 7, "tid": 1, "name": "env", "cat": "idle", "ts": 0.0, "dur": 5.0},
    ]
    table = calls_table(events)
    found = dict(
        zip(table.columns[0]._cells, zip(*(each._cells for each in table.columns[1:]), strict=True), strict=True)
    )
    assert found == {
        "env": ("5", "2.5 µs", "40 µs", "20 s", "█  ▃         ▃"),
        "lane 0: step": ("100", "1.55 ms", "1.6 ms", "1.6 ms", "      █       "),
    }


def test_a_run_is_measured_while_it_is_under_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(run_folder.FOLDER, str(tmp_path / "runs"))
    monkeypatch.setattr(call_times, "_SECONDS", 0.1)
    is_over = threading.Event()

    def read() -> None:
        with Rollout(partial(NumberedEnv, 0), module=NumberedModule(), fragment_length=8, seed=0) as rollout:
            for _ in rollout.batches():
                if is_over.is_set():
                    break

    reading = threading.Thread(target=read)
    reading.start()
    try:
        await_that(run_folder.snapshots)
        runs = run_folder.snapshots()
        table = measured_calls(runs[0]["path"])
        assert {"env", "module", "learner_pipeline"} < {*table.columns[0]._cells}
    finally:
        is_over.set()
        reading.join()
    with pytest.raises(FileNotFoundError):
        measured_calls(runs[0]["path"])
