"""However a run ends: no process, no thread, no descriptor and no shared memory is left."""

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from held import LONGEST_S, Held, await_held
from numbered import NumberedModule

from rollflow.nodes import Rollout

PLACES = ["threads", "processes", "rollouts"]

PROGRAM = """
import sys, time
from rollflow.nodes import Rollout

with Rollout("CartPole-v1", num_envs=4, where=sys.argv[1], prefetch=int(sys.argv[2])) as rollout:
    for batch in rollout.batches():
        print("running", flush=True)
"""


def ran(where: str, ending: str) -> None:
    options: Any = {"num_envs": 4, "lanes": 2, "fragment_length": 8, "seed": 0, "prefetch": ending == "ahead"}
    rollout = Rollout("CartPole-v1", where=where, **options)  # type: ignore[arg-type]
    if ending == "never entered":
        return
    with rollout:
        batches = iter(rollout.batches())
        for _ in range(3):
            next(batches)
        if ending == "error":
            raise ZeroDivisionError


@pytest.mark.parametrize("ending", ["left", "ahead", "error", "never entered"])
@pytest.mark.parametrize("where", PLACES)
def test_nothing_is_left_in_this_process(where: str, ending: str) -> None:
    def counted() -> tuple[int, int, set[str]]:
        gc.collect()
        return (
            len(os.listdir("/proc/self/fd")),
            len(psutil.Process().children()),
            {t.name for t in threading.enumerate()},
        )

    before = counted()
    for _ in range(2):
        try:
            ran(where, ending)
        except ZeroDivisionError:
            pass
    assert counted() == before


@pytest.mark.parametrize("drains", [False, True])
def test_leaving_waits_for_no_environment_that_hangs(
    tmp_path: Path, drains: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollflow.nodes.workers.worker_process.CLOSE_TIMEOUT_S", 0.1)
    options: Any = {"module": NumberedModule(), "fragment_length": 2, "step_timeout": None, "seed": 0}
    with Rollout(partial(Held, 0, tmp_path, steps=[2]), where="processes", prefetch=1, **options) as rollout:
        next(iter(rollout.fragments()))
        await_held(tmp_path, 0)
        if drains:
            rollout.drain()
        began = time.monotonic()
    assert time.monotonic() - began < LONGEST_S / 2


def shared_memory() -> set[str]:
    return set(os.listdir("/dev/shm"))


def started(where: str, prefetch: int) -> tuple[subprocess.Popen[str], list[psutil.Process]]:
    """A program that is at work, and its workers."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": env}
    program = subprocess.Popen([sys.executable, "-c", PROGRAM, where, str(prefetch)], **pipes)
    assert program.stdout is not None
    assert program.stdout.readline() == "running\n"
    return program, psutil.Process(program.pid).children(recursive=True)


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("where", PLACES)
def test_an_interrupt_ends_everything(where: str, prefetch: int) -> None:
    before = shared_memory()
    program, workers = started(where, prefetch)
    program.send_signal(signal.SIGINT)
    _, told = program.communicate(timeout=60)
    assert "KeyboardInterrupt" in told
    assert program.returncode in (1, -signal.SIGINT)
    assert psutil.wait_procs(workers, timeout=60)[1] == []
    assert len(workers) == (0 if where == "threads" else 2)
    assert shared_memory() == before


@pytest.mark.parametrize("where", PLACES)
def test_workers_end_with_a_process_that_is_killed(where: str) -> None:
    before = shared_memory()
    program, workers = started(where, 1)
    program.kill()
    program.communicate(timeout=60)
    assert psutil.wait_procs(workers, timeout=60)[1] == []
    assert shared_memory() == before


def test_a_worker_in_an_endless_loop_ends_with_its_parent(tmp_path: Path) -> None:
    """Though it would never look at its socket again."""
    source = PROGRAM.replace("import sys, time", "import sys, time\nimport gymnasium as gym").replace(
        '"CartPole-v1"', "Endless"
    )
    source = source.replace(
        "with Rollout",
        """class Endless(gym.Env):
    observation_space, action_space = gym.spaces.Box(-1, 1), gym.spaces.Discrete(2)
    def reset(self, **_):
        return self.observation_space.sample(), {}
    def step(self, action):
        print("running", flush=True)
        while True: pass

with Rollout""",
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    program = subprocess.Popen(
        [sys.executable, "-c", source, "processes", "0"], stdout=subprocess.PIPE, text=True, env=env
    )
    assert program.stdout is not None
    assert program.stdout.readline() == "running\n"
    workers = psutil.Process(program.pid).children(recursive=True)
    assert workers
    program.kill()
    program.wait()
    program.stdout.close()
    assert psutil.wait_procs(workers, timeout=60)[1] == []
