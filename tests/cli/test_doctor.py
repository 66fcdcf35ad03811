"""`rollflow doctor`: where the threads of another process stand, by the signal that a run answers."""

import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from command_errors import Says
from held_envs import Held, await_held, let_go
from numbered_module import NumberedModule
from remote_hosts import listening
from stalled_rollouts import OPTIONS, await_blocker, being_read, line_of

from rollflow import Rollout, Watch

WATCHED: Any = {**OPTIONS, "watch": Watch(stall_after=60.0)}


def waiting_process(*words: str) -> subprocess.Popen[str]:
    """A process that waits for its input, and has said so."""
    process = subprocess.Popen(
        [sys.executable, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "here\n"
    return process


def ended(process: subprocess.Popen[str]) -> int:
    """The exit status of a process once it has gone on."""
    process.communicate("go on\n")
    return process.returncode


def test_a_step_that_hangs_is_shown_with_its_line_and_goes_on(tmp_path: Path, shown: Says) -> None:
    env = partial(Held, 0, tmp_path, lengths=(50, 50), steps=[3])
    rollout = Rollout(env, num_envs=1, module=NumberedModule(), where="threads", **WATCHED)
    with being_read(rollout, lambda: let_go(tmp_path, 0)):
        await_held(tmp_path, 0)
        text = shown("doctor", os.getpid())
    assert text.startswith(f"process {os.getpid()}, ")
    assert f"{line_of(Held.step, 'self._wait()')} in step: self._wait()" in text
    assert text.index("main thread:") < text.index("\nthread ")


@pytest.mark.slow
def test_workers_are_shown_with_their_process_and_by_themselves(tmp_path: Path, shown: Says) -> None:
    env = partial(Held, 0, tmp_path, lengths=(50, 50), steps=[3])
    rollout = Rollout(env, num_envs=1, module=NumberedModule(), where="processes", **WATCHED)
    worker = rollout.environments._workers[0].process.pid
    with being_read(rollout, lambda: let_go(tmp_path, 0)):
        await_held(tmp_path, 0)
        await_blocker(rollout, "env")
        with_its_parent = shown("doctor", os.getpid())
        alone = shown("doctor", worker)
    line = line_of(Held.step, "self._wait()")
    assert line in with_its_parent.split(f"process {worker}, which it has started\n")[1]
    assert alone.startswith(f"process {worker}, ")
    assert line in alone


def test_a_process_without_a_run_is_left_alone_and_a_stopped_one_is_said_to_be(refused: Says, shown: Says) -> None:
    process = waiting_process("-c", "print('here', flush=True); input()")
    error = refused("doctor", process.pid)
    assert f"nothing can be seen of process {process.pid}: a process answers on Linux, while it runs rollflow" in error
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
    assert f"do: kill -CONT {process.pid}" in shown("doctor", process.pid)
    process.send_signal(signal.SIGCONT)
    assert ended(process) == 0


_HOST = """
import sys; sys.path[:] = {path!r}
from functools import partial
from pathlib import PosixPath
from held_envs import Held
from rollflow.nodes import EnvHost
with EnvHost([partial(Held, 0, {folder!r}, steps=[0])], name="sim") as host:
    print("here", flush=True)
    host.connect({address!r}, retry_s=30.0)
"""
_TRAINER = """
import sys; sys.path[:] = {path!r}
from rollflow import TrainerStream
with TrainerStream("tcp://127.0.0.1:0"):
    print("here", flush=True)
    input()
"""


@pytest.mark.slow
def test_a_trainer_answers_the_signal_too(shown: Says) -> None:
    process = waiting_process("-c", _TRAINER.format(path=sys.path))
    assert shown("doctor", process.pid).splitlines()[1].startswith("main thread:")
    assert ended(process) == 0


@pytest.mark.slow
def test_a_host_answers_the_signal_too(tmp_path: Path, shown: Says) -> None:
    remote = listening()
    program = _HOST.format(path=sys.path, folder=tmp_path, address=str(remote.addresses[0]))
    process = waiting_process("-c", program)
    rollout = Rollout(remote, module=NumberedModule(), **OPTIONS)
    with being_read(rollout, lambda: let_go(tmp_path, 0)):
        await_held(tmp_path, 0)
        assert line_of(Held.step, "self._wait()") in shown("doctor", process.pid)
    assert ended(process) == 0
