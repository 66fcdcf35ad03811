"""`rollflow trace`: a trace of a run in another process."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from command_errors import Says
from held_envs import await_file
from serving_process import Program, command
from traces import assert_nested, events_of, flows, tracks

from rollflow import Rollout, Watch
from rollflow.cli.main import main
from rollflow.stream.observe import run_socket

RUN = """
import time
from rollflow import Rollout
with Rollout("CartPole-v1", num_envs=4, lanes=2, fragment_length=16, seed=0, where="threads") as rollout:
    for number, batch in enumerate(rollout.batches()):
        if number == 0:
            print("it runs", flush=True)
        time.sleep(0.02)  # an update
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("traced") / "runs"


@pytest.fixture(autouse=True)
def folder(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(run_socket.FOLDER, str(runs))
    monkeypatch.chdir(tmp_path)
    return runs


@pytest.fixture(scope="module")
def pid(runs: Path) -> Iterator[int]:
    """A process that runs a rollout for as long as the tests need it."""
    environment = {**os.environ, run_socket.FOLDER: str(runs)}
    with Program([sys.executable, "-c", RUN], stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stdout.readline() == "it runs\n"
            yield process.pid
        finally:
            process.kill()


@pytest.mark.slow
def test_a_run_in_another_process_is_traced(pid: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", str(pid), "0.5"]) == 0
    path = Path(f"rollflow-{pid}.trace.gz")
    assert capsys.readouterr().err == f"{path}: open it in https://ui.perfetto.dev or chrome://tracing\n"
    events = events_of(path)
    assert_nested(events)
    assert {event["pid"] for event in events} == {pid}
    assert {"env", "module", "learner_pipeline", "lane 0", "lane 1", "caller"} <= set(tracks(events))
    arrows = flows(events)
    assert any(ends for ends in arrows.values())
    assert all(len(ends) <= 1 for ends in arrows.values())
    assert events[-1]["name"] == "end of the trace"


@pytest.mark.slow
def test_ctrl_c_ends_the_trace_and_the_run_goes_on(pid: int, tmp_path: Path) -> None:
    with command("trace", pid, "600", "--to", "mine.trace") as process:
        while not Path("mine.trace").exists() or not Path("mine.trace").stat().st_size:
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    assert events_of(tmp_path / "mine.trace")[-1]["name"] == "end of the trace"
    assert main(["trace", str(pid), "0.1"]) == 0


@pytest.mark.slow
def test_a_process_that_was_forked_meanwhile_does_not_hold_up_the_end(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_socket, "_END_S", 1.0)
    path = tmp_path / "run.trace"
    with Rollout("CartPole-v1", fragment_length=8) as rollout, ThreadPoolExecutor() as threads:
        next(rollout.batches())
        [address] = folder.glob(f"{os.getpid()}-*.sock")
        traced = threads.submit(run_socket.trace_at, address, path, 0.1)
        await_file(path)
        child = os.fork()
        if child == 0:
            signal.pause()
        try:
            traced.result()
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    assert events_of(path)[-1]["name"] == "end of the trace"


def test_a_run_is_traced_by_one_at_a_time(tmp_path: Path, refused: Says) -> None:
    with Rollout("CartPole-v1", fragment_length=8, watch=Watch(trace=str(tmp_path / "run.trace"))) as rollout:
        next(rollout.batches())
        text = refused("trace", os.getpid(), "0.1")
        os.mkfifo(tmp_path / "pipe")
        assert refused("trace", os.getpid(), "0.1", "--to", "pipe").endswith(" or can't write pipe\n")
    assert f" writes no trace: it is being traced already, or can't write rollflow-{os.getpid()}.trace.gz" in text
    assert not list(tmp_path.glob("*.gz"))


@pytest.mark.slow
def test_several_runs_of_a_process_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    with Rollout("CartPole-v1") as one, Rollout("CartPole-v1") as two:
        assert one.is_running
        assert two.is_running
        assert main(["trace", str(os.getpid())]) == 1
    text = capsys.readouterr().err
    assert re.search(r"process \d+ has 2 runs, expected one of unix:\S+\.sock, unix:\S+\.sock", text)
