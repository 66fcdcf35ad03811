"""Hosts of whole rollouts, and gateways, that are killed, frozen or cut off: every transition is accounted for."""

import random
import signal
import threading
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import lost_agents
import numpy as np
import pytest
from ending_agent_envs import DoomedAgents, logs_of
from fragment_equality import assert_alike
from held_envs import Held, await_held, let_go
from lost_agents import check_multi_agent_chunks, emitted_steps, not_emitted
from numbered_module import NumberedModule
from paced_hosts import PacedHosts
from remote_hosts import BrokenWire, HostProcess, listening
from remote_rollouts import (
    HASTY,
    await_that,
    check_counts,
    check_laws,
    cut_off,
    makers,
    rollout_over,
    rollouts_on,
    slots_of,
    taken_until,
    told,
    wired,
)
from serial_module import at_of

from rollflow import Columns, Fragment, RemoteRollouts, Rollout
from rollflow.nodes import EnvHost, RolloutHost
from rollflow.nodes.env.remote.host import Host

pytestmark = pytest.mark.wait_times(first_pause_s=0.01, host_pause_s=0.05)


def test_a_rollout_that_is_left_in_the_middle_counts_what_it_was_told_of(tmp_path: Path) -> None:
    envs = listening(RemoteRollouts)
    with rollouts_on(envs.addresses[0], [partial(Held, 0, tmp_path, steps=[13])]):
        with rollout_over(envs, prefetch=1) as rollout:
            taken = [next(iter(rollout.fragments()))]
            await_held(tmp_path, 0)
            await_that(lambda: rollout.num_steps == 13)
        let_go(tmp_path, 0)
    assert rollout.num_steps == 13
    assert rollout.lost == {"closed": 5}
    check_counts(taken, rollout)


def test_a_host_that_is_cut_off_in_the_middle_of_a_fragment_has_it_when_it_comes_back(tmp_path: Path) -> None:
    with wired([partial(Held, 0, tmp_path, steps=[13])], num_fragments=3, prefetch=2) as (rollout, host, wire):
        await_held(tmp_path, 0)
        cut_off(wire, rollout)
        let_go(tmp_path, 0)
        await_that(lambda: host._session._lanes[0].answer is not None)
        wire.is_down = False
        taken = list(rollout.fragments())
    assert rollout.lost == {}
    with Rollout(makers(0), module=NumberedModule(), fragment_length=8, seed=0, num_fragments=3) as inline:
        assert_alike(taken, list(inline.fragments()))


# Gateways and hosts that are started again


def test_a_host_serves_one_rollout_after_the_other() -> None:
    address = "tcp://127.0.0.1:0"
    found: list[list[Fragment]] = []
    with RolloutHost(makers(0, 1), lanes=2, module=NumberedModule()) as host, host.listening(address) as there:
        serving = threading.Thread(target=host.serve)
        serving.start()
        for length in (4, 7):
            envs = RemoteRollouts.connect(str(there))
            with rollout_over(envs, fragment_length=length, num_fragments=2, seed=length) as rollout:
                found.append(list(rollout.fragments()))
                assert rollout.num_steps == 2 * 2 * length
            assert rollout.lost == {}
        host.stop()
        serving.join()
    for length, fragments in zip((4, 7), found, strict=True):
        assert sorted((f.lane, f.sequence, f.num_steps) for f in fragments) == [
            (lane, sequence, length) for lane in (0, 1) for sequence in (0, 1)
        ]


@pytest.mark.slow
def test_a_host_that_is_started_again_is_another() -> None:
    envs = listening(RemoteRollouts, limits=HASTY)
    first = HostProcess(envs.addresses[0], told(0), name="first", kind=RolloutHost)
    second = None
    try:
        with rollout_over(envs) as rollout:
            fragments = iter(rollout.fragments())
            taken = [next(fragments)]
            first.signal(signal.SIGKILL)
            second = HostProcess(envs.addresses[0], told(1), name="second", kind=RolloutHost)
            taken += taken_until(fragments, lambda more: 1 in slots_of(more))
            rollout.drain()
            taken += list(fragments)
    finally:
        first.end()
        if second is not None:
            second.end()
    assert sorted({fragment.lane for fragment in taken}) == [0, 1]
    check_laws(taken, rollout.lost, slots_lost=8 + 1)
    check_counts(taken, rollout)


# Hosts that come and go


