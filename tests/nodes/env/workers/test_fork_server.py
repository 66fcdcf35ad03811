"""Worker processes that are forked off a server, beside those that import for themselves: they are alike."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import forkserver
from multiprocessing.connection import Listener
from pathlib import Path
from typing import Any

import psutil
import pytest
from leftovers import LONGEST_S

from rollflow.nodes.env.workers import worker_process
from rollflow.nodes.env.workers.worker_process import WorkerProcess

MODULE = "asked_worker"  # which imports little
LOOK = """
import os, signal, sys
found = {
    "group": os.getpgid(0) == os.getpid(),
    "variables": dict(os.environ),
    "folder": os.getcwd(),
    "path": sys.path,
    "argv": sys.argv,
    "descriptors": len(os.listdir("/proc/self/fd")),
    "stdin": os.readlink("/proc/self/fd/0"),
    "outputs": [os.readlink(f"/proc/self/fd/{fd}") for fd in (1, 2)],
    "blocked": [int(each) for each in signal.pthread_sigmask(signal.SIG_BLOCK, [])],
    "threads": len(os.listdir("/proc/self/task")),
}
"""
HOLD = "import subprocess; found = subprocess.Popen(['sleep', '600']).pid"

either = pytest.mark.parametrize("preload", [MODULE, None], ids=["forked", "spawned"])


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@contextmanager
def worker(preload: str | None, module: str = MODULE) -> Iterator[WorkerProcess]:
    process = WorkerProcess(module, 1, preload=preload)
    try:
        yield process
    finally:
        process.kill()


def found_by(process: WorkerProcess, program: str) -> Any:
    """What a program finds in a worker."""
    [sock] = process.sockets
    sock.sendall(program.encode())
    return json.loads(sock.recv(1 << 20))


def is_forked(process: WorkerProcess) -> bool:
    return psutil.Process(process.pid).ppid() != os.getpid()


@either
def test_a_process_is_as_its_starter(preload: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with worker(preload):  # a server goes on
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("NEW", "1")
        monkeypatch.setattr(sys, "argv", ["here", "--now"])
        monkeypatch.syspath_prepend(str(tmp_path))
        with worker(preload) as process:
            assert is_forked(process) == (preload is not None)
            found = found_by(process, LOOK)
    assert found["group"]
    assert found["variables"] == dict(os.environ)
    assert (found["folder"], found["path"], found["argv"]) == (str(tmp_path), sys.path, ["here", "--now"])
    assert (found["stdin"], found["outputs"]) == (os.devnull, [os.readlink(f"/proc/self/fd/{fd}") for fd in (1, 2)])
    assert (found["blocked"], found["threads"]) == ([], 1)
    assert found["descriptors"] <= 9  # up to five of any process, pipe, stacks and socket, and the one that lists


@either
def test_processes_draw_numbers_of_their_own(preload: str | None) -> None:
    draw = "import random, numpy; found = [random.random(), numpy.random.random()]"
    with worker(preload) as first, worker(preload) as second:
        assert all(ours != others for ours, others in zip(found_by(first, draw), found_by(second, draw), strict=True))


@either
@pytest.mark.parametrize(
    ("program", "end"),
    [
        ("", "exited with code 0"),
        ("raise SystemExit(3)", "exited with code 3"),
        ("raise SystemExit('no')", "exited with code 1"),
        ("1 / 0", "exited with code 1"),
        ("import os; os.kill(os.getpid(), 11)", "was killed by SIGSEGV"),
    ],
)
def test_how_a_process_has_ended_is_known(preload: str | None, program: str, end: str) -> None:
    with worker(preload) as process:
        process.sockets[0].sendall(program.encode() or b"pass")
        process.sockets[0].shutdown(1)
        assert process.has_ended(LONGEST_S)
        assert process.ended() == end


@either
def test_what_is_to_be_called_at_its_exit_is_called(preload: str | None, tmp_path: Path) -> None:
    path = tmp_path / "written"
    with worker(preload) as process:
        found_by(process, f"import atexit, pathlib; atexit.register(pathlib.Path({str(path)!r}).touch)")
        process.sockets[0].close()
        assert process.ended() == "exited with code 0"
    assert path.exists()


@pytest.mark.slow
@either
@pytest.mark.parametrize("ends_first", [False, True])
def test_what_a_process_has_started_ends_with_it(preload: str | None, ends_first: bool) -> None:
    with worker(preload) as process:
        child = psutil.Process(found_by(process, HOLD))
        if ends_first:
            os.kill(process.pid, signal.SIGKILL)
            assert process.has_ended(LONGEST_S)
    assert psutil.wait_procs([child], timeout=LONGEST_S)[1] == []


@either
def test_multiprocessing_stays_as_the_program_has_it(preload: str | None) -> None:
    before = dict(os.environ)
    with worker(preload):
        assert dict(os.environ) == before
        assert forkserver._forkserver._preload_modules == ["__main__"]  # type: ignore[attr-defined]
        assert forkserver._forkserver._forkserver_pid is None  # type: ignore[attr-defined]


@pytest.mark.slow
def test_workers_go_on_when_their_server_is_killed_and_another_one_comes() -> None:
    with worker(MODULE) as process:
        server = psutil.Process(process.pid).parent()
        assert server is not None
        server.kill()
        assert not process.has_ended(0.0)
        with worker(MODULE) as next_one:
            assert psutil.Process(next_one.pid).parent() not in (None, server, psutil.Process())
        process.sockets[0].close()
        assert process.ended() == "has ended, and nobody knows how"


@pytest.mark.parametrize("why", ["threads of a library", "threads of an import", "system"])
def test_a_process_imports_for_itself_if_a_forked_one_would_differ(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_process, "_servers", {})
    if why == "threads of a library":
        monkeypatch.setenv("OMP_NUM_THREADS", "2")
    elif why == "system":
        monkeypatch.delattr(os, "pidfd_open")
    module = "threaded_worker" if why == "threads of an import" else MODULE
    with worker(module, module) as process:
        assert not is_forked(process)
        assert found_by(process, "found = 7") == 7
    assert not any(worker_process._servers.values())
    Listener(family="AF_UNIX").close()  # a server that was stopped has left the folder of sockets alone


@pytest.mark.slow
def test_a_server_ends_with_its_program_though_a_fork_of_that_goes_on() -> None:
    program = f"""
