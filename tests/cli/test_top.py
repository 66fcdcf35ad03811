"""`rollflow top`: runs in the terminal."""

import importlib.util
import json
import os
import pty
import re
import signal
import subprocess
import sys
import termios
import threading
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Self

import anyio
import pytest
from command_errors import assert_one_line
from ending_envs import Doomed
from feeding_rollouts import graph_over, running as fed_graph
from numbered_module import NumberedEnv, NumberedModule
from remote_rollouts import await_that
from rich.console import Console

from rollflow.cli.main import main
from rollflow.cli.run_picture import figures_line, picture
from rollflow.cli.run_viewer import Keys, View
from rollflow.nodes import Rollout
from rollflow.stream import Fragment, Graph
from rollflow.stream.pictures.runs_page import runs_html
from rollflow.stream.snapshots import run_folder
from rollflow.stream.snapshots.history import RunHistory
from rollflow.stream.snapshots.rates import last_errors, with_rates

FIGURES = {
    "time/total_timesteps": 1200,
    "time/iterations": 3,
    "rollout/ep_rew_mean": 20.25,
    "rollout/ep_rew_mean/a": 7.0,
    "policy/version/a": 2,
    "policy/lag": 1,
    "lost/max_lag": 64,
}
NODE = {"items": 10, "busy_s": 1.5, "idle_s": 0.25, "blocked_s": 0.25}
RUN: dict[str, Any] = {
    "path": "/run/7-a.sock",
    "pid": 7,
    "command": "train.py --lr 1e-3",
    "began": 100.0,
    "time": 102.0,
    "memory_bytes": 3 << 20,
    "kind": "graph",
    "name": "[bold]mine",
    "elapsed_s": 2.0,
    "tasks": [["rollout/env", "rollout/module"], ["sink"]],
    "nodes": {"rollout/env": NODE, "rollout/module": NODE, "sink": NODE},
    "edges": [
        {"source": "rollout/env", "port": "out", "target": "rollout/module", "feedback": False, "is_output": False},
        {"source": "rollout/module", "port": "out", "target": "rollout/env", "feedback": True, "is_output": False},
        {
            "source": "rollout/env",
            "port": "fragments",
            "target": "sink",
            "feedback": False,
            "is_output": False,
            "capacity": 4,
            "items": 6,
            "held": 3,
            "full": 0.5,
            "dropped": 1234,
        },
    ],
    "parties": [{"name": "sink", "kind": "call", "doing": "is in its call", "on": [], "age_s": 0.25}],
    "bottleneck": "sink",
    "conclusion": "held back by sink (busy 75% of 2.0 s)",
    "diagnosis": {"state": "stalled", "text": "no item for 6.0 s: sink is in its call\ndo: something", "waited_s": 6.0},
    "parts": {"rollout": {"name": "2 lanes", "figures": {"time/total_timesteps": 8, "time/time_elapsed": 2.0}}},
}


def shown(*runs: Any, width: int = 80) -> str:
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        console.print(picture([with_rates(run, None) for run in runs], "/run"))
    return capture.get()


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(run_folder.FOLDER, str(tmp_path / "runs"))
    return tmp_path / "runs"


@pytest.fixture
def running() -> Iterator[Rollout]:
    env = [partial(NumberedEnv, 0), partial(NumberedEnv, 1)]
    with Rollout(env, module=NumberedModule(), fragment_length=8, seed=0) as rollout:
        next(rollout.batches())
        yield rollout


def test_a_panel_has_stages_edges_parties_and_the_diagnosis() -> None:
    text = shown(RUN, width=90)
    lines = text.splitlines()
    assert lines[0].startswith("╭─ graph [bold]mine ─")
    assert lines[-1].startswith("╰─ pid 7  train.py --lr 1e-3  2 s  3 MiB ─")
    for line in (
        "│ rollout: 2 lanes: 8 steps   0 updates ",
        "│  ┌   rollout/env          5.0   ██████··   75%    12%       12%   sink ",
        "│  └   rollout/module       5.0   ██████··   75%    12%       12%   rollout/env ↺ ",
        "│      sink                 5.0   ██████··   75%    12%       12%  ",
        "│ sink is in its call since 0.2 s ",
        "│ held back by sink (busy 75% of 2.0 s) ",
        "│ no item for 6.0 s: sink is in its call ",
        "│ do: something ",
    ):
        assert line in text, text
    assert "3/4   ██████··       3.0    50%     1,234" in text
    assert {len(line) for line in lines} == {90}


