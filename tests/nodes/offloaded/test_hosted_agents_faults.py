"""Hosts of whole rollouts of several agents that are killed, cut off, outrun, come and leave: no step is lost."""

import random
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import remote_rollouts
from ending_agent_envs import DoomedAgents, logs_of
from lost_agents import check_laws, check_multi_agent_chunks, emitted_steps, not_emitted
from paced_hosts import PacedHosts
from remote_hosts import BrokenWire
from serial_module import at_of

from rollflow import Columns
from rollflow.nodes import EnvHost, RolloutHost
from rollflow.nodes.env.remote.host import Host

pytestmark = pytest.mark.wait_times(first_pause_s=0.001)


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
    remote, rng = PacedHosts(RolloutHost, agents), random.Random(0)
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
            check_laws(rollout, fragments, tmp_path, 3)
        else:
            remote_rollouts.check_laws(fragments, rollout.lost, slots_lost=0)
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
