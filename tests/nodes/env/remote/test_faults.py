"""Hosts and gateways that are killed, frozen, cut off, or that hang: every transition is accounted for."""

import logging
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ending_envs import Doomed, rewards_by_slot
from lane_clock import LaneClock
from numbered_module import NumberedEnv, NumberedModule
from remote_hosts import BrokenWire, HostProcess, hosting, listening
from remote_rollouts import HASTY, await_that, check_laws, makers, rollout_over, slots_of, taken_until, told

from rollflow import Fragment, RemoteEnvs, Rollout, Timeouts
from rollflow.stream.wire import Limits


@pytest.mark.slow
@pytest.mark.parametrize("step", [0, 1, 21, 24])
def test_a_host_that_is_killed_ends_its_own_episodes_and_no_others(step: int, tmp_path: Path) -> None:
    envs = listening(hosts=2, limits=HASTY)
    doomed = [((slot, tmp_path, "kill", step, 9), {"lengths": (100, 200)}) for slot in (0, 1)]
    victim = HostProcess(envs.addresses[0], doomed, name="victim", env=Doomed)
    try:
        with hosting(envs.addresses[0], makers(2, 3)), rollout_over(envs) as rollout:
            fragments = iter(rollout.fragments())
            taken = taken_until(fragments, lambda taken: len(taken) > 12)
            rollout.drain()
            taken += list(fragments)
    finally:
        victim.end()
    check_laws(taken, rollout.lost, slots_lost=2)
    assert [rewards_by_slot(taken).get(slot, []) for slot in (0, 1)] == [list(range(1, step + 1))] * 2
    lost = [chunk.custom_data["lost"] for f in taken for chunk in f.episodes() if "lost" in chunk.custom_data]
    assert len(lost) == (2 if step % 8 else 0)  # what ended with a fragment has been handed out
    assert all("victim" in reason and "not back within 0.5 s" in reason for reason in lost)


@pytest.mark.slow
def test_a_host_that_freezes_and_wakes_goes_on_where_it_was() -> None:
    envs = listening(limits=Limits(heartbeat_s=0.2, grace_s=30.0))
    host = HostProcess(envs.addresses[0], told(0, 1))
    try:
        with rollout_over(envs, num_fragments=40) as rollout:
            fragments = iter(rollout.fragments())
            taken = [next(fragments) for _ in range(3)]
            host.signal(signal.SIGSTOP)
            gateway = rollout.environments.gateway
            rest: list[Fragment] = []
            reader = threading.Thread(target=lambda: rest.extend(fragments))
            reader.start()
            while not any(each.lost_at is not None for each in gateway.hosts.values()):
                time.sleep(0.01)  # until it is taken for lost
            host.signal(signal.SIGCONT)
            reader.join()
            taken += rest
        assert rollout.lost == {}
    finally:
        host.end()
    with Rollout(makers(0, 1), module=NumberedModule(), fragment_length=8, seed=0, num_fragments=40) as inline:
        expected = list(inline.fragments())
    assert len(taken) == len(expected) == 40
    for mine, other in zip(taken, expected, strict=True):
        np.testing.assert_array_equal(mine.column("obs"), other.column("obs"))
        np.testing.assert_array_equal(mine.column("actions"), other.column("actions"))


@pytest.mark.wait_times(first_pause_s=0.001)
@pytest.mark.slow
def test_a_connection_cut_a_thousand_times_loses_nothing() -> None:
    rng = random.Random(0)
    envs = listening()
    wire = BrokenWire(envs.addresses[0], lambda: rng.randrange(1, 4000))
    logging.getLogger("rollflow").setLevel(logging.ERROR)
    try:
        with hosting(wire.address, makers(0, 1, 2), lanes=2), rollout_over(envs) as rollout:
            fragments = iter(rollout.fragments())
            taken = taken_until(fragments, lambda taken: wire.cuts >= 1000)
            rollout.drain()
            taken += list(fragments)
    finally:
        wire.close()
        logging.getLogger("rollflow").setLevel(logging.NOTSET)
    check_laws(taken, rollout.lost, slots_lost=3)
    assert rollout.lost.get("workers", 0) <= 3


@pytest.mark.slow
def test_a_gateway_that_is_killed_and_started_again_gets_its_hosts_back() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    address = f"tcp://127.0.0.1:{port}"
    program = (
        f"import sys; sys.path[:] = {sys.path!r}\n"
        "from numbered_module import NumberedModule\n"
        "from rollflow.nodes import RemoteEnvs, Rollout\n"
        f"with Rollout(RemoteEnvs.listen({address!r}), module=NumberedModule(), fragment_length=8) as rollout:\n"
        "    for fragment in rollout.fragments():\n"
        "        print(fragment.sequence, flush=True)\n"
    )
    with hosting(address, makers(0, 1)):
        first = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
        assert first.stdout is not None
        while int(first.stdout.readline()) < 3:
            pass
        first.kill()
        first.communicate()
        with rollout_over(RemoteEnvs.listen(address), num_fragments=4) as rollout:
            taken = list(rollout.fragments())
    assert rollout.lost == {}
    for steps in rewards_by_slot(taken).values():
        assert steps == list(range(steps[0], steps[0] + 32))


def test_a_hung_simulator_is_named_and_its_episode_ended(lane_clock: LaneClock) -> None:
    clock = lane_clock
    go_on = threading.Event()

    class Hanging(NumberedEnv):
        def step(self, action: Any) -> Any:
            if self.life == 20 and not go_on.is_set():
                go_on.wait()
            return super().step(action)

    def release(rollout: Rollout) -> None:
        with suppress(TimeoutError):
            # The other lane has made all of its third fragment.
            await_that(lambda: rollout.num_steps == 20 + 24 and clock.is_before(rollout, 0))
            clock.go_on(rollout, 0.4)
            await_that(lambda: rollout.lost)  # the step is given up
        go_on.set()

    envs = listening()
    hanging = partial(Hanging, 0, lengths=(50, 60))
    host = hosting(envs.addresses[0], [hanging, *makers(1)], lanes=2, name="sim")
    with host, rollout_over(envs, timeouts=Timeouts(step=0.3)) as rollout:
        releasing = threading.Thread(target=release, args=(rollout,))
        releasing.start()
        fragments = iter(rollout.fragments())
        taken = taken_until(fragments, lambda taken: bool(rollout.lost) and len(taken) > 12)
        rollout.drain()
        taken += list(fragments)
    releasing.join()
    lost = [chunk.custom_data["lost"] for f in taken for chunk in f.episodes() if "lost" in chunk.custom_data]
    [told] = [reason for reason in lost if "slot 0" in reason]
    assert "host sim (tcp://127.0.0.1:" in told
    assert "slot 0: no answer to a step within 0.3 s" in told
    others = [f for f in taken if slots_of([f]) <= {1}]
    check_laws(others, rollout.lost, slots_lost=2)
