"""Processes that are forked off a fork server, each asked and struck as it stands."""

import contextlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from leftovers import LONGEST_S, descriptors_here
from remote_rollouts import await_that

from rollflow.nodes.env.workers import fork_server, forked_process
from rollflow.nodes.env.workers.forked_process import UNKNOWN_CODE, ForkedProcess, connected_server, fork_off
from rollflow.nodes.env.workers.worker_process import WorkerProcess

WRITE = "\nwith open(descriptors[0], 'w') as file:\n    file.write(json.dumps(found))\ndone.append(True)\n"
LOOK = """
import json, os, resource, sys
found = {
    "group": os.getpgid(0) == os.getpid(),
    "session": os.getsid(0),
    "variables": dict(os.environ),
    "folder": os.getcwd(),
    "cores": sorted(os.sched_getaffinity(0)),
    "files": resource.getrlimit(resource.RLIMIT_NOFILE),
    "descriptors": len(os.listdir("/proc/self/fd")),
}
"""
DRAW = """
import json, random, numpy, torch
found = [random.random(), numpy.random.random(), torch.rand(1).item()]
"""
WAIT = "import os; os.read(descriptors[0], 1)"  # until the other end is closed
LIGHT = "import rollflow.nodes.env.workers.fork_server as f; f._PRELOADED = ()\n"  # before a server begins


@pytest.fixture(autouse=True)
def _own_servers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers of these tests import nothing large, but where a test is marked, and are shared with no other test."""
    monkeypatch.setenv("TEST", request.node.name)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    if not request.node.get_closest_marker("slow"):
        first = "program, descriptors ="
        monkeypatch.setattr(forked_process, "_SERVER", forked_process._SERVER.replace(first, LIGHT + first))


@contextlib.contextmanager
def forked(program: str, **variables: str) -> Iterator[tuple[ForkedProcess, int]]:
    """A process with one end of a pipe, and this process's end: that which is read, but for `WAIT`."""
    theirs, ours = reversed(os.pipe()) if program is not WAIT else os.pipe()
    environment = {**os.environ, **variables}
    server = connected_server(environment)
    assert server is not None
    process = fork_off(server, program, [theirs], environment)
    os.close(theirs)
    assert process is not None
    try:
        yield process, ours
    finally:
        process.kill_group()
        process.wait(LONGEST_S)
        with contextlib.suppress(OSError):
            os.close(ours)


def found_by(program: str, **variables: str) -> Any:
    """What a program finds in its process."""
    with forked(program + WRITE, **variables) as (process, pipe), open(pipe, closefd=False) as file:
        found = json.loads(file.read())
        assert process.wait(LONGEST_S) == 0
        return found


def server_of(process: ForkedProcess) -> psutil.Process:
    server = psutil.Process(process.pid).parent()
    assert server is not None
    return server


def test_a_process_is_as_if_it_had_been_started_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with forked(WAIT):  # its server goes on
        first = found_by(LOOK, RAY_JOB_ID="7")
        assert first["variables"] == {**os.environ, "RAY_JOB_ID": "7"}
        assert first["group"]
        assert first["session"] != os.getsid(0)
        assert tuple(first["files"]) == resource.getrlimit(resource.RLIMIT_NOFILE)
        assert (first["folder"], first["cores"]) == (os.getcwd(), sorted(os.sched_getaffinity(0)))
        monkeypatch.chdir(tmp_path)
        assert found_by(LOOK)["folder"] == str(tmp_path)
        with forked(WAIT), forked(WAIT):
            assert found_by(LOOK)["descriptors"] == first["descriptors"]  # it has none of the others'


@pytest.mark.slow
def test_processes_have_imported_torch_and_draw_numbers_of_their_own() -> None:
    with forked(WAIT):
        first, second = found_by(DRAW), found_by(DRAW)
    assert all(ours != others for ours, others in zip(first, second, strict=True))
    assert found_by("import json, sys; found = 'torch' in sys.modules")


def test_processes_that_would_import_the_same_share_a_server_which_ends_with_the_last() -> None:
    with forked(WAIT) as (first, _):
        server = server_of(first)
        with (
            forked(WAIT) as (second, _),
            forked(WAIT, RAY_JOB_ID="7", CUDA_VISIBLE_DEVICES="1") as (third, _),
            forked(WAIT, TEST="another") as (other, _),
        ):
            assert server_of(second) == server_of(third) == server != server_of(other)
            assert server.pid != os.getpid()
            assert server not in psutil.Process().children()
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
        process.kill_group()  # does nothing


def test_what_is_to_be_called_at_its_exit_is_called(tmp_path: Path) -> None:
    path = tmp_path / "written"
    with forked(f"import atexit, pathlib; atexit.register(pathlib.Path({str(path)!r}).touch); done.append(True)") as (
        process,
        _,
    ):
        assert process.wait(LONGEST_S) == 0
    assert path.exists()


def test_its_number_is_taken_until_its_end_has_been_waited_for() -> None:
    with forked("pass") as (process, _):
        known = psutil.Process(process.pid)
        await_that(lambda: known.status() == psutil.STATUS_ZOMBIE)
        with forked(WAIT):  # the server has gone on
            assert known.status() == psutil.STATUS_ZOMBIE
            process.wait(LONGEST_S)
            assert psutil.wait_procs([known], timeout=LONGEST_S)[1] == []


def test_a_process_that_goes_on_is_waited_for_as_long_as_is_said() -> None:
    with forked(WAIT) as (process, pipe):
        for seconds in (0, 0.01):
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(seconds)
        assert process.returncode is None
        os.close(pipe)
        assert process.wait(LONGEST_S) == 0


