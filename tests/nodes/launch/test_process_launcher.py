"""The five verbs of a launcher, with processes of this machine."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import pytest
from leftovers import held_here, processes_of
from remote_rollouts import await_that
from small_program import call_of

from rollflow.nodes.env.workers.worker_process import WorkerProcess
from rollflow.nodes.launch.process_launcher import Handle, ProcessLauncher


@pytest.fixture(autouse=True)
def _left_before() -> None:
    _before.clear()
    _before.update(processes_of())


@contextmanager
def started(n: int, *words: str) -> Iterator[tuple[ProcessLauncher, list[Handle]]]:
    launcher = ProcessLauncher()
    try:
        yield launcher, launcher.start(n, call_of(*words))
    finally:
        launcher.stop()


_before: set[psutil.Process] = set()  # processes that other tests have left, such as multiprocessing's own


def children() -> list[psutil.Process]:
    return [child for child in processes_of() if child not in _before]


def test_a_program_makes_its_call_with_its_name() -> None:
    with started(2, "end", "7") as (launcher, handles):
        await_that(lambda: not launcher.alive())
        assert [handle.end for handle in handles] == ["", ""]
        assert [launcher.logs(handle) for handle in handles] == [
            "['end', '7'] process-0\n",
            "['end', '7'] process-1\n",
        ]


def test_a_program_that_does_not_read_its_call_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def frozen(module: str, sockets: int, **options: Any) -> WorkerProcess:
        worker = WorkerProcess(module, sockets, **options)
        os.kill(worker.pid, signal.SIGSTOP)
        return worker

    monkeypatch.setattr("rollflow.nodes.launch.process_launcher.WorkerProcess", frozen)
    with started(1, "end", " " * (1 << 22)) as (launcher, [handle]):
        children()[0].resume()
        await_that(lambda: not launcher.alive())
        assert handle.end == ""


@pytest.mark.slow
def test_no_secret_stands_on_a_command_line_or_in_the_environment() -> None:
    with started(1, "wait", "0badcafe") as (launcher, [handle]):
        await_that(lambda: "'0badcafe'] process-0" in launcher.logs(handle))
        [process] = children()
        assert not any("0badcafe" in part for part in [*process.cmdline(), *process.environ().values()])


def test_how_a_program_has_ended_is_said_in_words() -> None:
    with started(1, "fail") as (launcher, [handle]):
        await_that(lambda: not launcher.alive())
        assert handle.end == "exited with code 1"
        assert launcher.logs(handle).endswith("it broke\n")
    with started(1, "wait") as (launcher, [handle]):
        await_that(lambda: "waits" in launcher.logs(handle))
        children()[0].kill()
        await_that(lambda: not launcher.alive())
        assert handle.end == "was killed by SIGKILL"


@pytest.mark.slow
def test_nothing_is_left_of_programs_that_are_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_ENDING_S", "_LEAVING_S"):
        monkeypatch.setattr(f"rollflow.nodes.launch.process_launcher.{name}", 0.05)
    before = held_here()
    for command in ("wait", "stay", "end"):
        with started(2, command) as (launcher, handles):
            await_that(lambda: all(map(launcher.logs, handles)))
    assert held_here() == before
