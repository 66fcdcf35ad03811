"""Hosts that are told to end: they give what they have, within their time, and nothing is lost."""

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from ending_agent_envs import DoomedAgents, logs_of
from ending_envs import Tells, rewards_by_slot
from held_envs import LONGEST_S, Held, await_held, is_closed, let_go
from lost_agents import emitted_steps, not_emitted
from numbered_module import NumberedModule
from paced_hosts import PacedHosts
from remote_hosts import BrokenWire, hosting, listening
from remote_rollouts import (
    await_that,
    check_counts,
    check_laws,
    cut_off,
    hosted,
    makers,
    rollout_over,
    rollouts_on,
    taken_until,
    wired,
)
from started_hosts import missing_steps

from rollflow import RemoteEnvs, RemoteRollouts, Rollout
from rollflow.nodes import EnvHost, RolloutHost
from rollflow.nodes.env.remote.host import Host

pytestmark = pytest.mark.wait_times(first_pause_s=0.01, host_pause_s=0.05)

ENDLESS = 1_000_000  # steps of a fragment that is never done


def logged(remote: PacedHosts, folder: Path, *slots: int) -> list[Any]:
    """Environments that write down each step that they make."""
    if remote.agents:
        return [partial(DoomedAgents, slot, folder, **remote.options) for slot in slots]
    return [partial(Tells, slot, folder, lengths=(5, 40)) for slot in slots]


def check_nothing_lost(remote: PacedHosts, fragments: list[Any], folder: Path, slots: range) -> None:
    if remote.agents:
        assert not_emitted(fragments, [log for slot in slots for log in logs_of(folder, slot)]) == 0
    else:
        assert missing_steps(fragments, folder) == {}


def have_left(rollout: Any, left: int) -> Callable[[Any], bool]:
    """Whether all hosts but so many have left a rollout."""
    return lambda _: len(rollout.environments.gateway.hosts) == left


