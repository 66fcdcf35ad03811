"""Processes that are forked off a fork server, each asked and struck as it stands."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from leftovers import LONGEST_S, descriptors_here

from rollflow.nodes.env.workers import fork_server
from rollflow.nodes.env.workers.fork_server import ForkedProcess, fork_off

TELL = """
import json, os, sys
import numpy
told = {
    "group": os.getpgid(0),
    "variables": dict(os.environ),
    "folder": os.getcwd(),
    "cores": sorted(os.sched_getaffinity(0)),
    "drawn": numpy.random.random(),
    "has_torch": "torch" in sys.modules,
}
with open(descriptors[0], "w") as file:
    file.write(json.dumps(told))
"""
WAIT = "import os; os.read(descriptors[0], 1)"  # until the other end is closed


@pytest.fixture(autouse=True)
def _fast_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers of these tests import nothing large, and are shared with nobody else's."""
    monkeypatch.setattr(fork_server, "_SERVER", fork_server._SERVER.replace("program, desc", f"{PRELOAD}program, desc"))


PRELOAD = "import rollflow.nodes.env.workers.fork_server as f; f._PRELOADED = ()\n"


@contextlib.contextmanager
def forked(program: str, environment: dict[str, str] | None = None) -> Iterator[tuple[ForkedProcess, int]]:
    """A process with one end of a pipe, and this process's end."""
    ours, theirs = os.pipe() if program is not WAIT else reversed(os.pipe())
    process = fork_off(program, [theirs], dict(os.environ) if environment is None else environment)
    os.close(theirs)
    assert process is not None
    try:
        yield process, ours
    finally:
        process.kill()
        process.wait(LONGEST_S)
        with contextlib.suppress(OSError):
            os.close(ours)


def told(environment: dict[str, str]) -> tuple[int, Any]:
    """Number of a process, and what it has told."""
    with forked(TELL, environment) as (process, pipe):
        with open(pipe, closefd=False) as file:
            return process.pid, json.loads(file.read())


def server_of(process: ForkedProcess) -> psutil.Process:
    server = psutil.Process(process.pid).parent()
    assert server is not None
    return server


def test_a_process_is_as_if_it_had_been_started_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    variables = {**os.environ, "SAID": "so"}
    (pid, first), (_, second) = told(variables), told(variables)
    assert first["group"] == pid
    assert first["variables"] == variables
    assert (first["folder"], first["cores"]) == (str(tmp_path), sorted(os.sched_getaffinity(0)))
    assert first["drawn"] != second["drawn"]


def test_processes_of_one_environment_share_a_server_which_ends_with_the_last() -> None:
    with forked(WAIT) as (first, _):
        server = server_of(first)
        with (
            forked(WAIT) as (second, _),
            forked(WAIT, {**os.environ, "RAY_JOB_ID": "7", "CUDA_VISIBLE_DEVICES": "1"}) as (third, _),
            forked(WAIT, {**os.environ, "OMP_NUM_THREADS": "7"}) as (other, _),
        ):
            assert server_of(second) == server_of(third) == server != server_of(other)
            assert server.pid != os.getpid()
        assert server.is_running()
    assert psutil.wait_procs([server], timeout=LONGEST_S)[1] == []


@pytest.mark.parametrize(
    ("program", "code"),
    [("pass", 0), ("raise SystemExit(3)", 3), ("import os; os.kill(os.getpid(), 11)", -11), ("1 / 0", 1)],
)
def test_how_a_process_has_ended_is_known(program: str, code: int) -> None:
    with forked(program) as (process, _):
        assert process.wait(LONGEST_S) == code
        assert process.wait() == process.returncode == code
        process.kill()  # does nothing


def test_its_number_is_taken_until_its_end_has_been_waited_for() -> None:
    with forked("pass") as (process, _):
        known = psutil.Process(process.pid)
        while known.status() != psutil.STATUS_ZOMBIE:
            pass
        with forked(WAIT):  # the server has gone on
            assert known.status() == psutil.STATUS_ZOMBIE
            process.wait(LONGEST_S)
            assert psutil.wait_procs([known], timeout=LONGEST_S)[1] == []


def test_a_process_that_goes_on_is_waited_for_as_long_as_is_said() -> None:
    with forked(WAIT) as (process, pipe):
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.01)
        assert process.returncode is None
        os.close(pipe)
        assert process.wait(LONGEST_S) == 0


def test_programs_go_on_when_their_server_is_killed_and_another_one_comes() -> None:
    with forked(WAIT) as (process, _):
        server = server_of(process)
        server.kill()
        psutil.wait_procs([server], timeout=LONGEST_S)
        assert psutil.Process(process.pid).is_running()
        with forked(WAIT) as (next_one, _):
            assert server_of(next_one) != server
        process.kill()
        assert process.wait(LONGEST_S) == -signal.SIGKILL


def test_a_server_outlives_whoever_has_started_it() -> None:
    program = (
        f"import sys, time; sys.path[:] = {sys.path!r}\n"
        f"import rollflow.nodes.env.workers.fork_server as f\n"
        f"f._SERVER = {fork_server._SERVER!r}\n"
        "import os; read, write = os.pipe()\n"
        f"print(f.fork_off({WAIT!r}, [read], {dict(os.environ)!r}).pid, flush=True); time.sleep(600)"
    )
    starter = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert starter.stdout is not None
    first = psutil.Process(int(starter.stdout.readline()))
    with forked(WAIT) as (process, _):
        server = server_of(process)
        assert first.parent() == server
        starter.kill()
        starter.communicate()
        assert psutil.wait_procs([first], timeout=LONGEST_S)[1] == []  # its end of the pipe is closed
        with forked(WAIT) as (another, _):
            assert server_of(another) == server


def test_many_threads_that_start_and_end_at_once_all_have_their_processes() -> None:
    failed = []

    def start() -> None:
        for _ in range(10):
            with forked("pass") as (process, _):
                if process.wait(LONGEST_S) != 0:
                    failed.append(process)

    before = descriptors_here()
    threads = [threading.Thread(target=start) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    assert descriptors_here() == before


def test_a_server_that_breaks_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fork_server, "_SERVER", "raise SystemExit('{listener} {path}')")
    assert fork_off("pass", [], {**os.environ, "BROKEN": "1"}) is None