@pytest.mark.parametrize(("state", "waited_s", "is_shown"), [("waits", 0.5, False), ("waits", 1.5, True)])
def test_a_diagnosis_is_shown_where_somebody_waits_for_long(state: str, waited_s: float, is_shown: bool) -> None:
    run = {**RUN, "diagnosis": {"state": state, "text": "no item for", "waited_s": waited_s}}
    assert ("no item for" in shown(run)) == is_shown


def test_figures_in_words() -> None:
    assert figures_line(FIGURES, 300.0).split("   ") == [
        "300 steps/s",
        "1,200 steps",
        "3 updates",
        "return 20.25",
        "return 7 (a)",
        "version 2 (a)",
        "lost 64 (max_lag)",
        "lag 1",
    ]


def test_a_run_that_does_not_answer_and_one_of_a_trainer() -> None:
    error = {"path": "/run/8-a.sock", "pid": 8, "error": "no answer in 2 s: its process is stopped, or held up"}
    assert "│ no answer in 2 s: its process is stopped, or held up " in shown(error)
    trainer = {**error, "kind": "TrainerStream", "name": "tcp://0.0.0.0:7020", "sources": ["a", "b"]}
    del trainer["error"]
    assert "│ fed by a, b " in shown(trainer)


def test_many_parties_are_cut_short() -> None:
    parties = [{**RUN["parties"][0], "name": f"lane {number}", "age_s": number / 10} for number in range(10)]
    text = shown({**RUN, "parties": parties})
    assert "│ lane 9 is in its call since 0.9 s " in text
    assert "│ and 2 more " in text
    assert "lane 1 " not in text


def test_once_shows_what_runs_here(running: Rollout, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "--once"]) == 0
    text = capsys.readouterr().out
    assert f"Rollout {running.environments.describe()}" in text
    assert f"pid {os.getpid()}" in text
    assert "module_to_env" in text


@pytest.mark.parametrize("kind", ["all", "pid", "path", "unix"])
def test_json_has_the_runs_that_are_asked_for(
    kind: str, running: Rollout, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    [path] = folder.iterdir()
    address = {"all": [], "pid": [str(os.getpid())], "path": [str(path)], "unix": [f"unix:{path}"]}[kind]
    assert main(["top", *address, "--once", "--json"]) == 0
    [found] = json.loads(capsys.readouterr().out)
    assert found["figures"]["time/total_timesteps"] == running.num_steps
    assert found["path"] == str(path)


def test_without_a_run_it_says_where_it_looked(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top"]) == 0  # once, where this is no terminal
    assert "".join(capsys.readouterr().out.split()) == f"norunofthisuseronthismachinehasasocketin{folder}"
    assert main(["top", "--once", "--json"]) == 0
    assert capsys.readouterr().out == "[]\n"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["1"], r"process 1 has no run in .*runs, expected the process id of one"),
        (["unix:/no/such.sock"], r"unix:/no/such.sock: .*No such file.*, expected a process id, unix:/path of a"),
        (["--every", "0"], "--every is 0, expected a number of seconds above 0"),
    ],
)
def test_what_is_not_there_is_said(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", *arguments]) == 1
    error = capsys.readouterr().err
    assert_one_line(error)
    assert re.search(text, error), error


def test_the_package_that_is_missing_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["top"]) == 1
    assert "takes the package rich, expected --json, or pip install 'rollflow[view]'" in capsys.readouterr().err


