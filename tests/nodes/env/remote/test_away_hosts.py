"""Hosts that die or are away: the others go on, and new ones join them."""

import logging
import signal
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import pytest
from remote_hosts import BrokenWire, HostProcess, hosting, listening
from remote_rollouts import await_that, makers, rollout_over, slots_of, taken_until, told

from rollflow.stream.wire import Limits

pytestmark = pytest.mark.wait_times(host_pause_s=0.05, redial_s=0.1)

# A lost host is waited for far longer than any of these tests may take.
PATIENT = Limits(heartbeat_s=5.0, grace_s=3600.0)


@pytest.fixture(autouse=True)
def _informed(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)


def joining(address: Any, slot: int, name: str) -> Any:
    """A host with one environment in a thread, until it is left."""
    return hosting(address, makers(slot), name=name)


@contextmanager
def rollout_with_a_dead_host(
    rollout: Mapping[str, Any] = MappingProxyType({}), **options: Any
) -> Iterator[tuple[Any, Any, Iterator[Any]]]:
    """A rollout over two hosts, 'other' and 'victim', which was killed: address, rollout and its fragments."""
    envs = listening(hosts=2, limits=PATIENT, **options)
    address = envs.addresses[0]
    victim = HostProcess(address, told(0), name="victim")
    try:
        with joining(address, 1, "other"), rollout_over(envs, **rollout) as made:
            fragments = iter(made.fragments())
            taken_until(fragments, lambda taken: slots_of(taken) >= {0, 1})
            victim.signal(signal.SIGKILL)
            yield address, made, fragments
    finally:
        victim.end()


@pytest.mark.slow
def test_a_lost_host_leaves_room_for_another() -> None:
    with rollout_with_a_dead_host(max_hosts=2) as (address, _, fragments), joining(address, 2, "another"):
        taken_until(fragments, lambda taken: slots_of(taken) >= {1, 2})


@pytest.mark.slow
@pytest.mark.parametrize("prefetch", [0, 1])
def test_the_others_go_on_beside_a_host_that_was_killed(prefetch: int) -> None:
    with rollout_with_a_dead_host(rollout={"prefetch": prefetch}) as (address, rollout, fragments):
        taken = taken_until(fragments, lambda taken: len(taken) > 12)
        assert slots_of(taken[-8:]) == {1}
        assert rollout.lost == {}  # it may still come back
        with joining(address, 2, "victim"):
            taken_until(fragments, lambda taken: slots_of(taken) >= {1, 2})


def test_batches_have_the_lanes_of_hosts_that_are_there() -> None:
    envs = listening(hosts=2, limits=PATIENT)
    wire = BrokenWire(envs.addresses[0], lambda: None)
    try:
        with joining(envs.addresses[0], 1, "other"), joining(wire.address, 0, "cut off"), rollout_over(envs) as rollout:
            batches = rollout.batches()
            sizes = [len(next(batches)["obs"])]
            wire.go_down()
            while sizes[-1] != 8:
                sizes.append(len(next(batches)["obs"]))
            sizes += [len(next(batches)["obs"]) for _ in range(4)]
            wire.is_down = False
            while sizes[-1] != 16:
                sizes.append(len(next(batches)["obs"]))
            rollout.drain()
            sizes += [len(batch["obs"]) for batch in batches]
    finally:
        wire.close()
    assert rollout.lost == {}
    assert sum(sizes) == rollout.num_steps


@pytest.mark.slow
def test_a_host_that_is_away_is_waited_for_where_no_other_is_left(caplog: pytest.LogCaptureFixture) -> None:
    envs = listening(hosts=2, limits=PATIENT)
    wire = BrokenWire(envs.addresses[0], lambda: None)

    def come_back() -> None:
        await_that(lambda: "has left: said goodbye" in caplog.text)
        wire.is_down = False

    try:
        cut_off, leaves = joining(wire.address, 0, "cut off"), joining(envs.addresses[0], 1, "leaving")
        with cut_off, leaves as leaving, rollout_over(envs, num_fragments=40) as rollout:
            fragments = iter(rollout.fragments())
            taken_until(fragments, lambda taken: slots_of(taken) >= {0, 1})
            wire.go_down()
            taken_until(fragments, lambda taken: "is away: the others go on" in caplog.text)
            leaving.stop()
            with ThreadPoolExecutor(1) as pool:
                pool.submit(come_back)
                rest = list(fragments)
    finally:
        wire.close()
    assert slots_of(rest[-5:]) == {0}
    assert rest[-1].sequence == 39
