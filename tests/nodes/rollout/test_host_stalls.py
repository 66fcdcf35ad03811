"""Faults on hosts, which the stall doctor names with lane and host."""

import re
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from doctor_clock import Looking
from held_envs import Held, await_held, await_that, let_go
from numbered_module import NumberedModule
from remote_hosts import HostProcess, hosting, listening
from remote_rollouts import HASTY
from stalled_rollouts import OPTIONS, await_blocker, await_end_of, being_read

from rollflow import RemoteEnvs, RemoteRollouts, Rollout
from rollflow.nodes import EnvHost, RolloutHost

HOST = r"\(lane 0, host sim \(.*\)\)"


def told_of(
    rollout: Any, party: str, await_fault: Callable[[], object], end_fault: Callable[[], object], calls: int = 1
) -> str:
    """What the log says once a host hangs that has done so many calls, until the fault is ended."""
    with being_read(rollout, end_fault):
        await_fault()
        await_blocker(rollout, party, calls)
        return Looking(rollout._doctor).until_told(8.0)


@pytest.mark.parametrize("kind", [EnvHost, RolloutHost])
def test_a_step_that_hangs_in_a_host_process_is_named_with_the_host(kind: Any, tmp_path: Path) -> None:
    has_rollouts = kind is RolloutHost
    remote = listening(RemoteRollouts if has_rollouts else RemoteEnvs)
    makers = [((0, tmp_path), {"lengths": (50, 50), "steps": [3]})]
    host = HostProcess(remote.addresses[0], makers, name="sim", env=Held, kind=kind)
    rollout = Rollout(remote, module=NumberedModule(), **OPTIONS)
    party = "rollouts" if has_rollouts else "env"
    text = told_of(rollout, party, lambda: await_held(tmp_path, 0), lambda: let_go(tmp_path, 0))
    host.end()
    assert re.match(rf"no fragment for \d\.\d s: {party} {HOST} has no answer to step\(\) since \d\.\d s; ", text), text
    assert "do: look at the log of the host, or run rollflow doctor PID there; step_timeout gives the lane up" in text


def test_a_reset_that_hangs_on_a_host_is_named(tmp_path: Path) -> None:
    remote = listening(RemoteEnvs)
    with hosting(remote.addresses[0], [partial(Held, 0, tmp_path, resets=[0])], name="sim"):
        rollout = Rollout(remote, module=NumberedModule(), **OPTIONS)
        with being_read(rollout, lambda: let_go(tmp_path, 0)):
            await_held(tmp_path, 0)
            await_blocker(rollout, "env")
            text = Looking(rollout._doctor).until_told(35.0)
    assert re.search(rf"env {HOST} has no answer to reset\(\) since 3\d\.\d s", text), text


def test_of_several_lanes_on_a_host_the_one_that_hangs_is_named(tmp_path: Path) -> None:
    remote = listening(RemoteEnvs)
    envs = [partial(Held, slot, tmp_path, lengths=(50, 50), steps=[3] if slot else []) for slot in range(2)]
    with hosting(remote.addresses[0], envs, lanes=2, name="sim"):
        rollout = Rollout(remote, module=NumberedModule(), **OPTIONS)

        def hang() -> None:
            await_held(tmp_path, 1)
            await_end_of(rollout, 0)

        text = told_of(rollout, "env", hang, lambda: let_go(tmp_path, 1))
    assert re.search(r"env \(lane 1, host sim \(.*\)\) has no answer to step\(\) since", text), text


@pytest.mark.slow
def test_a_host_that_was_killed_is_named_and_then_that_none_is_left(tmp_path: Path) -> None:
    remote = listening(RemoteEnvs, limits=HASTY)
    makers = [((0, tmp_path), {"lengths": (50, 50), "steps": [3]})]
    host = HostProcess(remote.addresses[0], makers, name="sim", env=Held)
    rollout = Rollout(remote, module=NumberedModule(), **OPTIONS)

    def none_is_left() -> bool:
        look, blocker = rollout._doctor.look(), rollout.diagnose().blocker
        has_steps = look is not None and look.exits[0].items == 1  # the fragment of the lost lane's steps has left
        return has_steps and blocker is not None and blocker.doing == "has no host left, and waits for others"

    def kill() -> None:
        await_held(tmp_path, 0)
        host.signal(signal.SIGKILL)
        host.process.communicate()
        await_that(none_is_left, rollout.diagnose)

    another = HostProcess(remote.addresses[0], [((1,), {})], name="another")
    another.signal(signal.SIGSTOP)
    text = told_of(rollout, "env", kill, lambda: another.signal(signal.SIGCONT), calls=0)
    another.end()
    assert re.match(r"no fragment for 5\.\d s: env has no host left, and waits for others since 5\.\d s; ", text), text
    assert "do: start a host" in text
