"""Hosts that are told to end, and rollouts on hosts that are: what is being made is cut short and given.

Nothing is lost, and nobody is waited for in vain.
"""

import re
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
from ending_agent_envs import DoomedAgents, logs_of
from ending_envs import Tells, lives_of, rewards_by_slot
from held_envs import LONGEST_S, Held, await_held, is_closed, let_go
from lane_clock import LaneClock
from lost_agents import emitted_steps, not_emitted
from numbered_module import NumberedModule
from paced_hosts import PacedHosts
from remote_hosts import BrokenWire, HostProcess, hosting, listening
from remote_rollouts import (
    HASTY,
    await_late,
    await_that,
    check_counts,
    check_laws,
    cut_off,
    hosted,
    makers,
    raw_host_of,
    rollout_over,
    rollouts_on,
    taken_until,
    wired,
)
from started_hosts import missing_steps

from rollflow import Fragment, RemoteEnvs, RemoteRollouts, Rollout, Timeouts
from rollflow.nodes import EnvHost, RolloutHost
from rollflow.nodes.env.remote.host import Host
from rollflow.stream.wire import Fragment as Answer, Turn

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
    two = remote.host_of(logged(remote, tmp_path, 0, 1), lanes=2, name="first")
    with two as first, remote.host_of(logged(remote, tmp_path, 2)), remote.rollout(prefetch=1) as rollout:
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


def check_comes_with_six_steps(rollout: Any) -> None:
    """One fragment comes, cut short, and then its host leaves, of which nothing is lost."""
    fragments = [next(iter(rollout.fragments()))]
    await_that(lambda: not rollout.environments.gateway.hosts)
    rollout.drain()
    fragments += rollout.fragments()
    assert {slot: len(steps) for slot, steps in rewards_by_slot(fragments).items()} == {0: 6}
    assert rollout.lost == {}


def test_a_fragment_ends_with_the_step_that_it_is_at(tmp_path: Path) -> None:
    with held_in_its_fragment(tmp_path) as (host, rollout):
        host.drain()
        await_that(lambda: host._lanes[0].session.cut)
        let_go(tmp_path, 0)
        check_comes_with_six_steps(rollout)


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
def test_idle_lanes_environments_are_closed_once_the_grace_is_over(tmp_path: Path, graces: tuple[float, ...]) -> None:
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
        await_held(tmp_path, 0)
        cut_off(wire, rollout)
        host.drain()
        await_that(lambda: host._lanes[0].session.cut)
        if is_made:
            let_go(tmp_path, 0)
            await_that(lambda: not host._busy_lanes())  # and nobody has taken it
        wire.is_down = False
        let_go(tmp_path, 0)
        check_comes_with_six_steps(rollout)


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
    two, one = rollouts_on(envs.addresses[0], makers(0, 1)), rollouts_on(envs.addresses[0], makers(2))
    with two as first, one, rollout_over(envs, prefetch=1) as rollout:
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


# Rollouts that are drained


def drained(rollout: Rollout, meanwhile: Callable[[], None] = lambda: None) -> list[Fragment]:
    """Have a rollout that runs in a thread end, do something once it knows; the fragments that it still gives."""
    rollout.drain()
    await_that(lambda: rollout.environments.is_draining)
    meanwhile()
    return list(rollout.fragments())


def await_cut(host: RolloutHost, lanes: int = 1) -> None:
    """Wait until so many lanes of a host know that they are to end."""
    await_that(lambda: sum(lane.session.cut > 0 for lane in host._lanes) >= lanes)


def test_fragments_in_the_making_are_cut_short_and_given(tmp_path: Path) -> None:
    envs = listening(RemoteRollouts, hosts=2)
    held = [partial(Held, slot, tmp_path, steps=[5 + slot]) for slot in range(3)]
    two, one = rollouts_on(envs.addresses[0], held[:2], lanes=2), rollouts_on(envs.addresses[0], held[2:])
    with two as first, one as second, rollout_over(envs, fragment_length=ENDLESS, prefetch=1) as rollout:
        for slot in range(3):
            await_held(tmp_path, slot)

        def go() -> None:
            await_cut(first, 2)
            await_cut(second)
            for slot in range(3):
                let_go(tmp_path, slot)

        taken = drained(rollout, go)
        assert {slot: len(steps) for slot, steps in rewards_by_slot(taken).items()} == {0: 6, 1: 7, 2: 8}
        assert rollout.num_steps == 6 + 7 + 8
    assert rollout.lost == {}
    check_laws(taken, {}, 0)


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_so_are_those_in_an_event_loop(tmp_path: Path, backend: str) -> None:
    envs = listening(RemoteRollouts)

    async def run_through(host: RolloutHost) -> list[Fragment]:
        async with rollout_over(envs, fragment_length=ENDLESS) as rollout:
            await anyio.to_thread.run_sync(await_held, tmp_path, 0)
            rollout.drain()
            await anyio.to_thread.run_sync(await_cut, host)
            let_go(tmp_path, 0)
            fragments = [fragment async for fragment in rollout.fragments()]
            assert rollout.num_steps == 4
        assert rollout.lost == {}
        return fragments

    with rollouts_on(envs.addresses[0], [partial(Held, 0, tmp_path, steps=[3])]) as host:
        [fragment] = anyio.run(run_through, host, backend=backend)
    assert fragment.num_rows == 4


