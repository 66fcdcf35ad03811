"""However a run of several agents ends: no process, no thread, no descriptor and no shared memory is left."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import psutil
import pytest
from ending_agent_envs import DoomedAgents
from held_envs import LONGEST_S, await_file
from leftovers import held_here, nothing_left, processes_of, shared_mappings
from numbered_agents import NumberedAgents
from serial_module import SerialModule

from rollflow import MultiAgentRollout

PROGRAM = f"""
import sys
sys.path.append({str(Path(__file__).parents[5] / "support")!r})
from functools import partial
from numbered_agents import NumberedAgents
from rollflow import MultiAgentRollout

makers = [partial(NumberedAgents, slot, nested=0) for slot in range(2)]
with MultiAgentRollout(makers, where="processes", workers=2, prefetch=int(sys.argv[1])) as rollout:
    for batch in rollout.batches():
        print("running", flush=True)
"""


PLACES: dict[str, dict[str, Any]] = {
    "processes": {"where": "processes", "workers": 2},
    "rollouts": {"where": "rollouts", "workers": 2},
    "threads": {"where": "threads"},
    "threads, and the passes in one": {"where": "threads", "forward_in_thread": True},
}


def made(place: str = "processes", **options: Any) -> MultiAgentRollout:
    makers = [partial(NumberedAgents, slot, nested=0) for slot in range(2)]
    defaults: dict[str, Any] = {"fragment_length": 8, "seed": 0, "module": SerialModule(), **PLACES[place]}
    return MultiAgentRollout(makers, **(defaults | options))


def ran(ending: str, place: str) -> None:
    rollout = made(place, prefetch=int(ending == "ahead"))
    if ending == "never entered":
        return
    with rollout:
        fragments = iter(rollout.fragments())
        for _ in range(3):
            next(fragments)
        assert (shared_mappings() > 0) == (place in ("processes", "rollouts"))
        if ending == "error":
            raise ZeroDivisionError


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("ending", ["left", "ahead", "error", "never entered"])
def test_nothing_is_left_in_this_process(
    ending: str, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = held_here()
    for _ in range(2):
        try:
            ran(ending, place)
        except ZeroDivisionError:
            pass
    assert held_here() == before


@pytest.mark.parametrize("place", PLACES)
def test_an_error_in_an_event_loop_leaves_nothing_behind(place: str) -> None:
    async def broken() -> None:
        async with made(place, prefetch=1) as rollout:
            async for _ in rollout.batches():
                raise ZeroDivisionError

    def ran() -> None:  # the error holds the rollout, until this is left
        with pytest.raises(ZeroDivisionError):
            anyio.run(broken)

    ran()  # what is made once for all stays
    before = processes_of()
    with nothing_left():
        ran()
    assert processes_of() == before


def test_leaving_waits_for_no_environment_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollflow.nodes.env.workers.worker_process.CLOSE_TIMEOUT_S", 0.1)
    maker = partial(DoomedAgents, 0, tmp_path, fate="hold", step=10, lives=1, nested=0)
    options: Any = {"module": SerialModule(), "fragment_length": 8, "step_timeout": None, "prefetch": 1, "seed": 0}
    with MultiAgentRollout(maker, where="processes", **options) as rollout:
        next(iter(rollout.fragments()))
        await_file(tmp_path / "held 0")
        began = time.monotonic()
    assert time.monotonic() - began < LONGEST_S / 2


def started(prefetch: int) -> tuple[subprocess.Popen[str], list[psutil.Process]]:
    """A program that is at work, and its workers."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": env}
    program = subprocess.Popen([sys.executable, "-c", PROGRAM, str(prefetch)], **pipes)
    assert program.stdout is not None
    assert program.stdout.readline().strip() == "running"
    return program, list(processes_of(program.pid))


@pytest.mark.slow
@pytest.mark.parametrize("prefetch", [0, 2])
def test_an_interrupt_ends_everything(prefetch: int) -> None:
    program, workers = started(prefetch)
    program.send_signal(signal.SIGINT)
    _, told = program.communicate(timeout=60)
    assert "KeyboardInterrupt" in told
    assert program.returncode in (1, -signal.SIGINT)
    assert psutil.wait_procs(workers, timeout=60)[1] == []
    assert len(workers) == 2


@pytest.mark.slow
def test_workers_end_with_a_process_that_is_killed() -> None:
    program, workers = started(1)
    program.kill()
    program.communicate(timeout=60)
    assert psutil.wait_procs(workers, timeout=60)[1] == []


@pytest.mark.slow
def test_a_module_that_makes_a_rollout_when_it_is_imported_is_refused_by_its_workers(tmp_path: Path) -> None:
    (tmp_path / "careless.py").write_text(
        "from numbered_agents import NumberedAgents\n"
        "from rollflow.nodes import MultiAgentRollout\n"
        "class Mine(NumberedAgents):\n"
        "    def __init__(self): super().__init__(0, nested=0)\n"
        "with MultiAgentRollout(Mine, where='processes', fragment_length=4, num_fragments=1) as rollout:\n"
        "    list(rollout.batches())\n"
    )
    program = f"import sys; sys.path[:] = {[str(tmp_path), *sys.path]!r}; import careless"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert "expected that to stand under if __name__ == '__main__'" in done.stderr


def test_a_worker_that_only_steps_environments_needs_no_torch() -> None:
    program = (
        "import sys; import rollflow.nodes.env.workers.agent_worker; "
        "assert 'torch' not in sys.modules, 'torch is imported'"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=env, check=False)
    assert done.stderr == ""
    assert done.returncode == 0
