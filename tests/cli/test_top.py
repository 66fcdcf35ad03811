"""`rollflow top`: runs in the terminal."""

import json
import os
import pty
import re
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from command_errors import Says
from ending_envs import Doomed
from feeding_rollouts import graph_over, running as fed_graph
from numbered_module import NumberedModule
from remote_rollouts import await_that
from rich.console import Console

from rollflow import Rollout
from rollflow.cli.main import main
from rollflow.cli.run_picture import figures_line, picture
from rollflow.stream.observe import run_socket
from rollflow.stream.observe.snapshot import shown as shown_of, with_rates

pytestmark = pytest.mark.usefixtures("folder")

FIGURES = {
    "time/total_timesteps": 1200,
    "time/iterations": 3,
    "rollout/ep_rew_mean": 20.25,
    "rollout/ep_rew_mean/a": 7.0,
    "policy/version/a": 2,
    "policy/lag": 1,
    "lost/max_lag": 64,
}
NODE = {"items": 10, "busy_s": 1.5, "idle_s": 0.25, "blocked_s": 0.25, "p50_s": 2e-3, "p99_s": 0.1, "longest_s": 1.5}
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
    "nodes": {"rollout/env": NODE, "rollout/module": NODE, "sink": {**NODE, "slowest_piece": "Numpy"}},
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


def drawn(*runs: Any, width: int = 80, **options: Any) -> str:
    console = Console(width=width, **{"color_system": None, **options})
    with console.capture() as capture:
        console.print(picture([with_rates(run, None) for run in runs], "/run"))
    return capture.get()


def test_a_panel_has_stages_edges_parties_and_the_diagnosis() -> None:
    text = drawn(RUN, width=90)
    lines = text.splitlines()
    assert lines[0].startswith("╭─ graph [bold]mine ─")
    assert lines[1].startswith("│ held back by sink (busy 75% of 2.0 s) ")
    assert lines[-1].startswith("╰─ pid 7  train.py --lr 1e-3  2 s  3 MiB ─")
    for line in (
        "│ no item for 6.0 s: sink is in its call ",
        "│ do: something ",
        "│ rollout: 2 lanes ",
        "│ steps/s 4   steps 8 ",
        "│ rollout/env        5.0  75%     12% 2 ms 100 ms   1.5 s rollout/module, sink ",
        "│ rollout/module     5.0  75%     12% 2 ms 100 ms   1.5 s rollout/env ↺ ",
        "│ sink               5.0  75%     12% 2 ms 100 ms   1.5 s ",
        "│ slowest piece of sink: Numpy ",
        "│ sink is in its call since 0.2 s ",
    ):
        assert line in text, text
    assert "3/4   ██████··       3.0    50%     1,234" in text
    assert {len(line) for line in lines} == {90}


def test_figures_in_words() -> None:
    run = {"figures": FIGURES, "steps_per_s": 14983.7406}
    counts = ["steps/s 14,984", "steps 1,200", "updates 3", "return 20.25", "return (a) 7"]
    counts += ["version (a) 2", "lag 1", "lost (max_lag) 64"]
    assert figures_line(shown_of(run)["tiles"]).split("   ") == counts


def test_a_run_that_does_not_answer_and_one_of_a_trainer() -> None:
    error = {"path": "/run/8-a.sock", "pid": 8, "error": "no answer in 2 s: its process is stopped, or held up"}
    assert "│ no answer in 2 s: its process is stopped, or held up " in drawn(error)
    trainer = {**error, "kind": "TrainerStream", "name": "tcp://0.0.0.0:7020", "sources": ["a", "b"]}
    del trainer["error"]
    assert "│ fed by a, b " in drawn(trainer)


def test_many_parties_are_cut_short() -> None:
    parties = [{**RUN["parties"][0], "name": f"lane {number}", "age_s": number / 10} for number in range(10)]
    text = drawn({**RUN, "parties": parties})
    assert "│ lane 9 is in its call since 0.9 s " in text
    assert "│ and 2 more " in text
    assert "lane 1 " not in text


def test_once_shows_what_runs_here(running: Rollout, shown: Says) -> None:
    text = shown("top", "--once")
    assert f"Rollout {running.environments.describe()}" in text
    assert f"pid {os.getpid()}" in text
    assert "module_to_env" in text


@pytest.mark.parametrize("kind", ["all", "pid", "path", "unix"])
def test_json_has_the_runs_that_are_asked_for(kind: str, running: Rollout, folder: Path, shown: Says) -> None:
    [path] = folder.iterdir()
    address = {"all": [], "pid": [str(os.getpid())], "path": [str(path)], "unix": [f"unix:{path}"]}[kind]
    [found] = json.loads(shown("top", *address, "--once", "--json"))
    assert found["figures"]["time/total_timesteps"] == running.num_steps
    assert found["path"] == str(path)


def test_without_a_run_it_says_where_it_looked(folder: Path, capsys: pytest.CaptureFixture[str], shown: Says) -> None:
    assert main(["top"]) == 0  # once, where this is no terminal
    assert "".join(capsys.readouterr().out.split()) == f"norunofthisuseronthismachinehasasocketin{folder}"
    assert shown("top", "--once", "--json") == "[]\n"


def test_the_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, refused: Says) -> None:
    monkeypatch.setitem(sys.modules, "rich", None)
    assert "top without --json takes the package rich: pip install 'rollflow[view]'" in refused("top")


@pytest.mark.slow
def test_a_terminal_shows_one_look_in_the_place_of_the_other_until_ctrl_c(running: Rollout) -> None:
    here, there = pty.openpty()
    command = [sys.executable, "-m", "rollflow.cli.main", "top", "--every", "0.05"]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": "40"}
    process = subprocess.Popen(command, stdin=there, stdout=there, stderr=subprocess.PIPE, env=environment)
    shown = b""
    while shown.count(b"module_to_env") < 3:
        shown += os.read(here, 1 << 16)
    assert b"\x1b[?1049h" in shown  # the screen is another one
    process.send_signal(signal.SIGINT)
    while b"\x1b[?1049l" not in shown:
        shown += os.read(here, 1 << 16)
    assert (process.communicate()[1], process.returncode) == (b"", 0)
    os.close(there)
    os.close(here)


def test_what_went_wrong_last_in_a_stage_stays_in_view(tmp_path: Path) -> None:
    makers = [partial(Doomed, slot, log=tmp_path, fate="raise", step=3, lives=slot) for slot in (0, 1)]
    options: dict[str, Any] = {"module": NumberedModule(), "fragment_length": 4, "seed": 0}
    with Rollout(makers, lanes=2, workers=2, where="processes", **options) as rollout:
        fragments = rollout.fragments()
        while "last_error" not in rollout.snapshot()["nodes"]["env"]:
            next(fragments)
        [run] = [with_rates(each, None) for each in run_socket.snapshots()]
    line = r"env, \d+ s ago: lane 1: RuntimeError: it broke"
    assert re.search(f"│ {line} ", drawn(run, width=200))
    assert re.search(rf"\x1b\[31m{line}", drawn(run, width=200, force_terminal=True, color_system="standard"))


def test_a_sink_says_why_it_has_no_trainer() -> None:
    def errors() -> list[str]:
        return [line for run in run_socket.snapshots() for line in shown_of(run)["texts"] if "refused" in line]

    rollout = Rollout("CartPole-v1", fragment_length=8, seed=0)
    with fed_graph(*graph_over(rollout, "tcp://127.0.0.1:1")):
        await_that(errors)
        [line] = errors()
    assert line.startswith("trainer, now: trainer tcp://127.0.0.1:1: ")