@pytest.mark.parametrize("is_told", ["of the cut first", "afterwards"])
def test_a_host_that_is_cut_off_has_its_time_to_come_back_with_what_it_made(tmp_path: Path, is_told: str) -> None:
    held = [partial(Held, 0, tmp_path, steps=[5])]
    with wired(held, fragment_length=ENDLESS, prefetch=1) as (rollout, host, wire):
        await_held(tmp_path, 0)

        def go() -> None:
            if is_told == "of the cut first":
                await_cut(host)
                cut_off(wire, rollout)
            let_go(tmp_path, 0)
            if is_told == "of the cut first":
                await_that(lambda: host._session._lanes[0].answer is not None)  # there is nobody who takes it
            wire.is_down = False

        if is_told == "afterwards":
            cut_off(wire, rollout)
        taken = drained(rollout, go)
        assert rollout.num_steps == sum(fragment.num_steps for fragment in taken)
    assert rollout.lost == {}
    assert lives_of(rewards_by_slot(taken)[0])[0] >= 6
    check_laws(taken, {}, 0)


@pytest.mark.slow
def test_one_that_does_not_come_back_is_waited_for_its_time(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    envs = listening(RemoteRollouts, limits=HASTY)
    held = [((0, tmp_path), {"steps": [5]}), ((1, tmp_path), {})]
    host = HostProcess(envs.addresses[0], held, name="victim", env=Held, kind=RolloutHost)
    try:
        with rollout_over(envs, fragment_length=ENDLESS, prefetch=1) as rollout:
            await_held(tmp_path, 0)
            await_that(lambda: rollout.num_steps == 10)  # as it has said

            def kill() -> None:
                host.signal(signal.SIGKILL)

            assert drained(rollout, kill) == []
    finally:
        host.end()
    assert rollout.num_steps == 0
    assert rollout.lost == {"workers": 10 + 2}  # the step under way among them
    assert "lane 0 is lost: host victim" in caplog.text
    assert "not back within 0.5 s" in caplog.text


def test_a_lane_that_is_late_is_not_waited_for(tmp_path: Path, lane_clock: LaneClock) -> None:
    clock, held = lane_clock, [partial(Held, 0, tmp_path, steps=[5])]
    try:
        with hosted(held, timeouts=Timeouts(step=0.3), prefetch=1, fragment_length=4) as (rollout, _):
            fragments = iter(rollout.fragments())
            taken = [next(fragments)]
            await_that(lambda: rollout.num_steps == 5)
            await_late(rollout, clock)
            taken += drained(rollout)
            let_go(tmp_path, 0)
    finally:
        let_go(tmp_path, 0)
    assert [fragment.num_steps for fragment in taken] == [4]
    assert rollout.lost == {"workers": 2}
    check_counts(taken, rollout)


def test_a_host_that_comes_while_the_rollout_ends_is_given_nothing(tmp_path: Path) -> None:
    envs = listening(RemoteRollouts)
    held = rollouts_on(envs.addresses[0], [partial(Held, 0, tmp_path, steps=[5])])
    with held, rollout_over(envs, prefetch=1) as rollout:
        await_held(tmp_path, 0)

        def join() -> None:
            with rollouts_on(envs.addresses[0], makers(1)):
                gateway = rollout.environments.gateway
                await_that(lambda: len(gateway.hosts) == 2)
            let_go(tmp_path, 0)

        taken = drained(rollout, join)
    assert {fragment.lane for fragment in taken} == {0}
    assert rollout.lost == {}


# A lane by itself


@pytest.mark.parametrize("cuts", [{1: 3}, {1: 0}, {2: 5, 3: 2}, {1: 7, 2: 7}])
def test_a_lane_goes_on_after_a_cut_as_if_there_had_been_none(tmp_path: Path, cuts: dict[int, int]) -> None:
    """The turns of these numbers are cut before the step of this number in their fragments."""
    answers: list[Answer] = []
    with raw_host_of(tmp_path) as (_, raw):
        turn = raw.next_turn()
        lane, real = raw.lane, raw.lane._between
        at = 0

        def between(session: object) -> None:
            nonlocal at
            if cuts.get(lane.session.turn) == at:
                lane.cut(lane.session.turn)
            at += 1
            real(session)  # type: ignore[arg-type]

        lane._between = between  # type: ignore[method-assign]
        for number in range(1, 5):
            at = 0
            answers.append(raw.made(Turn(turn.lane, number)))
    rows = [cuts.get(number, 8) for number in range(1, 5)]
    assert [answer.rest["num_rows"] for answer in answers] == rows
    assert [answer.rest["sequence"] for answer in answers] == [0, 1, 2, 3]
    assert [answer.rest["steps"] for answer in answers] == (2 * np.cumsum(rows)).tolist()
    rewards = np.concatenate([answer.columns["rewards"][1:] for answer in answers])  # lookback left out
    np.testing.assert_array_equal(rewards, np.stack([np.arange(1, sum(rows) + 1)] * 2, axis=1))
    for before, after in pairwise(answers):
        np.testing.assert_array_equal(before.columns["obs"][-2:], after.columns["obs"][:2])


def test_a_cut_of_a_turn_that_is_over_cuts_no_other(tmp_path: Path) -> None:
    with raw_host_of(tmp_path) as (_, raw):
        turn = raw.next_turn()
        assert raw.made(turn).rest["num_rows"] == 8
        raw.lane.cut(turn.number)
        assert raw.made(Turn(turn.lane, turn.number + 1)).rest["num_rows"] == 8
