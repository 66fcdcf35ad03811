"""Progress for people: its words, what a terminal shows, and what a file or a pipe gets."""

import sys

import pytest

from rollflow import Rollout
from rollflow.nodes.logs.destinations import Progress, text_of
from rollflow.nodes.logs.figures import Row
from rollflow.stream.net.backoff import waiting

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
