"""Rollouts on hosts that are drained: what is being made is cut short and given, and nobody is waited for in vain."""

import signal
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path

import anyio
import numpy as np
import pytest
from ending_envs import lives_of, rewards_by_slot
from held_envs import LONGEST_S, Held, await_held, let_go
from lane_clock import LaneClock
from remote_hosts import HostProcess, listening
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
    wired,
)

from rollflow import Fragment, RemoteRollouts, Rollout
from rollflow.nodes import RolloutHost
from rollflow.stream.wire import Fragment as Answer, Turn

pytestmark = pytest.mark.wait_times(first_pause_s=0.01, host_pause_s=0.05)

ENDLESS = 1_000_000  # steps of a fragment that is never done


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
    with (
        rollouts_on(envs.addresses[0], held[:2], lanes=2) as first,
        rollouts_on(envs.addresses[0], held[2:]) as second,
        rollout_over(envs, fragment_length=ENDLESS, prefetch=1) as rollout,
    ):
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


def test_so_are_those_of_a_rollout_that_nobody_had_read_ahead() -> None:
    with hosted(makers(0, 1, 2), on={"lanes": 2}) as (rollout, _):
        fragments = iter(rollout.fragments())
        taken = [next(fragments)]
        rollout.drain()
        taken += fragments
        assert sum(fragment.num_steps for fragment in taken) == rollout.num_steps
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
def test_one_that_does_not_come_back_is_waited_for_no_longer_than_it_has(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
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


def test_a_first_reset_is_not_waited_for(tmp_path: Path) -> None:
    envs = listening(RemoteRollouts)
    held = [partial(Held, slot, tmp_path, resets=[0] if slot == 0 else []) for slot in range(2)]
    try:
        with rollouts_on(envs.addresses[0], held, lanes=2):
            with rollout_over(envs, prefetch=1) as rollout:
                await_held(tmp_path, 0)
                began = time.monotonic()
                taken = drained(rollout)
                assert time.monotonic() - began < LONGEST_S / 2
                assert sum(fragment.num_steps for fragment in taken) == rollout.num_steps
            let_go(tmp_path, 0)
    finally:
        let_go(tmp_path, 0)
    assert rollout.lost == {}
    assert {fragment.lane for fragment in taken} <= {1}


def test_a_lane_that_is_late_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = LaneClock(monkeypatch)
    envs = listening(RemoteRollouts)
    try:
        with (
            rollouts_on(envs.addresses[0], [partial(Held, 0, tmp_path, steps=[5])]),
            rollout_over(envs, step_timeout=0.3, prefetch=1, fragment_length=4) as rollout,
        ):
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
    with (
        rollouts_on(envs.addresses[0], [partial(Held, 0, tmp_path, steps=[5])]),
        rollout_over(envs, prefetch=1) as rollout,
    ):
        await_held(tmp_path, 0)

        def join() -> None:
            with rollouts_on(envs.addresses[0], makers(1)):
                gateway = rollout.environments.gateway
                await_that(lambda: len(gateway.hosts) == 2)
                await_that(lambda: gateway.hosts and all(h.connection.credits for h in gateway.hosts.values()))
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
