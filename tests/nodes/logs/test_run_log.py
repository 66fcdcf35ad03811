"""Rows of a log: their figures, when one is made, who writes it, and the words that people get."""

import gc
import math
import sys
import threading
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from rollflow import Rollout
from rollflow.nodes import EpisodeReturns, MetricsLogger
from rollflow.nodes.logs import destinations, run_log
from rollflow.nodes.logs.destinations import LogOptions, Progress, text_of
from rollflow.nodes.logs.figures import FIGURES, OWN, Counts, Figure, Row, check_own_name, figure_of, figures_of
from rollflow.nodes.logs.run_log import RunLog
from rollflow.stream.data.errors import MetricsError, RunError
from rollflow.stream.graph.report import NodeReport, Report
from rollflow.stream.net.backoff import waiting

SELDOM = 3600.0  # no row but those that a test asks for, and the last


class Kept:
    """Destination that keeps rows."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.is_open = False
        self.may_write, self.is_writing = threading.Event(), threading.Event()
        self.may_write.set()
        self.error: Exception | None = None

    def open(self, last: Any = None) -> None:
        self.is_open = True

    def write(self, row: Row) -> None:
        self.is_writing.set()
        assert self.may_write.wait(60)
        if self.error is not None:
            raise self.error
        self.rows.append(row)

    def close(self) -> None:
        self.is_open = False


class StepLog(RunLog):
    """Log of a number of steps."""

    steps = 0

    def counts(self) -> Counts:
        return Counts(steps=self.steps)


def begun(every: float = SELDOM, count: int = 1) -> StepLog:
    log = StepLog(LogOptions([f"kept:{number}" for number in range(count)], every=every))
    log.begin()
    return log


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> list[Kept]:
    """Destinations of the kind `kept`: of an options' own check, and of the log."""
    made: list[Kept] = []

    def make(target: str) -> Kept:
        made.append(Kept())
        return made[-1]

    monkeypatch.setattr(destinations, "KINDS", {"kept": (make, "", "")})
    return made


def step(log: StepLog) -> None:
    log.steps += 1
    log.make_row()


def test_the_last_row_is_written_before_the_destination_is_closed(kept: list[Kept]) -> None:
    log = begun()
    assert kept[-1].is_open
    log.steps = 3
    log("loss", 1.0)
    log("loss", torch.tensor([4.0]))
    log("rate", np.int64(2))
    log.end()
    log.end()
    with pytest.raises(RunError, match="'loss' was to be logged after the end of the run, expected it before"):
        log("loss", 1.0)
    assert not kept[-1].is_open
    [row] = kept[-1].rows
    assert (row.steps, row.values["loss"], row.values["rate"]) == (3, 2.5, 2.0)


def test_a_row_comes_by_itself(kept: list[Kept]) -> None:
    log = begun(every=0.01)
    log.steps = 1
    assert kept[-1].is_writing.wait(60)
    log.end()
    assert [row.steps for row in kept[-1].rows] == [1]  # and none more, since nothing has moved


def test_values_are_of_the_row_that_follows_them_alone(kept: list[Kept]) -> None:
    log = begun()
    log("loss", 1.0)
    step(log)
    step(log)
    log("loss", math.nan)
    log.end()
    first, second, third = kept[-1].rows
    assert first.values["loss"] == 1.0
    assert "loss" not in second.values
    assert math.isnan(third.values["loss"])


