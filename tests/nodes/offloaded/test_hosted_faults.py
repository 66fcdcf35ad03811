"""Hosts of whole rollouts, and gateways, that are killed, frozen or cut off: every transition is accounted for."""

import signal
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from fragment_equality import assert_alike
from held_envs import Held, await_held, let_go
from numbered_module import NumberedModule
from remote_hosts import HostProcess, listening
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

from rollflow import Fragment, RemoteRollouts, Rollout
from rollflow.nodes import RolloutHost

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


@pytest.mark.parametrize("pace", [{}, {"max_lag": 1, "on_excess": "pace", "prefetch": 1}], ids=["free", "pace"])
def test_hosts_join_and_leave_while_the_rollout_runs(pace: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    envs = listening(RemoteRollouts, limits=HASTY)
    first = rollouts_on(envs.addresses[0], makers(0))
    host = first.__enter__()
    with rollout_over(envs, **pace) as rollout:
        fragments = iter(rollout.fragments())
        taken = [next(fragments)]
        with rollouts_on(envs.addresses[0], makers(1, 2), lanes=2):
            taken += taken_until(fragments, lambda more: slots_of(more) >= {0, 1, 2})
        taken += taken_until(fragments, lambda more: len(more) > 20 and slots_of(more[-5:]) == {0})
        host.stop()
        with rollouts_on(envs.addresses[0], makers(3)):  # no host is left, until this one comes
            taken += taken_until(fragments, lambda more: 3 in slots_of(more))
            rollout.drain()
            taken += list(fragments)
    first.__exit__(None, None, None)
    assert sorted({fragment.lane for fragment in taken}) == [0, 1, 2, 3]
    check_laws(taken, rollout.lost, slots_lost=3 * (8 + 1))
    check_counts(taken, rollout)
    assert "said goodbye: the host was stopped" in caplog.text


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
            await_that(lambda: any(count.unreported == 3 for count in rollout.environments._counts))
            let_go(tmp_path, 0)
        ended.set()
        joining.join()


def test_a_host_that_leaves_before_the_first_step_is_a_lane_that_has_left() -> None:
    envs = listening(RemoteRollouts, hosts=2)
    with rollouts_on(envs.addresses[0], makers(0)):
        with rollouts_on(envs.addresses[0], makers(1)) as leaving:
            rollout = rollout_over(envs, num_fragments=2)
            gateway = rollout.environments.gateway
            leaving.stop()
            await_that(lambda: len(gateway.hosts) == 1)
        with rollout:
            taken = list(rollout.fragments())
    assert [fragment.sequence for fragment in taken] == [0, 1]
    assert slots_of(taken) == {0}
    assert rollout.lost == {}