def test_a_host_that_waits_for_others_can_say_how_far_it_is_afterwards(tmp_path: Path) -> None:
    """The host reports when it comes, and again only once the first report has been heard."""
    envs = listening(RemoteRollouts, hosts=2)
    with rollouts_on(envs.addresses[0], [partial(Held, 0, tmp_path, steps=[3])]) as early:

        def join() -> None:
            await_that(lambda: early._reported)  # it has been welcomed
            with rollouts_on(envs.addresses[0], makers(1)):
                ended.wait()

        ended = threading.Event()
        joining = threading.Thread(target=join)
        joining.start()
        with rollout_over(envs, prefetch=1) as rollout:
            await_held(tmp_path, 0)
            await_that(lambda: any(count.unreported == 3 for count in rollout.environments.remotes))
            let_go(tmp_path, 0)
        ended.set()
        joining.join()


# With several agents, or with one and with several


def logged(remote: PacedHosts, folder: Path, *slots: int) -> list[Any]:
    """Environments that write down what they tell."""
    return [partial(DoomedAgents, slot, folder, **remote.options) for slot in slots]


@pytest.mark.slow
@pytest.mark.parametrize("step", [0, 21, 24])
def test_a_host_that_is_killed_takes_its_fragment_with_it_and_nothing_else(step: int, tmp_path: Path) -> None:
    remote = PacedHosts(RolloutHost, agents=2, hosts=2)
    fate = {"fate": "kill", "step": step, "lives": 9, **remote.options}
    victim = remote.process_of([((slot, tmp_path), fate) for slot in (0, 1)], env=DoomedAgents, name="victim")
    try:
        with remote.host_of(logged(remote, tmp_path, 2, 3)), remote.rollout() as rollout:
            stream = iter(rollout.fragments())
            fragments = [next(stream) for _ in range(12)]
            rollout.drain()
            fragments += stream
    finally:
        victim.end()
    logs = [log for slot in range(4) for log in logs_of(tmp_path, slot)]
    # It may have made what it had no time to tell of; what it told of is lost, but for whole fragments.
    most = 2 * 2 * (step % 8 + 1)
    assert rollout.lost.keys() <= {"workers"}
    assert rollout.lost.get("workers", 0) <= most
    assert not_emitted(fragments, logs) <= most
    assert rollout.num_steps == len(emitted_steps(fragments))
    check_multi_agent_chunks(fragments)
    of_victim = [each for each in emitted_steps(fragments) if each[0][0] < 2]
    assert len(of_victim) == 2 * 2 * (step - step % 8)


@pytest.mark.parametrize("agents", [0, 2])
def test_a_connection_that_is_cut_again_and_again_loses_nothing(agents: int, tmp_path: Path) -> None:
    patient = replace(HASTY, grace_s=30.0)
    remote, rng = PacedHosts(RolloutHost, agents, limits=patient), random.Random(0)
    with ExitStack() as stack:
        wire = BrokenWire(remote.address, lambda: rng.randrange(1000, 20_000))
        stack.callback(wire.close)
        envs = logged(remote, tmp_path, 0, 1, 2) if agents else remote.makers(0, 1, 2)
        stack.enter_context(remote.host_of(envs, wire.address, lanes=2))
        rollout = stack.enter_context(remote.rollout(prefetch=1))
        fragments = []
        for fragment in rollout.fragments():
            fragments.append(fragment)
            if wire.cuts >= 20:
                rollout.drain()
        if agents:
            lost_agents.check_laws(rollout, fragments, tmp_path, 3)
        else:
            check_laws(fragments, rollout.lost, slots_lost=0)
        assert rollout.lost == {}
    assert {fragment.lane for fragment in fragments} == {0, 1}


@pytest.mark.parametrize("agents", [0, 2])
@pytest.mark.parametrize("kind", [EnvHost, RolloutHost])
def test_a_paced_loop_over_hosts_that_come_and_leave_is_exactly_on_policy(kind: type[Host], agents: int) -> None:
    remote, steps = PacedHosts(kind, agents), 0
    with ExitStack() as hosts:
        first = hosts.enter_context(remote.host(0))
        rollout = hosts.enter_context(remote.rollout(prefetch=2, max_lag=0, on_excess="pace"))
        batches, version = iter(rollout.batches()), 0

        def take() -> set[int]:
            """The slots of the next batch, after which weights are published."""
            nonlocal steps, version
            batch, slots = next(batches), set()
            for part in [batch] if Columns.OBS in batch else batch.values():
                versions = np.asarray(part[Columns.POLICY_VERSION])
                assert int(versions.min()) >= version
                slots |= set(at_of(part[Columns.OBS])[:, 0].tolist())
                steps += len(versions)
            version += 1
            rollout.publish(remote.weights(float(version)))
            return slots

        def until(*slots: int) -> None:
            while take() != set(slots):
                pass

        until(0)
        with remote.host(1, 2, lanes=2):
            until(0, 1, 2)
        until(0)
        first.stop()
        hosts.enter_context(remote.host(3))
        until(3)
        rollout.drain()
        with suppress(StopIteration):
            while True:
                take()
    assert rollout.lost.keys() <= {"workers"}
    assert rollout.num_steps == steps
