"""Hosts that join and leave, rollouts that end, and what can not be begun."""

import gc
import itertools
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest
from held_envs import Held, await_held, let_go
from leftovers import nothing_left
from paced_hosts import PacedHosts
from remote_agents import ONE, SEVERAL, Kind
from remote_hosts import SHORT, HostProcess, RawHost, end_waits_once, hosting, listening
from remote_rollouts import (
    HASTY,
    await_that,
    check_counts,
    check_laws,
    makers,
    reset_of,
    rollout_over,
    slots_of,
    taken_until,
    told,
)
from small_env import SmallEnv

from rollflow import Forward, RemoteEnvs, Rollout, Timeouts
from rollflow.nodes import EnvHost, RolloutHost
from rollflow.nodes.env.remote.host import Host
from rollflow.stream import EnvError
from rollflow.stream.data.errors import WireError
from rollflow.stream.wire import Goodbye, Limits


@pytest.mark.slow
def test_a_drained_rollout_waits_for_no_host_that_is_frozen(caplog: pytest.LogCaptureFixture) -> None:
    envs = listening(limits=HASTY)
    host = HostProcess(envs.addresses[0], told(0, 1))
    try:
        with rollout_over(envs, timeouts=Timeouts(step=None), prefetch=1) as rollout:
            fragments = iter(rollout.fragments())
            taken = [next(fragments)]
            host.signal(signal.SIGSTOP)
            rollout.drain()
            taken += list(fragments)
            error = rollout.environments.last_error
        check_laws(taken, rollout.lost, slots_lost=2)
    finally:
        host.end()
    why = "the rollout ended: no host"
    assert f"lane 0 is lost: {why}" in caplog.text
    assert error is not None
    assert error.text == f"lane 0: {why}"


