"""`rollflow up`, `status` and `down`: the programs of a layout, from their start to their end."""

import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import pytest
from remote_rollouts import await_that

from rollflow.cli import up as up_command
from rollflow.cli.main import main

LAYOUT = """
[first]
command = "python first.py {first}"
port = 7351

[others]
command = "python other.py {name} {first}"
count = 2
"""
# Waits until its file is there, and says what it was given.
FIRST = """
import os, pathlib, sys, time
print(sys.argv[1], len(os.environ["ROLLFLOW_SECRET"]), os.environ.get("OMP_NUM_THREADS"))
while not pathlib.Path("end").exists():
    time.sleep(0.01)
"""
# Fails the first time, and stays the second.
OTHER = """
import os, pathlib, signal, sys
signal.signal(signal.SIGTERM, lambda *_: (print("terminated"), sys.exit()))
made = pathlib.Path(sys.argv[1])
if not made.exists():
    made.touch()
    sys.exit("not yet")
print("stays", sys.argv[2])
made.with_suffix(".stays").touch()
signal.pause()
"""
COMMAND = [sys.executable, "-m", "rollflow.cli.main"]


@pytest.fixture(autouse=True)
def _own_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


@contextmanager
def up(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A layout that is up, in a process; its programs are there, and one of them has been started again."""
    for name, text in (("layout.toml", LAYOUT), ("first.py", FIRST), ("other.py", OTHER)):
        (folder / name).write_text(text)
    command = [*COMMAND, "up", str(folder / "layout.toml")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            await_that(lambda: process.poll() is not None or len(list(folder.glob("*.stays"))) == 2)
            yield process
        finally:
            process.kill()


@pytest.mark.slow
def test_a_layout_is_up_until_its_first_program_ends(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    layout = str(tmp_path / "layout.toml")
    with up(tmp_path) as process:
        assert main(["up", layout]) == 1
        assert "layout.toml is up already, expected `rollflow down " in capsys.readouterr().err
        programs = psutil.Process(process.pid).children()
        assert len(programs) == 3
        await_that(lambda: main(["status", layout]) == 0 and all_run(capsys.readouterr().out))
        (tmp_path / "end").touch()
        written = process.communicate()[0]
    assert process.returncode == 0
    assert psutil.wait_procs(programs, timeout=60)[1] == []
    lines = written.splitlines()
    assert "first-0 | tcp://127.0.0.1:7351 64 None" in lines
    assert {"others-0 | not yet", "others-1 | not yet", "others-0 | stays tcp://127.0.0.1:7351"} <= set(lines)
    assert "program others-0 exited with code 1; it wrote:" in written
    assert {"others-0 | terminated", "others-1 | terminated"} <= set(lines)
    assert main(["status", layout]) == main(["down", layout]) == 1
    assert capsys.readouterr().err == f"{layout} is not up\n" * 2


def all_run(text: str) -> bool:
    """Whether three programs run, by what `status` prints of them."""
    states = dict(line.split(maxsplit=1) for line in text.splitlines())
    assert states.keys() <= {"first-0", "others-0", "others-1"}
    return len(states) == 3 and all(state.startswith("runs for ") for state in states.values())


@pytest.mark.slow
@pytest.mark.parametrize("is_killed", [False, True])
def test_nothing_is_left_of_a_layout_that_is_ended(tmp_path: Path, *, is_killed: bool) -> None:
    with up(tmp_path) as process:
        programs = psutil.Process(process.pid).children()
        if is_killed:
            process.kill()
        else:
            assert main(["down", str(tmp_path / "layout.toml")]) == 0
        process.communicate()
        assert psutil.wait_procs(programs, timeout=60)[1] == []
    assert process.returncode == (-9 if is_killed else 143)


@pytest.mark.slow
def test_who_asks_is_in_nobodys_way_and_a_stale_number_is_signalled_by_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = tmp_path / "layout.toml"
    layout.write_text("[first]\ncommand = 'true'")
    assert main(["status", str(layout)]) == 1  # it makes the folder
    [folder] = tmp_path.glob("rollflow-*/layout-*")
    asked: list[int] = []

    def meanwhile(function: Callable[..., Any], *arguments: Any) -> Any:
        """A call by which it is asked, and others who ask before its answer is used."""
        result = function(*arguments)
        if not asked:
            others = ([*COMMAND, command, str(layout)] for command in ("down", "up"))
            asked.extend(subprocess.run(other, capture_output=True, timeout=60).returncode for other in others)
        return result

    with subprocess.Popen(["sleep", "1000"]) as foreign:
        try:
            (folder / "status.json").write_text(json.dumps({"pid": foreign.pid, "states": {"first-0": "runs"}}))
            for name in ("fcntl", "flock", "lockf"):
                monkeypatch.setattr(fcntl, name, partial(meanwhile, getattr(fcntl, name)))
            assert main(["status", str(layout)]) == 1
            assert asked == [1, 0]
            assert foreign.poll() is None
        finally:
            foreign.kill()
    assert capsys.readouterr().err == f"{layout} is not up\n" * 2


@pytest.mark.slow
def test_down_ends_who_has_the_lock_whatever_the_file_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    layout = str(tmp_path / "layout.toml")
    with up(tmp_path) as process, subprocess.Popen(["sleep", "1000"]) as foreign, ThreadPoolExecutor(1) as pool:
        try:
            [folder] = tmp_path.glob("rollflow-*/layout-*")
            process.send_signal(signal.SIGSTOP)  # between its lock and what it writes
            os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
            (folder / "status.json").write_text(json.dumps({"pid": foreign.pid, "states": {"old-0": "runs"}}))
            assert main(["status", layout]) == 0
            assert "old-0" not in capsys.readouterr().out
            ending = pool.submit(main, ["down", layout])
            await_that(lambda: is_told_to_end(process.pid))
            process.send_signal(signal.SIGCONT)
            assert ending.result() == 0
            assert foreign.poll() is None
        finally:
            foreign.kill()
            process.kill()


def is_told_to_end(pid: int) -> bool:
    """Whether a stopped process has a SIGTERM before it."""
    [pending] = re.findall(r"^ShdPnd:\s*(\w+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return bool(int(pending, 16) >> signal.SIGTERM - 1 & 1)


@pytest.mark.parametrize(
    ("pieces", "lines"),
    [
        ([b"one\ntw", b"o\n\n", b""], ["one", "two", ""]),
        ([b"no end", b"", b"next start\n"], ["no end", "next start"]),
        ([b"\r 1%", b"\r 2%", b"\r 3%\nover\n"], [" 1%", " 2%", " 3%", "over"]),
        ([b" 1%\r", b" 2%\r", b""], [" 1%", " 2%"]),
        ([b"a\r", b"\nb\r\n\r\n", b""], ["a", "b", ""]),
        ([b"x" * 5, b"x" * 5, b"y\n"], ["x" * 10, "y"]),
    ],
)
def test_output_is_printed_line_by_line(
    pieces: list[bytes], lines: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(up_command, "_LONGEST_LINE", 10)
    output = up_command._Output()
    for piece in pieces:
        output("first-0", piece)
    assert capsys.readouterr().out == "".join(f"first-0 | {line}\n" for line in lines)


def test_a_progress_line_is_shown_before_it_ends(capsys: pytest.CaptureFixture[str]) -> None:
    output = up_command._Output()
    output("first-0", b"\r 1%\r 2%")
    assert capsys.readouterr().out == "first-0 |  1%\n"


def test_what_is_no_layout_is_said_in_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "layout.toml").touch()
    assert main(["up", str(tmp_path / "layout.toml")]) == 1
    assert capsys.readouterr().err.startswith(f"rollflow: {tmp_path}/layout.toml is empty, expected a table")
    assert main(["up", str(tmp_path / "nothing.toml")]) == 1
    assert "No such file" in capsys.readouterr().err


def test_a_program_that_is_not_here_is_named_before_any_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)  # to which it is put back
    (layout := tmp_path / "layout.toml").write_text("[a]\ncommand = 'touch made'\n[b]\ncommand = 'not-a-program x'\n")
    assert main(["up", str(layout)]) == 1
    assert f"{layout}: b.command: no program 'not-a-program' is found" in capsys.readouterr().err
    assert not (tmp_path / "made").exists()


def test_a_program_of_this_installation_is_found_without_a_path_to_it(tmp_path: Path) -> None:
    (tmp_path / "layout.toml").write_text("[a]\ncommand = 'rollflow --version'\n")
    command = [*COMMAND, "up", str(tmp_path / "layout.toml")]
    ended = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PATH": os.defpath})
    assert (ended.returncode, ended.stdout) == (0, f"a-0 | rollflow {version('rollflow')}\n"), ended.stderr
