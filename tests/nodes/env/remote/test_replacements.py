"""Hosts that die and are replaced: the new host takes the place of the lost one, and the others go on."""

import logging
import os
import re
import signal
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
from remote_hosts import BrokenWire, HostProcess, hosting, listening
from remote_rollouts import await_that, makers, rollout_over, slots_of, taken_until, told
from wire_messages import hello

from rollflow.nodes import EnvHost
from rollflow.nodes.env.remote.gateway import Registry, RemoteHost
from rollflow.stream.data.errors import WireError
from rollflow.stream.wire import Limits

pytestmark = pytest.mark.wait_times(host_pause_s=0.05, other_name_s=0.2, redial_s=0.1)

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
@pytest.mark.parametrize("name", ["victim", "another"])
def test_a_new_host_takes_the_place_of_a_lost_one(name: str, caplog: pytest.LogCaptureFixture) -> None:
    with rollout_with_a_dead_host() as (address, rollout, fragments), joining(address, 2, name):
        hosts = rollout.environments.gateway.hosts

        def is_replaced() -> bool:  # one of another name takes the place after a while; the loop goes on meanwhile
            return sorted(host.session.hello.name for host in list(hosts.values())) == sorted(["other", name])

        taken_until(fragments, lambda taken: is_replaced())
        taken_until(fragments, lambda taken: slots_of(taken) >= {1, 2})
        assert is_replaced()
    assert "has joined with 1 environments" in caplog.text
    assert re.search(rf"host {name} \(.*\) has joined in place of victim \(.*\), which is lost", caplog.text)


@pytest.mark.wait_times(other_name_s=3600.0)
@pytest.mark.slow
def test_a_new_host_takes_the_place_of_a_lost_one_where_there_is_room_for_no_more() -> None:
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


class Hosts:
    """A registry of hosts without sockets.

    now    the time
    """

    def __init__(self) -> None:
        self.registry = Registry("env", max_hosts=8)
        self.now = 0.0

    def join(self, name: str) -> RemoteHost:
        """Have a host join now, of which nothing is heard any more."""
        told = hello(name=name, session=len(self.registry._host_of).to_bytes(16, "big"))
        connection = SimpleNamespace(heard_at=self.now, welcome=lambda session: None)
        peer: Any = SimpleNamespace(connection=connection, dialled=None)
        return self.registry.take_in(told, name, peer, self.now)

    def lose(self, host: RemoteHost) -> None:
        """Have a host's loss be noticed now."""
        self.registry.lose(host, WireError("silent for 30 s or more", "silent"), self.now, 60.0)
        self.registry.tick(self.now, 60.0)

    @property
    def present(self) -> list[RemoteHost]:
        """Hosts that are there or are awaited."""
        return list(self.registry.hosts.values())


def test_a_host_may_be_replaced_before_its_loss_is_noticed() -> None:
    """As one whose machine has lost its power."""
    hosts = Hosts()
    lost = hosts.join("sim")
    lost.has_place = True
    hosts.now = 14.0
    other, again = hosts.join("other"), hosts.join("sim")
    hosts.now = 30.0
    hosts.lose(lost)
    assert hosts.present == [other, again]


def test_hosts_of_one_machine_are_not_taken_for_each_other() -> None:
    with EnvHost("CartPole-v1") as host:
        assert host.name.endswith(f"-{os.getpid()}")
    names = [host.name, "other"]
    hosts = Hosts()
    cut_off = hosts.join(names[0])
    hosts.now = 9.0
    hosts.lose(cut_off)
    other = hosts.join(names[1])
    assert hosts.present == [cut_off, other]


def test_hosts_that_have_a_place_take_no_other() -> None:
    hosts = Hosts()
    first, second = hosts.join("sim"), hosts.join("sim")
    first.has_place = second.has_place = True
    hosts.now = 9.0
    hosts.lose(first)
    hosts.now = 20.0
    hosts.registry.tick(hosts.now, 60.0)
    assert hosts.present == [first, second]
    third = hosts.join("another")
    assert hosts.present == [second, third]
    hosts.lose(second)
    hosts.now = 40.0
    hosts.registry.tick(hosts.now, 60.0)
    assert hosts.present == [second, third]
