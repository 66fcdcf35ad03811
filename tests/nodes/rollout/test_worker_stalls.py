"""Faults in worker processes, which the stall doctor names with lane, worker, process and the worker's own line."""

import os
import re
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from doctor_clock import Looking
from held_envs import Held, await_file, await_held, let_go
from held_parts import HeldAgents, HeldModule, HeldPiece
from numbered_module import NumberedEnv, NumberedModule
from stalled_rollouts import OPTIONS, await_blocker, being_read, line_of

from rollflow import MultiAgentRollout, Rollout
from rollflow.nodes import RandomModule

WORKER = r"\(lane 0, worker 0, pid \d+\)"
IN_WORKERS: Any = {"workers": 1, **OPTIONS}


class WithoutEnd(NumberedEnv):
    """Is in C code, which lets no other thread of the process have the interpreter, in its first life's third step."""

    def __init__(self, folder: Path) -> None:
        super().__init__(0)
        self.folder, self.steps = folder, 0

    def step(self, action: Any) -> Any:
        self.steps += 1
        if self.steps == 3 and not (self.folder / "hangs").exists():
            (self.folder / "hangs").touch()
            re.fullmatch("(a+)+b", "a" * 64)
        return super().step(action)


def told_of(rollout: Any, folder: Path, party: str) -> str:
    """What the log says once a worker hangs, which is let go then."""
    with being_read(rollout, (folder / "go").touch):
        await_file(folder / "hangs")
        await_blocker(rollout, party)
        return Looking(rollout._doctor).until_told(6.5)


@pytest.mark.parametrize("where", ["processes", "rollouts"])
def test_a_reset_that_hangs_is_named_with_its_line(where: str, tmp_path: Path) -> None:
    env = partial(Held, 0, tmp_path, lengths=(4, 4), resets=[1])
    rollout = Rollout(env, num_envs=1, module=NumberedModule(), where=where, **IN_WORKERS)
    with being_read(rollout, lambda: let_go(tmp_path, 0)):
        await_held(tmp_path, 0)
        await_blocker(rollout, "rollouts" if where == "rollouts" else "env")
        text = Looking(rollout._doctor).until_told(35.0)
    assert re.search(WORKER + r" is in reset\(\) since", text), text
    assert line_of(Held.reset, "self._wait()") in text, text


@pytest.mark.parametrize("node", ["env_to_module", pytest.param("module", marks=pytest.mark.slow)])
def test_a_stage_that_hangs_in_a_worker_is_named_with_its_line(node: str, tmp_path: Path) -> None:
    options: Any = {"module": NumberedModule(), "env_to_module_connector": lambda env: HeldPiece(tmp_path)}
    if node == "module":
        options = {"module": HeldModule(tmp_path)}
    rollout = Rollout(lambda: NumberedEnv(0), where="rollouts", **options, **IN_WORKERS)
    text = told_of(rollout, tmp_path, "rollouts")
    assert re.search(rf"rollouts {WORKER} is in node '{node}' since 5\.", text), text
    held: Any = HeldModule._forward if node == "module" else HeldPiece.__call__
    assert line_of(held, "held.call") in text, text


@pytest.mark.parametrize("where", ["processes", "rollouts"])
def test_a_step_of_several_agents_that_hangs_in_a_worker_is_named(where: str, tmp_path: Path) -> None:
    rollout = MultiAgentRollout(lambda: HeldAgents(tmp_path), module=RandomModule, where=where, **IN_WORKERS)
    text = told_of(rollout, tmp_path, "rollouts" if where == "rollouts" else "env")
    assert re.search(WORKER + r" is in step\(\) since 5\.", text), text
    assert line_of(HeldAgents.step, "held.call") in text, text


@pytest.mark.slow
@pytest.mark.parametrize("where", ["processes", "rollouts"])
def test_a_worker_that_hangs_in_c_code_gives_its_stack_too(where: str, tmp_path: Path) -> None:
    rollout = Rollout(lambda: WithoutEnd(tmp_path), module=NumberedModule(), where=where, **IN_WORKERS)
    pid = rollout.environments._workers[0].pid
    with being_read(rollout, partial(os.kill, pid, signal.SIGKILL)):
        await_file(tmp_path / "hangs")
        await_blocker(rollout, "rollouts" if where == "rollouts" else "env")
        text = Looking(rollout._doctor).until_told(6.5)
    assert re.search(WORKER + r" is in step\(\) since 5\.", text), text
    assert f"  at {line_of(WithoutEnd.step, 're.fullmatch')}" in text, text