class Terminal:
    """A terminal of 100 by 40, in which `rollflow top` runs until the block is left."""

    def __init__(self) -> None:
        self._here, self._there = pty.openpty()
        self._looks = b""
        self._more = threading.Condition()

    def __enter__(self) -> Self:
        command = [sys.executable, "-m", "rollflow.cli.main", "top", "--every", "0.05"]
        environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": "40"}
        self.attributes = termios.tcgetattr(self._there)
        self.process = subprocess.Popen(
            command, stdin=self._there, stdout=self._there, stderr=subprocess.PIPE, env=environment
        )
        self._reading = threading.Thread(target=self._read)
        self._reading.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.communicate()
        os.close(self._there)
        self._reading.join()
        os.close(self._here)

    def _read(self) -> None:
        with suppress(OSError):  # the other end is closed
            while data := os.read(self._here, 1 << 16):
                with self._more:
                    self._looks += data
                    self._more.notify_all()

    def press(self, keys: bytes) -> None:
        """Press keys; what was shown before is forgotten."""
        with self._more:
            self._looks = b""
        os.write(self._here, keys)

    def shows(self, text: bytes, times: int = 1) -> bool:
        """Return True once it has shown a text so often."""
        with self._more:
            return self._more.wait_for(lambda: self._looks.count(text) >= times, 60)

    def ends(self) -> None:
        """Check that it ends well, and gives back the screen and the terminal as they were."""
        assert self.process.stderr is not None
        assert (self.process.wait(60), self.process.stderr.read()) == (0, b"")
        assert self.shows(b"\x1b[?1049l")
        assert termios.tcgetattr(self._there) == self.attributes


@pytest.mark.slow
def test_a_terminal_shows_one_look_in_the_place_of_the_other_until_ctrl_c(running: Rollout) -> None:
    with Terminal() as terminal:
        assert terminal.shows(b"module_to_env", 3)
        assert terminal.shows(b"\x1b[?1049h")  # the screen is another one
        terminal.process.send_signal(signal.SIGINT)
        terminal.ends()


@pytest.mark.slow
def test_keys_show_where_the_threads_of_a_run_stand_and_end_the_view(running: Rollout) -> None:
    with Terminal() as terminal:
        assert terminal.shows(b"q quit")
        terminal.press(b"s")
        assert terminal.shows(f"process {os.getpid()}, ".encode())
        assert terminal.shows(b"main thread")
        terminal.press(b"\x1b")
        assert terminal.shows(b"module_to_env")
        terminal.press(b"q")
        terminal.ends()


def test_every_key_has_its_name() -> None:
    here, there = pty.openpty()
    with open(there) as terminal, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdin", terminal)
        with Keys() as keys:
            assert keys.wait(0.0) is None
            os.write(here, b"qk\x1b[A\x1b[6~\r\x1b")
            assert [keys.wait(60) for _ in range(6)] == ["q", "up", "up", "page down", "enter", "escape"]
    os.close(here)


def seen_in(view: View, height: int = 12) -> list[str]:
    """The lines of a view in a terminal of this height."""
    console = Console(width=90, height=height, color_system=None)
    with console.capture() as capture:
        console.print(view, end="")
    return [line.rstrip() for line in capture.get().splitlines()]


def view_of(*runs: Any, **asks: Any) -> View:
    view = View("/run", asks)
    view.runs = [with_rates(run, None) for run in runs]
    return view


def test_what_does_not_fit_a_terminal_is_scrolled_to_its_ends_and_no_further() -> None:
    view, whole = view_of(RUN), shown(RUN, width=90).splitlines()
    assert len(whole) == 19
    lines = seen_in(view)
    assert lines[:-1] == [line.rstrip() for line in whole[:11]]
    assert lines[-1].endswith(" 1-11 of 19")
    view.press("down")
    assert seen_in(view)[-1].endswith(" 2-12 of 19")
    for _ in range(4):
        view.press("page down")
    assert seen_in(view)[:-1] == [line.rstrip() for line in whole[-11:]]
    for _ in range(30):
        view.press("up")
    assert seen_in(view)[-1].endswith(" 1-11 of 19")
    assert "of 19" not in seen_in(view, height=20)[-1]


