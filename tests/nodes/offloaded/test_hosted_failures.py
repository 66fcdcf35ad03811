"""Environments on hosts of whole rollouts that raise, that can't be reset, or that hang."""

from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ending_envs import Doomed, lives_of, rewards_by_slot
from held_envs import Held, await_held, let_go, times_made
from lane_clock import LaneClock
from numbered_module import NumberedEnv, NumberedModule
from places import rollout_at
from remote_hosts import listening
from remote_rollouts import (
    HASTY,
    await_late,
    await_that,
    check_counts,
    check_laws,
    cut_off,
    hosted,
    makers,
    rollout_over,
    rollouts_on,
    slots_of,
    taken_until,
    wired,
)

from rollflow import Fragment, RemoteRollouts, Timeouts
from rollflow.nodes.env.workers.lane_status import LanePhase
from rollflow.stream import EnvError

pytestmark = pytest.mark.wait_times(first_pause_s=0.01)


def lost_in(fragments: list[Fragment]) -> list[str]:
    return [chunk.custom_data["lost"] for f in fragments for chunk in f.episodes() if "lost" in chunk.custom_data]


def doomed(folder: Path, step: int, lives: int = 1, slots: int = 1, fate: str = "raise", **options: Any) -> list[Any]:
    """Environments, the first of which is lost in this step of so many lives."""
    given: Any = {"lengths": (100, 100), **options}
    return [partial(Doomed, slot, folder, fate, step, lives * (slot == 0), **given) for slot in range(slots)]


def doomed_at(place: str, makers: list[Any], *, lanes: int = 1, workers: int = 1, **options: Any) -> Any:
    """A rollout that has not begun, in workers or on a host."""
    where: Any = {"workers": workers} if place == "rollouts" else {}
    options = {"fragment_length": 8, "seed": 0, **where, **options}
    module = {"module": NumberedModule()}
    return rollout_at(place, makers, envs={"lanes": lanes}, acts=module, hosts={"name": "sim"}, **options)


REASONS = {"raise": "RuntimeError: it broke", "kill": "was killed by SIGKILL"}


