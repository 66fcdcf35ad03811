"""However a run ends: no process, no thread, no descriptor, no memory, and nothing that has a name is left."""

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import anyio.to_thread
import psutil
import pytest
from held_envs import LONGEST_S, Held, await_held, await_that
from leftovers import held_here, named_memory, processes_of, shared_mappings
from numbered_module import NumberedEnv, NumberedModule

from rollflow import Rollout, Timeouts

pytestmark = pytest.mark.slow

WORKERS = {"inline": 0, "threads": 0, "processes": 2, "rollouts": 2}  # what auto has is its own affair
ENDINGS = ["left", "ahead", "error", "never entered"]

PROGRAM = """
import sys, time
from rollflow import Rollout

with Rollout("CartPole-v1", num_envs=4, where=sys.argv[1], prefetch=int(sys.argv[2])) as rollout:
    for batch in rollout.batches():
        print("running", flush=True)
"""


def ran(where: str, ending: str) -> None:
    options: Any = {"num_envs": 4, "lanes": 2, "fragment_length": 8, "seed": 0, "prefetch": int(ending == "ahead")}
    children, mappings = processes_of(), shared_mappings()
    rollout = Rollout("CartPole-v1", where=where, **options)  # type: ignore[arg-type]
    if ending == "never entered":
        return
    with rollout:
        batches = iter(rollout.batches())
        for _ in range(3):
            next(batches)
        if where in WORKERS:
            assert (shared_mappings() > mappings) == (WORKERS[where] > 0)
            assert len(processes_of() - children) == WORKERS[where]
        if ending == "error":
            raise ZeroDivisionError