@pytest.mark.parametrize("agents", [0, 2])
@pytest.mark.parametrize("kind", [EnvHost, RolloutHost])
def test_a_host_that_drains_loses_nothing_and_another_takes_its_place(
    kind: type[Host], agents: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    remote = PacedHosts(kind, agents, hosts=2)
    with (
        remote.host_of(logged(remote, tmp_path, 0, 1), lanes=2, name="first") as first,
        remote.host_of(logged(remote, tmp_path, 2)),
        remote.rollout(prefetch=1) as rollout,
    ):
        stream = iter(rollout.fragments())
        fragments: list[Any] = [next(stream) for _ in range(8)]
        first.drain()
        fragments += taken_until(stream, have_left(rollout, 1))
        with remote.host_of(logged(remote, tmp_path, 3)):
            fragments += taken_until(stream, lambda more: 3 in {each.lane for each in more})
            rollout.drain()
            fragments += stream
    assert rollout.lost == {}
    check_nothing_lost(remote, fragments, tmp_path, range(4))
    assert rollout.num_steps == (len(emitted_steps(fragments)) if agents else sum(f.num_steps for f in fragments))
    assert "host first drains, for 20.0 s at most: " in caplog.text
    assert " s: 2 of 2 lanes are done" in caplog.text
    assert "said goodbye: the host was drained" in caplog.text


@contextmanager
def held_in_its_fragment(folder: Path, **options: Any) -> Iterator[tuple[RolloutHost, Rollout]]:
    """A host whose environment stands still in its step 5, and its rollout."""
    held = [partial(Held, 0, folder, steps=[5])]
    try:
        with hosted(held, on={"name": "held"}, fragment_length=ENDLESS, prefetch=1, **options) as (rollout, host):
            await_held(folder, 0)
            yield host, rollout
            let_go(folder, 0)
    finally:
        let_go(folder, 0)


def test_a_fragment_ends_with_the_step_that_it_is_at(tmp_path: Path) -> None:
    with held_in_its_fragment(tmp_path) as (host, rollout):
        host.drain()
        await_that(lambda: host._lanes[0].session.cut)
        let_go(tmp_path, 0)
        fragments = [next(iter(rollout.fragments()))]
        await_that(lambda: not rollout.environments.gateway.hosts)  # type: ignore[attr-defined]
        rollout.drain()
        fragments += rollout.fragments()
    assert {slot: len(steps) for slot, steps in rewards_by_slot(fragments).items()} == {0: 6}
    assert rollout.lost == {}


@pytest.mark.wait_times(first_word_s=0.01)
def test_a_host_whose_step_takes_too_long_ends_with_its_grace(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with held_in_its_fragment(tmp_path) as (host, rollout):
        await_that(lambda: rollout.num_steps == 5)  # as it has said
        host.drain(0.1)
        await_that(lambda: not rollout.environments.gateway.hosts)  # type: ignore[attr-defined]
        assert re.search(r"host held drains, for 0\.\d s at most: 0 of 1 lanes are done, still at.*: 0", caplog.text)
        assert "s more: 0 of 1 lanes are done, still at something: 0" in caplog.text
        await_that(lambda: "said goodbye: the host was stopped" in caplog.text)
        await_that(lambda: " s: 0 of 1 lanes are done, still at something: 0" in caplog.text)
        rollout.drain()
        assert list(rollout.fragments()) == []
        host.close()
        assert host._busy_lanes() == [0]  # its environment is still in its step
    assert rollout.lost == {"workers": 5 + 1}


@pytest.mark.parametrize("graces", [(0.1,), (LONGEST_S, 0.0)])
def test_environments_of_lanes_that_are_at_nothing_are_closed_once_the_grace_is_over(
    tmp_path: Path, graces: tuple[float, ...]
) -> None:
    envs = listening(RemoteEnvs)
    makers = [partial(Held, slot, tmp_path, steps=[5]) for slot in range(2)]
    with hosting(envs.addresses[0], makers, lanes=2) as host, rollout_over(envs, fragment_length=ENDLESS, prefetch=1):
        for slot in range(2):
            await_held(tmp_path, slot)
        host.drain(graces[0])
        let_go(tmp_path, 1)
        await_that(lambda: host._busy_lanes() == [0])
        for grace_s in graces[1:]:
            host.drain(grace_s)
        await_that(lambda: host._drain.left_s == 0)
        host.close()
        assert host._busy_lanes() == [0]
        assert [is_closed(tmp_path, slot) for slot in range(2)] == [False, True]
        let_go(tmp_path, 0)


def test_a_second_word_may_shorten_the_grace_and_not_prolong_it(tmp_path: Path) -> None:
    with held_in_its_fragment(tmp_path) as (host, rollout):
        host.drain(LONGEST_S)
        host.drain(2 * LONGEST_S)
        assert host._drain is not None
        assert 0 < host._drain.left_s <= LONGEST_S
        host.drain(0.0)
        await_that(lambda: not rollout.environments.gateway.hosts)  # type: ignore[attr-defined]


@pytest.mark.parametrize("is_made", [False, True])
def test_what_a_lost_connection_had_is_given_to_the_next(tmp_path: Path, *, is_made: bool) -> None:
    held = [partial(Held, 0, tmp_path, steps=[5])]
    with wired(held, fragment_length=ENDLESS, prefetch=1) as (rollout, host, wire):
        gateway = rollout.environments.gateway  # type: ignore[attr-defined]
        await_held(tmp_path, 0)
        cut_off(wire, rollout)
        host.drain()
        await_that(lambda: host._lanes[0].session.cut)
        if is_made:
            let_go(tmp_path, 0)
            await_that(lambda: not host._busy_lanes())  # and nobody has taken it
        wire.is_down = False
        let_go(tmp_path, 0)
        fragments = [next(iter(rollout.fragments()))]
        await_that(lambda: not gateway.hosts)
        rollout.drain()
        fragments += rollout.fragments()
    assert {slot: len(steps) for slot, steps in rewards_by_slot(fragments).items()} == {0: 6}
    assert rollout.lost == {}


def test_a_step_that_a_draining_host_has_not_begun_is_not_owed_to_the_next_connection(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    envs = listening(RemoteEnvs)
    wire = BrokenWire(envs.addresses[0], lambda: None)
    with (
        hosting(wire.address, [partial(Held, slot, tmp_path, steps=[5]) for slot in range(2)], lanes=2) as host,
        rollout_over(envs, fragment_length=ENDLESS, prefetch=1) as rollout,
    ):
        gateway = rollout.environments.gateway  # type: ignore[attr-defined]
        for slot in range(2):
            await_held(tmp_path, slot)
        host.drain()
        let_go(tmp_path, 1)
        await_that(lambda: host._busy_lanes() == [0] and host._session._lanes[1].answer is None)  # asked once more
        cut_off(wire, rollout)
        wire.is_down = False
        let_go(tmp_path, 0)
        await_that(lambda: not gateway.hosts)
        rollout.drain()
        fragments = list(rollout.fragments())
    wire.close()
    assert {slot: len(steps) for slot, steps in rewards_by_slot(fragments).items()} == {0: 6, 1: 6}
    assert rollout.lost == {}
    assert caplog.text.count("has drained for ") == 1
    assert "s: 2 of 2 lanes are done\n" in caplog.text


def test_a_host_without_a_rollout_ends_at_once() -> None:
    envs = listening(RemoteRollouts)
    with RolloutHost(makers(0), module=NumberedModule()) as host:
        host.drain()
        assert host.connect(str(envs.addresses[0])) == "drained"
    envs.close()


def test_a_host_that_waits_for_gateways_drains_as_well(tmp_path: Path) -> None:
    with RolloutHost(makers(0), module=NumberedModule()) as host, host.listening(f"unix:{tmp_path}/host") as where:
        thread = threading.Thread(target=host.serve)
        thread.start()
        with rollout_over(RemoteRollouts.connect(str(where)), prefetch=1) as rollout:
            stream = iter(rollout.fragments())
            fragments = [next(stream)]
            host.drain()
            thread.join()
            rollout.drain()
            fragments += stream
    check_laws(fragments, rollout.lost, slots_lost=0)
    check_counts(fragments, rollout)
    assert rollout.lost == {}


def test_batches_go_on_where_a_host_drains() -> None:
    envs = listening(RemoteRollouts, hosts=2)
    with (
        rollouts_on(envs.addresses[0], makers(0, 1)) as first,
        rollouts_on(envs.addresses[0], makers(2)),
        rollout_over(envs, prefetch=1) as rollout,
    ):
        batches = iter(rollout.batches())
        sizes = [len(next(batches)["obs"])]
        first.drain()
        while len(rollout.environments.gateway.hosts) == 2:  # type: ignore[attr-defined]
            sizes.append(len(next(batches)["obs"]))
        sizes += [len(next(batches)["obs"]) for _ in range(3)]
        rollout.drain()
        sizes += [len(batch["obs"]) for batch in batches]
    assert rollout.lost == {}
    assert sum(sizes) == rollout.num_steps