@pytest.mark.parametrize(("place", "prefetch"), [("rollouts", 0), ("hosted rollouts", 0), ("hosted rollouts", 2)])
def test_what_there_is_of_a_fragment_comes_with_what_was_raised(
    place: str, prefetch: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    makers = doomed(tmp_path, 21, slots=2)
    with doomed_at(place, makers, num_fragments=5, prefetch=prefetch) as made, made as rollout:
        taken = list(rollout.fragments())
        assert rollout.num_steps == sum(fragment.num_steps for fragment in taken)
    assert [fragment.sequence for fragment in taken] == list(range(5))
    assert [fragment.num_steps for fragment in taken] == [16, 16, 10, 16, 16]
    assert rollout.lost == {"workers": 2}
    [one, other] = taken[2].episodes()
    assert [(len(chunk), chunk.is_truncated, chunk.is_terminated) for chunk in (one, other)] == [(5, True, False)] * 2
    assert [REASONS["raise"] in reason for reason in lost_in(taken)] == [True] * 2
    assert taken[3].losses == []
    ids = [{chunk.id_ for chunk in fragment.episodes()} for fragment in taken]
    assert ids[0] == ids[1] == ids[2]
    assert ids[3] == ids[4]
    assert not ids[2] & ids[3]
    # It is made anew, and begins with other episodes than before.
    assert taken[3].chunk(0).get_observations(slice(0, None))[:, 2].tolist() == list(range(9))
    assert Doomed.lives(tmp_path, 0) == [21, 16]
    if place != "rollouts":
        assert "lane 0 is lost and made again in 0.0 s: host sim (tcp://127.0.0.1:" in caplog.text
        assert "RuntimeError: it broke; slot 0; lane 0, vector step 21; in node 'env'" in caplog.text


@pytest.mark.parametrize(
    ("place", "fate", "step"),
    [("rollouts", "kill", 8), ("rollouts", "raise", 8), *(("hosted rollouts", "raise", step) for step in (0, 8, 16))],
)
def test_one_lost_in_a_fragments_first_step_uses_up_none(place: str, fate: str, step: int, tmp_path: Path) -> None:
    with doomed_at(place, doomed(tmp_path, step, slots=2, fate=fate), num_fragments=4) as made, made as rollout:
        taken = list(rollout.fragments())
        assert rollout.num_steps == sum(fragment.num_steps for fragment in taken)
    assert [(fragment.sequence, fragment.num_steps) for fragment in taken] == [(n, 16) for n in range(4)]
    assert rollout.lost == {"workers": 2}
    [after] = [fragment for fragment in taken if fragment.losses]
    [loss] = after.losses
    assert after.sequence == step // 8
    assert (loss.row, loss.slots.tolist(), loss.cut.tolist()) == (after.first_row, [0, 1], [])
    assert REASONS[fate] in loss.reason
    ids = [{chunk.id_ for chunk in fragment.episodes()} for fragment in taken]
    for before, later in pairwise(range(4)):
        assert (ids[before] == ids[later]) == (later != step // 8)
    assert after.chunk(0).get_observations(slice(0, None))[:, 2].tolist() == list(range(9))
    assert lost_in(taken) == []


@pytest.mark.parametrize("then", ["goes on", "raises"])
def test_a_reward_not_finite_fails_its_lane(then: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """In two lives the environment of lane 0 gives NaN in its step 12, and raises in the step after it or does not."""
    makers = doomed(tmp_path, 12, 2, slots=2, fate="nan" if then == "goes on" else "nan and raise")
    with doomed_at("hosted rollouts", makers, lanes=2, num_fragments=4, prefetch=1) as made, made as rollout:
        taken = list(rollout.fragments())
    assert sorted((f.lane, f.sequence, f.num_steps) for f in taken) == [(i, n, 8) for i in (0, 1) for n in range(4)]
    check_counts(taken, rollout)
    lost = [(fragment.lane, fragment.sequence) for fragment in taken if fragment.losses]
    assert lost == [(0, 1), (0, 2)]
    told = "EnvError: lane 0, slot 0, vector step 12: its reward is nan, expected a finite float32"
    for fragment in taken:
        assert all(loss.reason.startswith(told) for loss in fragment.losses)
    assert "lane 0 is lost and made again in 0.0 s: host sim (" in caplog.text
    assert told in caplog.text
    assert np.isfinite(np.concatenate([f.column("rewards") for f in taken])).all()


class Unsound(Held):
    """Gives NaN as the reward of its third step."""

    def step(self, action: Any) -> Any:
        observation, reward, *rest = super().step(action)
        return observation, np.nan if self.life == 3 else reward, *rest


def test_a_reward_not_finite_is_in_no_fragment_cut_short(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    held = [partial(Unsound, 0, tmp_path, steps=[5], lengths=(100, 100))]
    with hosted(held, fragment_length=1000, prefetch=1) as (rollout, _):
        await_held(tmp_path, 0)
        rollout.drain()
        await_that(lambda: rollout.environments.is_draining)
        let_go(tmp_path, 0)
        assert list(rollout.fragments()) == []
    assert "EnvError: lane 0, slot 0, vector step 2: its reward is nan" in caplog.text


def test_the_same_comes_of_it_in_worker_processes(tmp_path: Path) -> None:
    found: list[list[Any]] = []
    for place in ("hosted rollouts", "rollouts"):
        (tmp_path / place).mkdir()
        environments = doomed(tmp_path / place, 12, 2, slots=2, lengths=(3, 9))
        with doomed_at(place, environments, fragment_length=6, num_fragments=5, seed=3) as made, made as rollout:
            fragments = list(rollout.fragments())
        states = [[chunk.get_state() for chunk in fragment.episodes()] for fragment in fragments]
        told = [(f.sequence, f.num_steps, [(x.row, x.cut.tolist()) for x in f.losses]) for f in fragments]
        found.append([told, rollout.lost, [[state["id_"] for state in each] for each in states], lost_in(fragments)])
        found[-1].append(rewards_by_slot(fragments))
    assert found[0] == found[1]


@pytest.mark.parametrize("mode", ["raises", "hangs"])
def test_the_other_lanes_of_the_host_are_undisturbed(tmp_path: Path, mode: str) -> None:
    one = doomed(tmp_path, 12) if mode == "raises" else [partial(Held, 0, tmp_path, steps=[12], lengths=(100, 100))]
    with hosted([*one, *makers(1, 2)], on={"lanes": 3}, prefetch=3) as (rollout, _):
        fragments = iter(rollout.fragments())
        taken = taken_until(fragments, lambda more: sum(f.lane == 1 for f in more) >= (8 if mode == "raises" else 2))
        if mode == "hangs":
            await_held(tmp_path, 0)
            let_go(tmp_path, 0)
        rollout.drain()
        taken += list(fragments)
    others = [fragment for fragment in taken if fragment.lane]
    check_laws(others, {}, 0)
    check_counts(taken, rollout)
    assert rollout.lost == ({"workers": 1} if mode == "raises" else {})


class Unruly(NumberedEnv):
    """Raises in resets: those of these numbers, over all lives."""

    resets = 0
    raises: frozenset[int] = frozenset()

    def reset(self, **kwargs: Any) -> Any:
        Unruly.resets += 1
        if Unruly.resets - 1 in Unruly.raises:
            raise RuntimeError("no reset")
        return super().reset(**kwargs)


@pytest.fixture
def unruly(monkeypatch: pytest.MonkeyPatch) -> Any:
    def raising(*numbers: int) -> Any:
        monkeypatch.setattr(Unruly, "resets", 0)
        monkeypatch.setattr(Unruly, "raises", frozenset(numbers))
        return partial(Unruly, 0, lengths=(5, 5))

    return raising


@pytest.mark.parametrize("numbers", [(0,), (0, 1, 2), (1,), (1, 2)])
def test_one_that_can_not_be_reset_is_tried_again(unruly: Any, numbers: tuple[int, ...]) -> None:
    with hosted([unruly(*numbers)], num_fragments=3) as (rollout, _):
        taken = list(rollout.fragments())
        assert rollout.num_steps == sum(fragment.num_steps for fragment in taken)
    # A reset within an episode's last step takes that step with it; the others take none.
    assert rollout.lost == ({} if 0 in numbers else {"workers": 1})
    for steps in rewards_by_slot(taken).values():
        lives_of(steps)
    assert [fragment.sequence for fragment in taken] == [0, 1, 2]


@pytest.mark.parametrize(("place", "fate"), [("rollouts", "kill"), ("rollouts", "raise"), ("hosted rollouts", "raise")])
def test_one_that_fails_again_and_again_leaves_and_the_others_go_on(
    place: str, fate: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    makers_of = [*doomed(tmp_path, 0, 100, fate=fate), *makers(1, 2)]
    workers = 3 if fate == "kill" else 1
    with doomed_at(place, makers_of, lanes=3, workers=workers, num_fragments=3) as made, made as rollout:
        taken = list(rollout.fragments())
    assert sorted((f.lane, f.sequence) for f in taken) == [(lane, n) for lane in (1, 2) for n in range(3)]
    assert "lane 0 is set aside, lost 6 times in a row" in caplog.text
    assert len(Doomed.lives(tmp_path, 0)) == 6
    assert rollout.lost == {"workers": 6}


ALL_LEFT = "every lane has left, though hosts are here, .*: lane 0: "


def test_where_it_was_the_last_lane_the_rollout_says_why(tmp_path: Path) -> None:
    with hosted(doomed(tmp_path, 3, 100), on={"name": "sim"}) as (rollout, _):
        rollout.environments.join_timeout = 0.2
        fragments: list[Fragment] = []
        with pytest.raises(EnvError, match=rf"{ALL_LEFT}host sim .*: RuntimeError: it broke"):
            fragments += rollout.fragments()
    check_counts(fragments, rollout)
    assert [fragment.num_steps for fragment in fragments] == [3] * 6
    assert lost_in(fragments) == ["RuntimeError: it broke"] * 6


# Environments that hang


def test_one_that_is_late_is_awaited(tmp_path: Path, caplog: pytest.LogCaptureFixture, lane_clock: LaneClock) -> None:
    held = [partial(Held, slot, tmp_path, steps=[12] if slot == 0 else [], lengths=(100, 100)) for slot in range(3)]
    options: Any = {"timeouts": Timeouts(step=0.3), "prefetch": 6, "num_fragments": 3}
    with hosted([*makers(3), *held], on={"lanes": 2, "name": "sim"}, **options) as (rollout, _):
        await_that(lambda: rollout.num_steps == 2 * (12 + 24))
        await_late(rollout, lane_clock)
        let_go(tmp_path, 0)
        taken = list(rollout.fragments())
        assert rollout.num_steps == sum(fragment.num_steps for fragment in taken)
    assert rollout.lost == {}
    assert sorted((f.lane, f.sequence) for f in taken) == [(lane, n) for lane in range(2) for n in range(3)]
    [told] = [record.getMessage() for record in caplog.records if "is late" in record.getMessage()]
    assert "is late: host sim (tcp://127.0.0.1:" in told
    assert "slots 0 to 1: no answer to a step within 0.3 s" in told
    check_laws(taken, {}, 0)


def test_one_that_hangs_for_good_leaves_and_what_it_had_told_of_is_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, lane_clock: LaneClock
) -> None:
    envs = [partial(Held, 0, tmp_path, steps=[12], lengths=(100, 100)), *makers(1)]
    on = {"lanes": 2, "name": "sim"}
    try:
        with hosted(envs, on=on, timeouts=Timeouts(step=0.3, reset=0.3), prefetch=1) as (rollout, _):
            fragments = iter(rollout.fragments())
            await_that(lambda: rollout.environments.remotes)  # the ring's thread makes them
            records = rollout.environments.remotes
            count = records[0]
            taken = taken_until(fragments, lambda _: count.steps + count.unreported == 12)
            lane_clock.go_on(rollout, 0.4)
            taken += taken_until(fragments, lambda _: lane_clock.has_looked(rollout, 0))
            taken += taken_until(fragments, lambda _: records[1].phase is not LanePhase.LATE)
            lane_clock.go_on(rollout, 0.4)
            taken += taken_until(fragments, lambda _: records[0].phase is LanePhase.LATE)
            taken += taken_until(fragments, lambda _: records[1].phase is not LanePhase.LATE)  # it may be by chance
            lane_clock.go_on(rollout, 0.4)
            taken += taken_until(fragments, lambda taken: bool(rollout.lost) and slots_of(taken[-3:]) == {1})
            assert rollout.lost == {"workers": 4 + 1}
            let_go(tmp_path, 0)  # its answer comes after all, and is nobody's any more, nor what it goes on to tell
            host = next(iter(rollout.environments.gateway.hosts.values()))
            await_that(lambda: host.session._lanes[0].request is None)
            taken += [next(fragments) for _ in range(5)]
            rollout.drain()
            taken += list(fragments)
    finally:
        let_go(tmp_path, 0)
    assert rollout.lost == {"workers": 4 + 1}
    check_counts(taken, rollout)
    assert len(rewards_by_slot(taken)[0]) == 8
    check_laws(taken, rollout.lost, slots_lost=5)
    assert "lane 0 is lost: host sim" in caplog.text


@pytest.mark.slow
def test_one_that_makes_steps_is_never_late_however_long_its_fragment_takes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, lane_clock: LaneClock
) -> None:
    steps, timeouts = [4, 5, 6, 7], Timeouts(step=10.0, reset=10.0)
    held = [partial(Held, 0, tmp_path, steps=steps)]
    with hosted(held, timeouts=timeouts, prefetch=1, num_fragments=1) as (rollout, _):
        for times, step in enumerate(steps):
            await_held(tmp_path, 0, times)
            await_that(lambda step=step: rollout.num_steps == step)  # as it has said
            lane_clock.go_on(rollout, 11.0)
            await_that(lambda: rollout.environments.deadlines.left not in (None, 0.0))
            let_go(tmp_path, 0, times)
        [fragment] = rollout.fragments()
    assert fragment.num_steps == 8
    assert "is late" not in caplog.text
    assert rollout.lost == {}


@pytest.mark.wait_times(first_pause_s=0.01, host_pause_s=0.05)
def test_one_that_is_late_and_cut_off_has_its_time_again_when_it_is_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, lane_clock: LaneClock
) -> None:
    held = [partial(Held, 0, tmp_path, steps=[12], lengths=(100, 100))]
    try:
        with wired(held, timeouts=Timeouts(step=0.3, reset=60.0), prefetch=1) as (rollout, _, wire):
            rollout.environments.join_timeout = 0.0  # the clock would have to go on for others to be waited for
            await_that(lambda: rollout.num_steps == 12)
            await_late(rollout, lane_clock)
            lane_clock.go_on(rollout, 5.0)
            cut_off(wire, rollout)
            wire.is_down = False
            await_that(lambda: lane_clock.left(rollout, 0) == 60.0)
            lane_clock.go_on(rollout, 60.0)
            with pytest.raises(EnvError, match=rf"{ALL_LEFT}.* no answer to a step within 0.3 s"):
                list(rollout.fragments())
            let_go(tmp_path, 0)
    finally:
        let_go(tmp_path, 0)
    assert rollout.lost["workers"] == 4 + 1


@pytest.mark.slow
def test_a_reset_that_hangs_has_the_time_of_a_reset(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    envs = listening(RemoteRollouts, limits=HASTY)
    try:
        host = rollouts_on(envs.addresses[0], [partial(Held, 0, tmp_path, resets=[0])])
        with host, rollout_over(envs, timeouts=Timeouts(step=0.05, reset=0.4), prefetch=1) as rollout:
            rollout.environments.join_timeout = 0.2
            await_held(tmp_path, 0)
            with pytest.raises(EnvError, match=rf"{ALL_LEFT}.* no answer to a reset within 0.4 s"):
                list(rollout.fragments())
            let_go(tmp_path, 0)
    finally:
        let_go(tmp_path, 0)
    assert rollout.lost == {}
    assert times_made(tmp_path, 0) == 1
    assert "no answer to a reset within 0.4 s" in caplog.text