@pytest.mark.parametrize(
    ("where", "ending"), [*((where, ending) for where in WORKERS for ending in ENDINGS), ("auto", "left")]
)
def test_nothing_is_left_here(where: str, ending: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = held_here()
    with suppress(ZeroDivisionError):
        ran(where, ending)
    assert held_here() == before


def test_a_thread_of_trio_that_still_works_is_noticed() -> None:
    began, go_on = threading.Event(), threading.Event()

    def work() -> None:
        began.set()
        go_on.wait()

    async def leave() -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(partial(anyio.to_thread.run_sync, work, abandon_on_cancel=True))
            await anyio.to_thread.run_sync(began.wait)
            tasks.cancel_scope.cancel()

    before = held_here()
    try:
        anyio.run(leave, backend="trio")
        left = held_here()["threads"]
    finally:
        go_on.set()
    assert len(set(left) - set(before["threads"])) == 1


@pytest.mark.parametrize("where", ["threads", "processes", "rollouts"])
def test_nothing_is_left_of_an_error_in_an_event_loop(where: Any) -> None:
    async def broken() -> None:
        async with Rollout("CartPole-v1", num_envs=4, lanes=2, where=where, prefetch=1) as rollout:
            async for _ in rollout.batches():
                raise ZeroDivisionError

    before = processes_of()
    with pytest.raises(ZeroDivisionError):
        anyio.run(broken)
    assert processes_of() <= before


@pytest.mark.wait_times(close_s=0.1)
@pytest.mark.parametrize("drains", [False, True])
def test_leaving_waits_for_no_environment_that_hangs(tmp_path: Path, drains: bool) -> None:
    options: Any = {"module": NumberedModule(), "fragment_length": 2, "timeouts": Timeouts(step=None), "seed": 0}
    with Rollout(partial(Held, 0, tmp_path, steps=[2]), where="processes", prefetch=1, **options) as rollout:
        next(iter(rollout.fragments()))
        await_held(tmp_path, 0)
        if drains:
            rollout.drain()
        began = time.monotonic()
    assert time.monotonic() - began < LONGEST_S / 2


def running(source: str, *args: str, **more: str) -> tuple[subprocess.Popen[str], str]:
    """A program that is at work, with more in its environment, and the first line that it has said."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **more}
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": env}
    program = subprocess.Popen([sys.executable, "-c", source, *args], **pipes)
    assert program.stdout is not None
    return program, program.stdout.readline().strip()


class Program(NamedTuple):
    """A program that is at work.

    folder     where it would put temporary files; its processes are known by it
    workers    processes that it has started
    named      what it and they have in the folder of shared memory
    """

    process: subprocess.Popen[str]
    folder: Path
    workers: list[psutil.Process]
    named: set[str]

    def await_end(self) -> str:
        """Wait until all of it has ended: what it said as an error. Fails where it leaves something behind."""
        _, told = self.process.communicate(timeout=60)
        _, left = psutil.wait_procs(self._processes(), timeout=60)
        assert left == []
        assert [path for path in self.named if os.path.exists(path)] == []
        assert os.listdir(self.folder) == []
        return told

    def _processes(self) -> list[psutil.Process]:
        """All that were started with its environment, whoever is their parent by now."""
        found = []
        for each in psutil.process_iter():
            with suppress(psutil.Error):
                if each.environ().get("TMPDIR") == str(self.folder):
                    found.append(each)
        return found


def started(where: str, prefetch: int, folder: Path) -> Program:
    """A program that is at work in some place."""
    process, told = running(PROGRAM, where, str(prefetch), TMPDIR=str(folder))
    assert told == "running"
    workers = list(processes_of(process.pid))
    assert len(workers) == WORKERS[where]
    return Program(process, folder, workers, named_memory([process.pid, *(worker.pid for worker in workers)]))


@pytest.mark.parametrize(
    ("where", "prefetch"), [("inline", 0), ("inline", 2), ("threads", 0), ("processes", 0), ("rollouts", 2)]
)
def test_an_interrupt_ends_everything(where: str, prefetch: int, tmp_path: Path) -> None:
    program = started(where, prefetch, tmp_path)
    program.process.send_signal(signal.SIGINT)
    assert "KeyboardInterrupt" in program.await_end()
    assert program.process.returncode in (1, -signal.SIGINT)


@pytest.mark.parametrize("where", ["inline", "processes", "rollouts"])
def test_nothing_is_left_of_a_process_that_is_killed(where: str, tmp_path: Path) -> None:
    program = started(where, 1, tmp_path)
    program.process.kill()
    program.await_end()


def test_a_process_that_is_stopped_ends_with_the_pipe_it_watches() -> None:
    """Nothing wakes it: the one that started it is still there, so that its process group is not an orphaned one."""
    source = """
import sys, time
from rollflow.nodes.env.workers.worker_process import end_with_parent

end_with_parent(int(sys.argv[1]))
print("running", flush=True)
time.sleep(100)
"""
    life, ours = os.pipe()
    program = subprocess.Popen(
        [sys.executable, "-c", source, str(life)], stdout=subprocess.PIPE, pass_fds=[life], process_group=0
    )
    os.close(life)
    assert program.stdout is not None
    assert program.stdout.readline() == b"running\n"
    program.send_signal(signal.SIGSTOP)
    await_that(lambda: psutil.Process(program.pid).status() == psutil.STATUS_STOPPED)
    os.close(ours)
    program.communicate(timeout=60)
    assert program.returncode == -signal.SIGKILL


def test_workers_end_with_a_process_that_is_killed_and_has_a_child() -> None:
    """The child has copies of all that the process had; the workers end all the same."""
    told = 'print("running", flush=True)'
    assert told in PROGRAM
    forks = PROGRAM.replace(told, "print(os.fork() or time.sleep(100), flush=True)").replace(
        "import sys", "import os, sys"
    )
    program, child = running(forks, "processes", "1")
    try:
        workers = [each for each in processes_of(program.pid) if each.pid != int(child)]
        assert len(workers) == 2
        program.kill()
        assert psutil.wait_procs(workers, timeout=60)[1] == []
        assert psutil.pid_exists(int(child))
    finally:
        os.kill(int(child), signal.SIGKILL)
        program.communicate(timeout=60)


@pytest.mark.parametrize("where", ["processes", "rollouts"])
def test_a_child_that_closes_its_copy_of_a_rollout_ends_no_workers(where: Any) -> None:
    options: Any = {"num_envs": 2, "lanes": 2, "fragment_length": 4, "seed": 0}
    with Rollout("CartPole-v1", where=where, workers=2, timeouts=Timeouts(step=20.0), **options) as rollout:
        fragments = iter(rollout.fragments())
        next(fragments)
        child = os.fork()
        if not child:
            try:
                rollout.environments.close()
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        for _ in range(4):
            next(fragments)
        assert rollout.lost == {}


class Forks(NumberedEnv):
    """Has a process of its own beside it, which has copies of all that the worker has."""

    def __init__(self, slot: int, folder: Path) -> None:
        super().__init__(slot)
        child = os.fork()
        if not child:
            time.sleep(200)
            os._exit(0)
        with (folder / "pids").open("a") as file:
            file.write(f"{os.getpid()} {child}\n")


@pytest.mark.parametrize("where", ["processes", "rollouts"])
def test_what_an_environment_forked_ends_with_its_worker_and_hides_nothing(tmp_path: Path, where: Any) -> None:
    def await_end(lives: int) -> None:
        pids = (tmp_path / "pids").read_text().split()
        assert len(pids) == 2 * lives
        until = time.monotonic() + 60
        while any(map(is_alive, pids)):
            assert time.monotonic() < until
            time.sleep(0.01)

    options: Any = {"module": NumberedModule(), "fragment_length": 4, "seed": 0}
    with Rollout(partial(Forks, 0, tmp_path), where=where, timeouts=Timeouts(step=None), **options) as rollout:
        fragments = iter(rollout.fragments())
        next(fragments)
        worker = int((tmp_path / "pids").read_text().split()[0])
        os.kill(worker, signal.SIGKILL)
        assert [next(fragments).num_steps for _ in range(2)] == [4, 4]
    await_end(2)


def is_alive(pid: str) -> bool:
    """Return True while a process runs; a zombie doesn't."""
    try:
        return psutil.Process(int(pid)).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