def test_a_process_is_killed_with_its_group() -> None:
    program = "import subprocess; print(subprocess.Popen(['sleep', '600']).pid, file=open(descriptors[0], 'w'));" + (
        "import signal; signal.pause()"
    )
    with forked(program) as (process, pipe):
        with open(pipe, closefd=False) as file:
            child = psutil.Process(int(file.readline()))
        process.kill_group()
        assert process.wait(LONGEST_S) == -signal.SIGKILL
        assert psutil.wait_procs([child], timeout=LONGEST_S)[1] == []


def test_programs_go_on_when_their_server_is_killed_and_another_one_comes() -> None:
    with forked(WAIT) as (process, pipe):
        server = server_of(process)
        server.kill()
        psutil.wait_procs([server], timeout=LONGEST_S)
        assert psutil.Process(process.pid).is_running()
        with forked(WAIT) as (next_one, _):
            assert server_of(next_one) != server
        os.close(pipe)
        assert process.wait(LONGEST_S) == UNKNOWN_CODE
        process.kill_group()  # whose number it is now is not known


def test_a_server_that_stands_still_holds_up_nobody_who_waits_for_an_end() -> None:
    with forked(WAIT) as (process, _):
        server = server_of(process)
        server.suspend()
        process.kill_group()
        assert process.wait(LONGEST_S) == UNKNOWN_CODE
        server.resume()
    assert psutil.wait_procs([server], timeout=LONGEST_S)[1] == []


def test_a_client_that_stands_still_in_its_order_holds_up_nobody() -> None:
    with forked(WAIT) as (process, _):
        server = connected_server(dict(os.environ))
        assert server is not None
        server.sendall(b"\x50\x00")
        assert found_by(LOOK)["group"]
        server.close()
        assert server_of(process).is_running()


def test_a_process_that_was_forked_off_a_client_keeps_no_number_taken() -> None:
    worker = WorkerProcess("rollflow.nodes.launch.program", 2, is_forked=True)
    known = psutil.Process(worker.pid)
    goes_on, ends = os.pipe()
    child = os.fork()
    if not child:
        os.close(ends)
        os.read(goes_on, 1)
        os._exit(0)
    worker.kill()
    assert psutil.wait_procs([known], timeout=LONGEST_S)[1] == []
    os.close(ends)
    os.close(goes_on)
    os.waitpid(child, 0)


def test_a_server_outlives_whoever_has_started_it() -> None:
    program = (
        f"import sys, time; sys.path[:] = {sys.path!r}\n"
        "import os; read, write = os.pipe()\n"
        "import rollflow.nodes.env.workers.forked_process as f\n"
        f"f._SERVER, environment = {forked_process._SERVER!r}, {dict(os.environ)!r}\n"
        f"process = f.fork_off(f.connected_server(environment), {WAIT!r}, [read], environment)\n"
        "print(process.pid, flush=True); time.sleep(600)"
    )
    starter = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert starter.stdout is not None
    first = psutil.Process(int(starter.stdout.readline()))
    with forked(WAIT) as (process, _):
        server = server_of(process)
        assert first.parent() == server
        starter.kill()
        starter.communicate()  # the server does not have its output open
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


def test_strangers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    with ours, theirs:
        fork_server.check_other(ours)
        monkeypatch.setattr(os, "getuid", lambda: 12345)
        with pytest.raises(PermissionError, match="at the other end, expected one of this user and container"):
            fork_server.check_other(ours)
        monkeypatch.undo()
        monkeypatch.setattr(fork_server, "namespaces", lambda pid: [pid])
        with pytest.raises(PermissionError, match="at the other end, expected one of this user and container"):
            fork_server.check_other(ours)


@pytest.mark.parametrize(
    "before",
    [
        "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()\n",  # may hold a lock
        "f._times_of_modules = iter(range(9)).__next__\n",  # other files are installed now
    ],
)
def test_a_server_whose_programs_would_not_be_as_they_should_refuses(
    before: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = "program, descriptors ="
    monkeypatch.setattr(forked_process, "_SERVER", forked_process._SERVER.replace(first, before + first))
    server = connected_server(dict(os.environ))
    assert server is not None
    assert fork_off(server, "pass", [], dict(os.environ)) is None


@pytest.mark.parametrize("broken", ["raise SystemExit", LIGHT + "f._PRELOADED = ('nothing',)\n"])
def test_a_server_that_breaks_is_tried_twice_and_no_more(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    first, starts = "program, descriptors =", []
    monkeypatch.setattr(forked_process, "_SERVER", forked_process._SERVER.replace(first, broken + "\n" + first))
    run = subprocess.run
    monkeypatch.setattr(subprocess, "run", lambda *args, **options: (starts.append(1), run(*args, **options))[1])
    before = descriptors_here()
    assert connected_server(dict(os.environ)) is None
    assert connected_server(dict(os.environ)) is None
    assert len(starts) == 2
    assert descriptors_here() == before


def test_nothing_is_forked_off_where_that_is_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    assert connected_server({**os.environ, "ROLLFLOW_FORK_SERVER": "0"}) is None
    assert connected_server({**os.environ, "OMP_NUM_THREADS": "2"}) is None  # threads that a fork would not have
    monkeypatch.setenv("ROLLFLOW_FORK_SERVER", "0")
    worker = WorkerProcess("rollflow.nodes.launch.program", 2, is_forked=True)
    assert psutil.Process(worker.pid).ppid() == os.getpid()
    worker.kill()


def test_a_system_without_what_it_takes_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "pidfd_open")
    assert connected_server(dict(os.environ)) is None