import os, signal, sys
sys.path[:] = {sys.path!r}
from rollflow.nodes.env.workers import worker_process
worker_process.WorkerProcess({MODULE!r}, 1, preload={MODULE!r}).kill()
if os.fork():
    print(worker_process._servers[{MODULE!r}]._forkserver_pid, flush=True)
signal.pause()
"""
    program_process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, process_group=0)
    with program_process:
        assert program_process.stdout is not None
        server = psutil.Process(int(program_process.stdout.readline()))
        program_process.kill()
        assert not psutil.wait_procs([server], timeout=LONGEST_S)[1]
        os.killpg(program_process.pid, signal.SIGKILL)


SCRIPT = """
import gymnasium as gym
from rollflow import Rollout

class Mine(gym.Env):
    observation_space, action_space = gym.spaces.Box(-1, 1), gym.spaces.Discrete(2)
    def reset(self, **_):
        return self.observation_space.sample(), {}
    def step(self, action):
        return self.observation_space.sample(), 1.0, False, False, {}

with Rollout(Mine, where="processes", fragment_length=4, num_fragments=1) as rollout:
    print(float(next(iter(rollout.batches()))["rewards"].sum()))
"""


@pytest.mark.slow
@pytest.mark.parametrize("source", ["file", "stdin", "argument"])
def test_a_script_without_a_guard_has_workers_for_what_it_defines(source: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    arguments = {"file": ["script.py"], "stdin": ["-"], "argument": ["-c", SCRIPT]}[source]
    options: Any = {"input": SCRIPT if source == "stdin" else "", "cwd": tmp_path, "timeout": LONGEST_S}
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False, **options)
    assert (done.stdout, done.stderr) == ("4.0\n", "")
