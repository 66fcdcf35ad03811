"""The five verbs of a launcher, with processes of this machine."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from leftovers import held_here, processes_of
from remote_rollouts import await_that
from small_program import NAME, install

from rollflow.nodes.launch.process_launcher import Handle, ProcessLauncher


@pytest.fixture(autouse=True)
def _installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    _before.clear()
    _before.update(processes_of())


@contextmanager
def started(n: int, *command: str, secret: str = "sesame") -> Iterator[tuple[ProcessLauncher, list[Handle]]]:
    launcher = ProcessLauncher()
    try:
        yield launcher, launcher.start(n, [NAME, *command, "--name", "{name}"], secret)
    finally:
        launcher.stop()


_before: set[psutil.Process] = set()  # processes that other tests have left, such as multiprocessing's own


def children() -> list[psutil.Process]:
    return [child for child in processes_of() if child not in _before]


def test_a_program_is_given_its_command_its_name_and_the_secret() -> None:
    with started(2, "end", "7") as (launcher, handles):
        await_that(lambda: not launcher.alive())
        assert [handle.end for handle in handles] == ["", ""]
        assert [launcher.logs(handle) for handle in handles] == [
            "['end', '7', '--name', 'process-0'] sesame\n",
            "['end', '7', '--name', 'process-1'] sesame\n",
        ]


@pytest.mark.slow
def test_neither_the_secret_nor_the_command_stand_on_a_command_line() -> None:
    with started(1, "wait", "00c0ffee", secret="0badcafe") as (launcher, [handle]):
        await_that(lambda: "'00c0ffee', '--name', 'process-0'] 0badcafe" in launcher.logs(handle))
        [process] = children()
        assert not any("00c0ffee" in part or "0badcafe" in part for part in process.cmdline())


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


def test_a_program_that_is_not_installed_is_named() -> None:
    launcher = ProcessLauncher()
    [handle] = launcher.start(1, ["nothing"], "")
    await_that(lambda: not launcher.alive())
    assert launcher.logs(handle).startswith("no program nothing is installed for ")
    launcher.stop()


@pytest.mark.slow
def test_nothing_is_left_of_programs_that_are_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_ENDING_S", "_LEAVING_S"):
        monkeypatch.setattr(f"rollflow.nodes.launch.process_launcher.{name}", 0.05)
    before = held_here()
    for command in ("wait", "stay", "end"):
        with started(2, command) as (launcher, handles):
            await_that(lambda: all(map(launcher.logs, handles)))
    assert held_here() == before