def test_a_lane_that_resets_at_a_drain_is_not_told_as_lost(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    envs = listening()
    with hosting(envs.addresses[0], [partial(Held, 0, tmp_path, resets=[0])]):
        try:
            with rollout_over(envs) as rollout:
                await_held(tmp_path, 0)
                rollout.drain()
                assert list(rollout.fragments()) == []
        finally:
            let_go(tmp_path, 0)
    assert "lost" not in caplog.text


@pytest.mark.parametrize("kind", [EnvHost, RolloutHost])
def test_a_host_that_leaves_before_the_first_step_is_a_lane_that_has_left(kind: type[Host]) -> None:
    remote = PacedHosts(kind, hosts=2)
    with remote.host(0):
        with remote.host(1) as leaving:
            rollout = remote.rollout(num_fragments=2)
            leaving.stop()
            await_that(lambda: len(rollout.environments.gateway.hosts) == 1)
        with rollout:
            taken = list(rollout.fragments())
    assert [fragment.sequence for fragment in taken] == [0, 1]
    assert slots_of(taken) == {0}
    assert rollout.lost == {}


@pytest.mark.parametrize(
    ("kind", "pace"),
    [(EnvHost, {}), (RolloutHost, {}), (RolloutHost, {"max_lag": 1, "on_excess": "pace", "prefetch": 1})],
    ids=["environments", "rollouts on them", "rollouts on them under pace"],
)
def test_hosts_join_and_leave_while_the_rollout_runs(
    kind: type[Host], pace: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    remote = PacedHosts(kind)
    with remote.host(0) as first, remote.rollout(**pace) as rollout:
        fragments = iter(rollout.fragments())
        taken = [next(fragments)]
        with remote.host(1, 2, lanes=2):
            taken += taken_until(fragments, lambda more: slots_of(more) >= {0, 1, 2})
            assert rollout.environments.lanes_at_work == {0, 1, 2}
        taken += taken_until(fragments, lambda more: len(more) > 20 and slots_of(more[-5:]) == {0})
        assert rollout.environments.lanes_at_work == {0}
        first.stop()
        with remote.host(3):  # no host is left, until this one comes
            taken += taken_until(fragments, lambda more: 3 in slots_of(more))
            rollout.drain()
            taken += list(fragments)
    assert sorted({f.lane for f in taken}) == [0, 1, 2, 3]
    check_laws(taken, rollout.lost, slots_lost=3 * (1 if kind is EnvHost else 8 + 1))
    check_counts(taken, rollout)
    assert "said goodbye: the host was stopped" in caplog.text


@pytest.mark.slow
def test_a_rollout_whose_hosts_have_all_left_says_why() -> None:
    envs = listening()
    with hosting(envs.addresses[0], makers(0)) as host, rollout_over(envs) as rollout:
        rollout.environments.join_timeout = 1.0
        fragments = iter(rollout.fragments())
        next(fragments)
        host.stop()
        with pytest.raises(EnvError, match=r"every host has left and none came within 1 s: host .*: said goodbye"):
            list(fragments)


def test_a_rollout_without_hosts_says_where_it_waited(monkeypatch: pytest.MonkeyPatch) -> None:
    envs = listening(join_timeout=60, secret="right")
    stranger = RawHost(envs.addresses[0], secret=b"wrong")
    refused = threading.Thread(target=stranger.refusal)
    refused.start()
    end_waits_once(monkeypatch, lambda: not refused.is_alive())
    told = r"0 of 1 hosts came within 60 s, listening on tcp://127.0.0.1:\d+; .*has another secret"
    with pytest.raises(EnvError, match=told):
        Rollout(envs)


def test_a_wait_for_hosts_that_is_over_looks_once_more_at_what_came_by_then(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = itertools.count()
    end_waits_once(monkeypatch, lambda: next(asked) > 0)  # after the dial, before what came of it is looked at
    with pytest.raises(EnvError, match=r"0 of 1 hosts came within 60 s, dialling tcp://127.0.0.1:1; .*refused"):
        Rollout(RemoteEnvs.connect("tcp://127.0.0.1:1", join_timeout=60))


def test_a_host_that_finds_no_gateway_gives_up_and_says_so() -> None:
    told = "gateway tcp://127.0.0.1:1 not reached for 0.2 s: "
    with EnvHost(makers(0)) as host, pytest.raises(WireError, match=told):
        host.connect("tcp://127.0.0.1:1", retry_s=0.2)


@pytest.mark.slow
@nothing_left()
def test_goodbyes_leave_nothing_behind() -> None:
    envs = listening()
    raw: list[RawHost] = []
    with hosting(envs.addresses[0], makers(0)), rollout_over(envs, prefetch=1) as rollout:
        fragments = iter(rollout.fragments())
        next(fragments)
        raw.append(RawHost(envs.addresses[0]))
        reset_of(raw[0], fragments, [])
        reader = threading.Thread(target=lambda: raw.append(raw[0].next_of(Goodbye)))
        reader.start()
    reader.join()
    raw[0].sock.close()
    assert raw[1].reason == "the rollout has ended"  # type: ignore[attr-defined]


@nothing_left()
def test_a_rollout_that_is_never_entered_leaves_nothing_behind() -> None:
    envs = listening()
    raw = RawHost(envs.addresses[0])

    def greet_until_hung_up() -> None:
        while raw.next_event() is not None:
            pass

    greeting = threading.Thread(target=greet_until_hung_up)
    greeting.start()
    rollout = rollout_over(envs)
    del rollout, envs
    gc.collect()
    greeting.join()
    raw.sock.close()


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: RemoteEnvs.listen("tcp://0.0.0.0:0"), "without a secret, expected one, or a loopback address"),
        (lambda: RemoteEnvs.listen("udp://127.0.0.1:1"), "expected 'tcp://host:port'"),
        (lambda: RemoteEnvs.listen(), "no address to listen on"),
        (lambda: RemoteEnvs.connect([]), "no address to dial"),
        (lambda: RemoteEnvs.listen("tcp://127.0.0.1:0", hosts=0), "hosts is 0"),
        (lambda: RemoteEnvs.listen("unix:/nowhere/at/all"), "can't listen on unix:/nowhere/at/all: No such file"),
    ],
)
def test_wrong_arguments_are_refused(make: Callable[[], Any], told: str) -> None:
    with pytest.raises((ValueError, EnvError, WireError), match=told):
        make()