def test_one_run_is_chosen_after_the_other_and_stays_while_others_come_and_go() -> None:
    other = {**RUN, "path": "/run/8-a.sock", "pid": 8}
    view = view_of(RUN, other)

    def pids() -> list[str]:
        return re.findall(r"pid (\d)", "\n".join(seen_in(view, height=80)))

    found = [pids()]
    for key in ("enter", "enter", "enter", "enter", "escape"):
        view.press(key)
        found.append(pids())
    assert found == [["7", "8"], ["7"], ["8"], ["7"], ["8"], ["7", "8"]]
    view.press("enter")
    view.press("enter")
    view.runs = [with_rates(other, None)]
    assert pids() == ["8"]
    view.runs = [with_rates(RUN, None)]
    assert pids() == ["7"]  # the one that was shown has ended


def test_a_process_is_asked_by_a_key_alone_and_what_is_wrong_with_that_is_shown() -> None:
    asked: list[int] = []

    def stacks(run: Any) -> str:
        asked.append(run["pid"])
        if len(asked) > 1:
            raise ValueError("no process has the id 7")
        return "main thread:\n  train.py:3 in step"

    view = view_of(RUN, s=stacks)
    assert view.press("x")
    assert asked == []
    assert view.press("s")
    assert seen_in(view)[:2] == ["main thread:", "  train.py:3 in step"]
    view.press("s")
    assert seen_in(view)[0] == "no process has the id 7"
    view.press("escape")
    assert "no process" not in "\n".join(seen_in(view))
    assert not view.press("q")


def test_without_a_run_keys_do_nothing() -> None:
    view = view_of(s=lambda run: run["pid"])
    for key in ("enter", "s", "down", "page down", "escape"):
        assert view.press(key)
    assert seen_in(view)[0] == "no run of this user on this machine has a socket in /run"


def test_what_went_wrong_last_in_a_stage_stays_in_view(tmp_path: Path) -> None:
    makers = [partial(Doomed, slot, log=tmp_path, fate="raise", step=3, lives=slot) for slot in (0, 1)]
    options: dict[str, Any] = {"module": NumberedModule(), "fragment_length": 4, "seed": 0}
    with Rollout(makers, lanes=2, workers=2, where="processes", **options) as rollout:
        fragments = rollout.fragments()
        while "last_error" not in rollout.snapshot()["nodes"]["env"]:
            next(fragments)
        [run] = [with_rates(each, None) for each in run_folder.snapshots()]
    line = r"env, \d+ s ago: lane 1: RuntimeError: it broke"
    assert re.search(f"│ {line} ", shown(run, width=200))
    assert re.search(line, runs_html([run], {run["path"]: RunHistory()}, "/run"))


def test_a_sink_says_why_it_has_no_trainer() -> None:
    def errors() -> list[str]:
        return [line for run in run_folder.snapshots() for line in last_errors(run)]

    rollout = Rollout("CartPole-v1", fragment_length=8, seed=0)
    with fed_graph(*graph_over(rollout, "tcp://127.0.0.1:1")):
        await_that(lambda: any("refused" in line for line in errors()))
        [line] = errors()
    assert line.startswith("trainer, now: trainer tcp://127.0.0.1:1: ")


def test_a_node_of_the_user_s_may_have_a_last_error_of_its_own() -> None:
    class Own:
        last_error = "none of ours"

        def __call__(self, fragment: Fragment) -> None:
            seen.append(fragment)

    seen: list[Fragment] = []
    rollout, graph = Rollout("CartPole-v1", fragment_length=8, num_fragments=1, seed=0), Graph("own")
    graph.add(rollout=rollout, own=Own())
    graph.connect("rollout.fragments", "own")

    async def shown_of_run() -> list[dict[str, Any]]:
        async with graph.run() as run:
            found = run_folder.snapshots()
            await run.wait()
        return found

    [found] = anyio.run(shown_of_run)
    assert "own" in found["nodes"]
    assert last_errors(found) == []
    assert len(seen) == 1
