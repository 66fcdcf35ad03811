"""Faults on hosts, which the stall doctor names with lane and host, and with the line that the host says itself."""

import re
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from doctor_clock import Looking
from held_envs import Held, await_file, await_held, await_that, let_go
from held_parts import HeldAgents, HeldModule, HeldPiece
from numbered_module import NumberedEnv, NumberedModule
from remote_hosts import HostProcess, RawHost, hosting, listening
from remote_rollouts import HASTY
from stalled_rollouts import OPTIONS, await_blocker, await_end_of, being_read, line_of

from rollflow.nodes import EnvHost, MultiAgentRollout, RandomModule, RemoteEnvs, RemoteRollouts, Rollout, RolloutHost
from rollflow.stream.wire import Goodbye, Reset, Step, Welcome

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
def test_a_step_that_hangs_in_a_host_process_is_named_with_the_hosts_line(kind: Any, tmp_path: Path) -> None:
    has_rollouts = kind is RolloutHost
    remote = listening(RemoteRollouts if has_rollouts else RemoteEnvs)
    makers = [((0, tmp_path), {"lengths": (50, 50), "steps": [3]})]
    host = HostProcess(remote.addresses[0], makers, name="sim", env=Held, kind=kind)
    rollout = Rollout(remote, module=NumberedModule(), **OPTIONS)
    party = "rollouts" if has_rollouts else "env"
    text = told_of(rollout, party, lambda: await_held(tmp_path, 0), lambda: let_go(tmp_path, 0))
    host.end()
    assert re.match(rf"no fragment for \d\.\d s: {party} {HOST} is in step\(\) since \d\.\d s; ", text), text
    assert line_of(Held.step, "self._wait()") in text, text
    assert "do: have it return; step_timeout gives the lane up, which begins anew" in text


def test_a_reset_that_hangs_on_a_host_is_named(tmp_path: Path) -> None:
    remote = listening(RemoteEnvs)
    with hosting(remote.addresses[0], [partial(Held, 0, tmp_path, resets=[0])], name="sim"):
        rollout = Rollout(remote, module=NumberedModule(), **OPTIONS)
        with being_read(rollout, lambda: let_go(tmp_path, 0)):
            await_held(tmp_path, 0)
            await_blocker(rollout, "env")
            text = Looking(rollout._doctor).until_told(35.0)
    assert re.search(rf"env {HOST} is in reset\(\) since 3\d\.\d s", text), text
    assert line_of(Held.reset, "self._wait()") in text, text


def test_a_forward_pass_that_hangs_on_a_host_is_named(tmp_path: Path) -> None:
    remote = listening(RemoteRollouts)
    module = HeldModule(tmp_path)
    with hosting(remote.addresses[0], [partial(NumberedEnv, 0)], kind=RolloutHost, module=module, name="sim"):
        rollout = Rollout(remote, module=HeldModule(tmp_path), **OPTIONS)
        held, go = partial(await_file, tmp_path / "hangs"), (tmp_path / "go").touch
        text = told_of(rollout, "rollouts", held, go)
    assert re.search(rf"rollouts {HOST} is in node 'module' since 5\.", text), text
    assert line_of(HeldModule._forward, "held.call") in text, text


def test_a_step_of_several_agents_that_hangs_on_a_host_is_named(tmp_path: Path) -> None:
    remote = listening(RemoteEnvs)
    with hosting(remote.addresses[0], [partial(HeldAgents, tmp_path)], name="sim"):
        rollout = MultiAgentRollout(remote, module=RandomModule, **OPTIONS)
        held, go = partial(await_file, tmp_path / "hangs"), (tmp_path / "go").touch
        text = told_of(rollout, "env", held, go)
    assert re.search(rf"env {HOST} is in step\(\) since 5\.", text), text
    assert line_of(HeldAgents.step, "held.call") in text, text


def test_of_several_lanes_on_a_host_the_one_that_hangs_is_named(tmp_path: Path) -> None:
    remote = listening(RemoteEnvs)
    envs = [partial(Held, slot, tmp_path, lengths=(50, 50), steps=[3] if slot else []) for slot in range(2)]
    with hosting(remote.addresses[0], envs, lanes=2, name="sim"):
        rollout = Rollout(remote, module=NumberedModule(), **OPTIONS)

        def hang() -> None:
            await_held(tmp_path, 1)
            await_end_of(rollout, 0)

        text = told_of(rollout, "env", hang, lambda: let_go(tmp_path, 1))
    assert re.search(r"env \(lane 1, host sim \(.*\)\) is in step\(\) since", text), text


@pytest.mark.slow
def test_a_host_that_is_stopped_is_told_from_one_whose_environments_hang(tmp_path: Path) -> None:
    remote = listening(RemoteEnvs)
    makers = [((0, tmp_path), {"lengths": (50, 50), "steps": [3]})]
    host = HostProcess(remote.addresses[0], makers, name="sim", env=Held)

    def hang() -> None:
        await_held(tmp_path, 0)
        host.signal(signal.SIGSTOP)

    def go_on() -> None:
        host.signal(signal.SIGCONT)
        let_go(tmp_path, 0)

    text = told_of(Rollout(remote, module=NumberedModule(), **OPTIONS), "env", hang, go_on)
    host.end()
    assert re.search(rf"env {HOST} has no answer to step\(\), and its host does not answer at all since", text), text
    assert "do: look whether the host's process runs, and at the network" in text


def test_a_host_that_answers_no_questions_is_named_by_what_is_known_here() -> None:
    remote = listening(RemoteEnvs)
    raw = RawHost(remote.addresses[0], name="sim", answers_inspect=False)
    asked: list[Step] = []
    with ThreadPoolExecutor(1) as pool:
        making = pool.submit(Rollout, remote, module=NumberedModule(), **OPTIONS)
        raw.next_of(Welcome)
        rollout = making.result()

    def hang() -> None:
        raw.answer(raw.next_of(Reset))
        raw.answer(raw.next_of(Step))
        asked.append(raw.next_of(Step))

    def go_on() -> None:
        event: Any = asked[0]
        while not isinstance(event, Goodbye):
            raw.answer(event)
            event = raw.next_event()
        raw.sock.close()

    text = told_of(rollout, "env", hang, go_on)
    assert re.search(rf"env {HOST} has no answer to step\(\) since", text), text
    assert "do: look at the log of the host; step_timeout gives the lane up" in text


def test_a_connector_that_hangs_on_a_host_is_named(tmp_path: Path) -> None:
    remote = listening(RemoteRollouts)
    connector: Any = {"env_to_module_connector": lambda env: HeldPiece(tmp_path), "module": NumberedModule()}
    with hosting(remote.addresses[0], [partial(NumberedEnv, 0)], kind=RolloutHost, name="sim", **connector):
        rollout = Rollout(remote, **connector, **OPTIONS)
        held, go = partial(await_file, tmp_path / "hangs"), (tmp_path / "go").touch
        text = told_of(rollout, "rollouts", held, go)
    assert re.search(rf"rollouts {HOST} is in node 'env_to_module' since 5\.", text), text
    assert line_of(HeldPiece.__call__, "held.call") in text, text


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