def test_remote_environments_are_for_one_rollout() -> None:
    envs = listening()
    with hosting(envs.addresses[0], makers(0)):
        with rollout_over(envs, num_fragments=1) as rollout:
            list(rollout.fragments())
        with pytest.raises(EnvError, match="have been given to a rollout already"):
            Rollout(envs)


def test_limits_of_hosts_are_kept() -> None:
    envs = listening(max_hosts=1, limits=SHORT)
    with hosting(envs.addresses[0], makers(0)), rollout_over(envs, prefetch=1) as rollout:
        next(iter(rollout.fragments()))
        with EnvHost(makers(1)) as other, pytest.raises(WireError, match="1 hosts are here already, expected no more"):
            other.connect(str(envs.addresses[0]), retry_s=0.0)


@pytest.mark.parametrize("kind", [ONE, SEVERAL], ids=["one agent", "several agents"])
@pytest.mark.parametrize("max_wait", [0.0, 1e-3], ids=["joint", "joint after a wait"])
def test_a_late_host_with_many_lanes_is_room_made_for(kind: Kind, max_wait: float, tmp_path: Path) -> None:
    envs = listening()
    options = {"forward": Forward(max_batch=kind.max_batch, max_wait=max_wait)}
    with hosting(envs.addresses[0], kind.makers(tmp_path, 0)), kind.rollout_over(envs, **options) as rollout:
        fragments = iter(rollout.fragments())
        taken = [next(fragments)]
        with hosting(envs.addresses[0], kind.makers(tmp_path, *range(1, 12)), lanes=9):
            taken += taken_until(fragments, lambda more: kind.slots_of(more) >= set(range(12)))
            rollout.drain()
            taken += list(fragments)
        kind.check_laws(rollout, taken, tmp_path, 12)


def test_lanes_that_have_left_take_no_memory() -> None:
    envs = listening()
    with hosting(envs.addresses[0], makers(0)), rollout_over(envs, prefetch=1) as rollout:
        fragments = iter(rollout.fragments())
        for slot in (1, 2):
            with hosting(envs.addresses[0], makers(slot)):
                taken_until(fragments, lambda more, slot=slot: slot in slots_of(more))
            taken_until(fragments, lambda more: len(more) > 4 and slots_of(more[-3:]) == {0})
        assert [bool(lane.fragment.columns) for lane in rollout.environments.lanes] == [True, False, False]
        assert rollout.num_steps > 0


@pytest.mark.slow
def test_a_host_that_takes_smaller_frames_leaves_and_the_others_go_on(caplog: pytest.LogCaptureFixture) -> None:
    envs = listening()
    space = gym.spaces.Box(-1, 1, (20_000,))

    class Wide(SmallEnv):
        observation_space, action_space = gym.spaces.Box(-1, 1, (2,)), space

    with hosting(envs.addresses[0], Wide), Rollout(envs, fragment_length=4, prefetch=1, seed=0) as rollout:
        fragments = iter(rollout.fragments())
        next(fragments)
        told = r"frame of \d+ bytes, expected at most 65536"
        with EnvHost(Wide) as narrow, ThreadPoolExecutor(1) as pool, pytest.raises(WireError, match=told):
            connecting = pool.submit(narrow.connect, str(envs.addresses[0]), limits=Limits(max_frame=1 << 16))
            while not connecting.done():  # a rollout whose fragments nobody takes asks nobody for more
                next(fragments)
            connecting.result()
        for _ in range(4):
            next(fragments)
    assert "takes no more" in caplog.text
