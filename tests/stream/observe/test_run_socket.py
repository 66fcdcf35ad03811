"""Sockets of runs: what they answer, who finds them, and what is left of those that have ended or were killed."""

import gc
import json
import multiprocessing
import os
import select
import signal
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from leftovers import nothing_left

from rollflow.stream.observe import run_socket
from rollflow.stream.observe.run_socket import RunSocket, snapshot_at, snapshots

OTHER = """
import os, signal, sys
from rollflow.stream.observe.run_socket import RunSocket

class Run:
    def snapshot(self):
        return {"name": "another"}

run = Run()
socket = RunSocket(run.snapshot)
socket.start()
child = 0
if "fork" in sys.argv:
    child = os.fork()
if child or "fork" not in sys.argv:
    print(child, flush=True)
    sys.stdin.read()  # to the end of the test
elif "leaves" not in sys.argv:
    signal.pause()
"""


class Run:
    """Run that says what it was given."""

    def __init__(self, **said: Any) -> None:
        self.said = said

    def snapshot(self) -> dict[str, Any]:
        return self.said


pytestmark = pytest.mark.usefixtures("folder")


@contextmanager
def seen(run: Run) -> Iterator[RunSocket]:
    opened = RunSocket(run.snapshot)
    opened.start()
    try:
        yield opened
    finally:
        opened.stop()


@contextmanager
def another(*how: str) -> Iterator[tuple["subprocess.Popen[str]", int]]:
    """Process with a run, and the process that it has forked; both are killed at the end."""
    command = [sys.executable, "-W", "ignore", "-c", OTHER, *how]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        try:
            yield process, child
        finally:
            process.kill()
            if child and "leaves" not in how:
                os.kill(child, signal.SIGKILL)


def test_a_run_answers_as_often_as_it_is_asked(folder: Path) -> None:
    with seen(Run(name="mine", figures={"x": 1.5})):
        [first], [second] = snapshots(), snapshots()
    assert first["name"] == second["name"] == "mine"
    assert first["figures"] == {"x": 1.5}
    assert first["pid"] == os.getpid()
    assert first["began"] <= first["time"] <= second["time"]
    assert first["memory_bytes"] > 1 << 20
    assert Path(first["path"]).parent == folder


@nothing_left()
def test_nothing_is_left_of_a_run_that_has_ended(folder: Path) -> None:
    with seen(Run()) as opened:
        opened.start()  # again does nothing
        [path] = folder.iterdir()
        assert [stat.S_IMODE(each.stat().st_mode) for each in (folder, path)] == [0o700, 0o600]  # nobody else may ask
        opened.stop()
        opened.stop()
    assert not folder.exists()
    assert "rollflow snapshots" not in [thread.name for thread in threading.enumerate()]


def test_a_run_that_is_forgotten_is_gone(folder: Path) -> None:
    run = Run()
    opened = RunSocket(run.snapshot)
    opened.start()
    [thread] = [each for each in threading.enumerate() if each.name == "rollflow snapshots"]
    del run, opened
    gc.collect()
    thread.join(60)
    assert not folder.exists()


def test_several_runs_have_a_snapshot_each(folder: Path) -> None:
    with seen(Run(name="a")):
        with seen(Run(name="b")):
            assert sorted(each["name"] for each in snapshots()) == ["a", "b"]
        assert [each["name"] for each in snapshots()] == ["a"]
    assert snapshots() == []
    assert not folder.exists()


def test_an_empty_name_turns_it_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(run_socket.FOLDER, "")
    with seen(Run()):
        assert run_socket.run_folder() is None
        assert snapshots() == []
        assert "rollflow snapshots" not in [thread.name for thread in threading.enumerate()]


def test_the_folder_is_the_users_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(run_socket.FOLDER)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert run_socket.run_folder() == tmp_path / "rollflow-runs"
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "not there"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert run_socket.run_folder() == tmp_path / f"rollflow-runs-{os.getuid()}"


@pytest.mark.parametrize("kind", ["open to others", "a link", "a file", "too long"])
def test_a_folder_that_will_not_do_leaves_the_run_without_a_socket(
    kind: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "open to others":
        folder.mkdir()
        folder.chmod(0o770)
    elif kind == "a link":
        (tmp_path / "there").mkdir(mode=0o700)
        folder.symlink_to(tmp_path / "there")
    elif kind == "a file":
        folder.touch()
    else:
        monkeypatch.setenv(run_socket.FOLDER, str(tmp_path / ("long" * 25)))
    with seen(Run()) as opened:
        assert "rollflow snapshots" not in [thread.name for thread in threading.enumerate()]
        if kind != "too long":
            with pytest.raises(PermissionError, match="not this user's alone, expected a folder of mode 700"):
                snapshots()
        opened.stop()


def test_a_value_that_json_does_not_know_is_an_error_and_the_next_asker_gets_an_answer() -> None:
    run = Run(name="mine", figures={"x": object()})
    with seen(run):
        [found] = snapshots()
        run.said = {"name": "mine"}
        [after] = snapshots()
    assert found["error"] == "TypeError: Object of type object is not JSON serializable"
    assert found["pid"] == os.getpid()
    assert "name" not in found
    assert after["name"] == "mine"


def test_an_asker_that_reads_nothing_holds_nobody_up(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_socket, "_SEND_S", 0.5)
    with seen(Run(text="x" * (1 << 22))), socket.socket(socket.AF_UNIX) as idle:
        [path] = folder.iterdir()
        idle.connect(str(path))
        assert len(snapshot_at(path)["text"]) == 1 << 22


@pytest.mark.parametrize("how", [(), ("fork",)], ids=["alone", "with a child that holds its socket"])
def test_a_killed_process_leaves_a_socket_that_the_next_asker_removes(
    how: tuple[str, ...], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_socket, "ANSWER_S", 0.2)
    with another(*how) as (process, _):
        process.kill()
        process.wait()
        [path] = folder.iterdir()
        if not how:
            with pytest.raises(ConnectionRefusedError):
                snapshot_at(path)
        assert snapshots() == []
        assert list(folder.iterdir()) == []


def test_a_run_ends_while_a_process_that_it_has_forked_is_there() -> None:
    with seen(Run()) as opened:
        child = multiprocessing.get_context("fork").Process(target=signal.pause, daemon=True)
        child.start()
    assert opened._thread is not None
    assert not opened._thread.is_alive()
    child.kill()
    child.join()


def test_a_child_that_ends_takes_nothing_along(folder: Path) -> None:
    with another("fork", "leaves") as (_, child):
        await_end(child)
        assert [each["name"] for each in snapshots()] == ["another"]


def test_a_stopped_process_is_there_and_does_not_answer(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_socket, "ANSWER_S", 0.2)
    with another() as (process, _):
        os.kill(process.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        [found] = snapshots()
    told = {"error": "no answer in 0.2 s: its process is stopped, or held up"}
    assert found == {"pid": process.pid, "path": found["path"], **told}


def test_half_an_answer_is_none(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(folder / "1-x.sock"))
        listening.listen()

        def answer() -> None:
            with listening.accept()[0] as asking:
                asking.sendall(json.dumps({"name": "x"}).encode()[:-1])

        thread = threading.Thread(target=answer)
        thread.start()
        assert snapshots() == []
        thread.join()


def await_end(pid: int) -> None:
    """Wait until a process has ended, which its parent has not waited for."""
    poll_fd = os.pidfd_open(pid)
    try:
        assert select.select([poll_fd], [], [], 60.0)[0]
    finally:
        os.close(poll_fd)