def test_a_slow_destination_loses_its_oldest_rows_and_says_how_many(
    kept: list[Kept], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(run_log, "_MOST_ROWS", 2)
    log = begun(count=2)
    slow, quick = kept[-2:]
    slow.may_write.clear()
    step(log)
    assert slow.is_writing.wait(60)
    for _ in range(4):
        step(log)
        while len(quick.rows) < log.steps:
            quick.is_writing.wait(60)
    assert log.dropped_rows == 2
    slow.may_write.set()
    log.end()
    assert [row.steps for row in slow.rows] == [1, 4, 5]
    assert [row.steps for row in quick.rows] == [1, 2, 3, 4, 5]
    assert [record.getMessage() for record in caplog.records] == [
        "the log kept:0 was too slow, or had failed: 2 rows are lost"
    ]
    assert [row.values["log/dropped_rows"] for row in quick.rows] == [0, 0, 0, 0, 1]


def test_a_failing_destination_gets_no_rows_and_others_do(kept: list[Kept], caplog: pytest.LogCaptureFixture) -> None:
    log = begun(count=2)
    broken, whole = kept[-2:]
    broken.error = OSError("the disk is full")
    for _ in range(3):
        step(log)
    log.end()
    assert broken.rows == []
    assert len(whole.rows) == 3
    assert [record.getMessage() for record in caplog.records] == [
        "the log kept:0 has failed, and gets no more rows: OSError: the disk is full",
        "the log kept:0 was too slow, or had failed: 3 rows are lost",
    ]


def test_a_destination_that_hangs_is_left_behind(
    kept: list[Kept], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(run_log, "_CLOSE_S", 0.0)
    log = begun()
    kept[-1].may_write.clear()
    step(log)
    assert kept[-1].is_writing.wait(60)
    step(log)
    log.end()
    assert "the log kept:0 is left behind, with 1 rows: it has not closed in time" in caplog.text
    kept[-1].may_write.set()
    log.writers[0].wait(time.monotonic() + 60.0)
    assert len(kept[-1].rows) == 2


def test_one_that_cannot_be_opened_closes_the_others(kept: list[Kept], monkeypatch: pytest.MonkeyPatch) -> None:
    log = StepLog(LogOptions(["kept:0", "kept:1"]))
    monkeypatch.setattr(kept[-1], "open", Mock(side_effect=OSError("taken")))
    with pytest.raises(OSError, match="taken"):
        log.begin()
    assert not kept[-2].is_open
    log.end()


def test_counts_that_fail_cost_a_row_and_not_the_run(kept: list[Kept], caplog: pytest.LogCaptureFixture) -> None:
    log = begun()
    log.steps = None  # type: ignore[assignment]
    log("loss", 2.0)
    log.make_row()
    log.steps = 1
    log.end()
    assert "a row of the log could not be made" in caplog.text
    assert [(row.steps, row.values["loss"]) for row in kept[-1].rows] == [(1, 2.0)]


def test_the_threads_end_with_a_run_that_nobody_has_closed(kept: list[Kept]) -> None:
    log = begun(every=0.01)
    threads = [log._thread, *(writer._thread for writer in log.writers)]
    del log
    gc.collect()
    for thread in threads:
        assert thread is not None
        thread.join(60)
        assert not thread.is_alive()
    assert not kept[-1].is_open


ROOT = Path(__file__).parents[3]


def report_of(elapsed_s: float, **busy_s: float) -> Report:
    return Report(elapsed_s, tuple(NodeReport(name, 1, busy, 0.0, 0.0) for name, busy in busy_s.items()), ())


def test_a_row_has_what_was_counted() -> None:
    returns = EpisodeReturns()
    returns.take(3, [10.0, 20.0, 60.0], [1, 2, 6])
    metrics = MetricsLogger()
    metrics.log_value(("filter", "mean"), 2.5, reduce="max")
    metrics.log_value("picks", 1.0, reduce=None)
    metrics.log_value("picks", 4.0, reduce=None)
    before = Counts(elapsed_s=10.0, steps=400, report=report_of(10.0, env=4.0))
    read = {"returns": returns, "metrics": metrics, "report": report_of(14.0, env=7.0, late=1.0)}
    now = Counts(elapsed_s=14.0, steps=700, updates=7, versions={"": 5}, lag=1, lost={"max_lag": 12}, **read)
    returned = {"rollout/ep_rew_mean": 30.0, "rollout/ep_len_mean": 3.0, "rollout/episodes": 3}
    timed = {"time/iterations": 7, "time/time_elapsed": 14.0, "time/fps": 50.0, "time/fps_now": 75.0}
    acted = {"policy/version": 5, "policy/lag": 1, "lost/max_lag": 12, "busy/env": 0.75, "busy/late": 0.25}
    logged = {"metrics/filter/mean": 2.5, "metrics/picks": 2.5, "time/total_timesteps": 700}
    assert figures_of(now, before) == {**returned, **timed, **acted, **logged}


def test_what_is_not_known_yet_is_left_out() -> None:
    metrics = MetricsLogger()
    metrics.log_value("cleared", 1.0, clear_on_reduce=True)
    metrics.reduce()
    counts = Counts(elapsed_s=1.0, metrics=metrics, report=report_of(1.0))
    names = {"rollout/episodes", "time/total_timesteps", "time/iterations", "time/time_elapsed"}
    assert figures_of(counts, counts).keys() == names | {"time/fps", "time/fps_now"}


OF_TABLE = ("time/fps", "busy/env", "metrics/x", "policy/version/hunter", "steps", "time", "global_step")
NO_NAMES = ("", None, ("train", "loss"), ["train", "loss"], "train\nloss")


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        *((name, 1.0, f"'{name}' was to be logged, which rollflow logs itself") for name in OF_TABLE),
        *((name, 1.0, "expected a text such as 'train/loss'") for name in NO_NAMES),
        ("loss", "high", "'loss' was given 'high', expected one number"),
        ("loss", torch.zeros(2), "expected one number"),
    ],
)
def test_what_cannot_be_logged_is_refused_also_without_a_destination(name: Any, value: Any, text: str) -> None:
    with pytest.raises(MetricsError, match=text):
        StepLog(LogOptions())(name, value)


@pytest.mark.parametrize("name", ["train/loss", "times", "busyness", "rollout/ep_rew_max", "log"])
def test_other_names_are_free(name: str) -> None:
    check_own_name(name)
    assert figure_of(name) is OWN


