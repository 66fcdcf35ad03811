"""Programs that a launcher runs, as processes of this machine."""

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
from rollflow.nodes.launch.process_launcher import ProcessLauncher, ProgramProcess


@pytest.fixture(autouse=True)
def _left_before() -> None:
    _before.clear()
    _before.update(processes_of())


@contextmanager
def started(n: int, *words: str) -> Iterator[list[ProgramProcess]]:
    launcher = ProcessLauncher()
    programs = [launcher.run(number, call_of(*words)) for number in range(n)]
    try:
        yield programs
    finally:
        launcher.stop(programs)


_before: set[psutil.Process] = set()  # processes that other tests have left, such as multiprocessing's own


def children() -> list[psutil.Process]:
    return [child for child in processes_of() if child not in _before]


def test_a_program_makes_its_call_with_its_name() -> None:
    with started(2, "end", "7") as programs:
        await_that(lambda: [program.end for program in programs] == ["", ""])
        assert [program.log for program in programs] == ["['end', '7'] process-0\n", "['end', '7'] process-1\n"]


def test_a_program_that_does_not_read_its_call_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def frozen(module: str, sockets: int, **options: Any) -> WorkerProcess:
        worker = WorkerProcess(module, sockets, **options)
        os.kill(worker.pid, signal.SIGSTOP)
        return worker

    monkeypatch.setattr("rollflow.nodes.launch.process_launcher.WorkerProcess", frozen)
    with started(1, "end", " " * (1 << 22)) as [program]:
        children()[0].resume()
        await_that(lambda: program.end == "")


@pytest.mark.slow
def test_no_secret_stands_on_a_command_line_or_in_the_environment() -> None:
    with started(1, "wait", "0badcafe") as [program]:
        await_that(lambda: "'0badcafe'] process-0" in program.log)
        [process] = children()
        assert not any("0badcafe" in part for part in [*process.cmdline(), *process.environ().values()])


def test_how_a_program_has_ended_is_said_in_words() -> None:
    with started(1, "fail") as [program]:
        await_that(lambda: program.end is not None)
        assert program.end == "exited with code 1"
        assert program.log.endswith("it broke\n")
    with started(1, "wait") as [program]:
        await_that(lambda: "waits" in program.log)
        children()[0].kill()
        await_that(lambda: program.end is not None)
        assert program.end == "was killed by SIGKILL"


@pytest.mark.slow
def test_nothing_is_left_of_programs_that_are_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_ENDING_S", "_LEAVING_S"):
        monkeypatch.setattr(f"rollflow.nodes.launch.process_launcher.{name}", 0.05)
    before = held_here()
    for command in ("wait", "stay", "end"):
        with started(2, command) as programs:
            await_that(lambda: all(program.log for program in programs))
    assert held_here() == before