def test_the_reference_page_has_the_table() -> None:
    rows = [
        [cell.strip().strip("`") for cell in line.strip("|").split("|")]
        for line in (ROOT / "docs/reference/metrics.md").read_text().splitlines()
        if line.startswith("| `") and line.count("|") == 5
    ]
    assert rows == [[figure.name, *shown(figure), figure.text] for figure in (*FIGURES, OWN)]


def shown(figure: Figure) -> list[str]:
    """Prometheus' name, as a query has it, and its label."""
    return [figure.exported + ("_total" if figure.kind == "counter" else ""), figure.label]


VALUES = {"time/fps": 1000.0, "time/fps_now": 1234.6, "rollout/ep_rew_mean": 20.5, "policy/version": 7.0}


def row(updates: int, of: int | None = None, **values: float) -> Row:
    return Row(100 * updates, updates, 1000.0, 2.0 * updates, {**VALUES, **values}, of)


def opened() -> Progress:
    progress = Progress("")
    progress.open()
    return progress


PIECES = {"env_to_module": "MeanStdFilter"}


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({}, "0 steps/s"),
        (VALUES, "1,235 steps/s, return 20.5, version 7"),
        ({**VALUES, "busy/env": 0.05, "busy/module": 0.09}, "1,235 steps/s, return 20.5, version 7"),
        ({"time/fps": 5.0, "time/fps_now": 0.0}, "5 steps/s"),
        ({"time/fps_now": 10.0, "busy/env": 0.25, "busy/caller": 0.75}, "10 steps/s, caller 75% busy"),
        ({"policy/version/a": 3.0, "policy/version/b": 5.0}, "0 steps/s, versions 3 to 5"),
        ({"policy/version/a": 3.0, "policy/version/b": 3.0}, "0 steps/s, version 3"),
        ({"busy/env": 0.2, "busy/env_to_module": 0.75}, "0 steps/s, env_to_module 75% busy (most in MeanStdFilter)"),
    ],
)
def test_a_row_in_words(values: dict[str, float], text: str) -> None:
    assert text_of(Row(0, 0, 0.0, 0.0, values, pieces=PIECES)) == text


def test_a_pipe_gets_the_first_row_a_minute_later_another_and_the_last(capsys: pytest.CaptureFixture[str]) -> None:
    times = [5.0]  # the newest last
    progress = opened()
    lines = []
    with waiting(clock=lambda: times[-1]):
        for updates, now in ((1, 5.0), (2, 64.9), (3, 65.0), (4, 66.0)):
            times.append(now)
            progress.write(row(updates, of=5))
            lines.append(capsys.readouterr().err)
    progress.close()
    words = "1,235 steps/s, return 20.5, version 7\n"
    assert lines == [f"1 of 5 updates in 2 s: {words}", "", f"3 of 5 updates in 6 s: {words}", ""]
    last = words.replace("1,235", "1,000")  # of the whole run: nothing may have been stepped since the row before
    assert capsys.readouterr().err == f"4 of 5 updates in 8 s: {last}"


@pytest.mark.parametrize("environment", [{}, {"FORCE_COLOR": "1", "TERM": "dumb"}], ids=["pipe", "dumb terminal"])
def test_nothing_is_written_twice_and_nothing_without_a_row(
    environment: dict[str, str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    opened().close()
    assert capsys.readouterr().err == ""
    progress = opened()
    progress.write(row(1))
    progress.close()
    assert capsys.readouterr().err == "1 updates in 2 s: 1,235 steps/s, return 20.5, version 7\n"


def test_a_terminal_shows_the_time_left(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    progress = opened()
    progress.write(row(1, of=5))
    sys.stdout.write("a program's own line\n")
    progress.write(row(2, of=5))
    progress.close()
    shown = capsys.readouterr()
    assert "2/5" in shown.err
    assert "1,235 steps/s, return 20.5, version 7" in shown.err
    assert shown.err.rindex("1,000 steps/s") > shown.err.rindex("1,235 steps/s")
    assert "a program's own line" in shown.out + shown.err


@pytest.mark.parametrize("kind", ["batches", "fragments"])
def test_a_loop_shows_its_progress(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    with Rollout("CartPole-v1", num_envs=2, fragment_length=8, num_fragments=3, seed=0) as rollout:
        assert len(list(getattr(rollout, kind)(progress=True))) == 3
        assert list(getattr(rollout, kind)(progress=True)) == []  # another loop has the same line
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("3 of 3 updates in ")
    assert " steps/s, " in last


def test_progress_that_was_not_asked_for_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    with Rollout("CartPole-v1", fragment_length=8, num_fragments=1, seed=0) as rollout:
        with pytest.raises(ValueError, match="progress is 1, expected True or False"):
            rollout.batches(progress=1)  # type: ignore[arg-type]
        assert len(list(rollout.batches(progress=False))) == 1
        assert rollout.log.writers == []
    assert capsys.readouterr().err == ""
