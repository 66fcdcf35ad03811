"""Pools that answer for whichever environments are ready: what `test_laws` holds of all, and what is their own."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from drawn_rollouts import Setting, drawn_settings, rollout_of
from fragment_equality import assert_alike
from gymnasium.vector import AutoresetMode
from gymnasium.wrappers.vector import RecordEpisodeStatistics
from hypothesis import given, settings, strategies as st
from numbered_module import NumberedEnv, NumberedModule
from property_examples import examples
from stand_in_pool import StandInPool
from ways import WAYS

from rollflow import Forward, Fragment, RLModule, Rollout
from rollflow.nodes.offloaded.fragment_message import fragment_of, message_of
from rollflow.stream.data.errors import EnvError, WireError

few = settings(max_examples=examples(30))


def steps_made(pool: StandInPool) -> int:
    envs: Any = pool.envs
    return sum(len(env.log) for env in envs)


def pool_of(slots: int, batch_size: int, **options: Any) -> StandInPool:
    return StandInPool([NumberedEnv(slot, lengths=(1, 9)) for slot in range(slots)], batch_size, **options)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("prefetch", [0, 1])
@pytest.mark.parametrize("forward", [Forward(), Forward(max_batch=8), Forward(max_batch=16)])
@pytest.mark.parametrize("lanes", [1, 3])
def test_a_drain_hands_out_every_step(lanes: int, forward: Forward, prefetch: int, way: str) -> None:
    pools = [pool_of(8, 2, seed=lane) for lane in range(lanes)]
    options: Any = {"forward": forward, "prefetch": prefetch, "fragment_length": 5}
    rollout = Rollout(pools, module=NumberedModule(), **options)
    handed = sum(fragment.num_steps for fragment in WAYS[way](rollout, 3, id))
    assert handed == rollout.num_steps == sum(map(steps_made, pools))
    assert not rollout.lost
    assert not any(pool.under_way for pool in pools)


@few
@given(drawn_settings, st.integers(1, 3))
def test_fragments_are_the_same_behind_the_wire(drawn: Setting, odds: int) -> None:
    pool = pool_of(2 * drawn.slots, drawn.slots, seed=drawn.seed, odds=odds)
    rollout = rollout_of(drawn, pool, prefetch=drawn.prefetch)
    with rollout:
        for fragment in rollout.fragments():
            spaces = [fragment.observation_space]
            sent = message_of(3, fragment, spaces, {})
            came = fragment_of(sent, fragment.layout, spaces)
            assert_alike([fragment], [came])
            assert (came.stops == fragment.stops).all()
            assert came.policy_version == fragment.policy_version


@pytest.mark.parametrize("altered", [lambda stops: stops.astype(np.int32), np.ndarray.tolist])
def test_rows_where_slots_do_not_end_are_refused(altered: Callable[[Any], Any]) -> None:
    with rollout_of(Setting(4, 1, 8, 1, False, 9, 1, 7), pool_of(4, 1)) as rollout:
        fragment = next(iter(rollout.fragments()))
    spaces = [fragment.observation_space]
    sent = message_of(3, fragment, spaces, {})
    with pytest.raises(WireError, match=r"stops is .*, expected int64\[4\]"):
        fragment_of(replace(sent, rest={**sent.rest, "stops": altered(fragment.stops)}), fragment.layout, spaces)


@pytest.mark.parametrize(("odds", "rows"), [(1.0, None), (50.0, 16)])
def test_a_fragment_ends_with_as_many_answers_or_where_a_slot_has_twice_as_many(odds: float, rows: int | None) -> None:
    drawn = Setting(4, 1, 8, 1, False, 9, 0, 7)
    pool = pool_of(4, 1, odds=odds)
    with rollout_of(drawn, pool) as rollout:
        for fragment in rollout.fragments():
            assert not pool.under_way
            answers = int((fragment.stops - fragment.first_row).sum())
            assert answers == 4 * 8 if rows is None else (fragment.num_rows, answers < 4 * 8) == (rows, True)


def seconds_of_others(slow: float, prefetch: int) -> float:
    """Seconds in which 63 environments make 4,000 steps beside one whose steps last `slow`, where theirs last one."""
    pool, seconds, others = pool_of(64, 4, lasts=[slow] + [1.0] * 63), list[float](), 0
    usual = pool.recv

    def recv() -> Any:
        nonlocal others
        answer = usual()
        others += np.count_nonzero(answer[-1]["env_id"])
        if others >= 4000:
            seconds.append(pool.clock)
        return answer

    pool.recv = recv  # type: ignore[method-assign]
    with Rollout(pool, module=NumberedModule(), fragment_length=8, prefetch=prefetch, num_fragments=10) as rollout:
        list(rollout.fragments())
    return seconds[0]


def test_one_slow_environment_of_64_slows_the_others_by_less_than_2_percent_under_prefetch() -> None:
    assert seconds_of_others(100.0, prefetch=1) < 1.02 * seconds_of_others(1.0, prefetch=1)
    assert seconds_of_others(100.0, prefetch=0) > 5 * 4000 / 63


def test_a_reward_that_is_not_finite_is_refused_where_it_stands() -> None:
    pool = pool_of(4, 2)
    make: Callable[..., Any] = pool.envs[3].step
    pool.envs[3].step = lambda action: (*(answer := make(action))[:1], np.nan, *answer[2:])  # type: ignore[method-assign]
    with (
        pytest.raises(EnvError, match=r"lane 0, slot 3, its step \d+ in lane 0, fragment 0"),
        Rollout(pool, module=NumberedModule(), fragment_length=4) as rollout,
    ):
        list(rollout.fragments())


def with_info(**values: Any) -> Callable[[Any], Any]:
    return lambda answer: (*answer[:4], answer[4] | values)


def with_flags(of: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda answer: (*answer[:2], of(answer[2]), *answer[3:])


ANSWERS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "four values": (lambda answer: answer[:4], "recv gave a tuple of 4, expected a tuple of 5: observation, reward"),
    "an array": (lambda answer: answer[0], r"recv gave an array \w+\[2, 3\], expected a tuple of 5"),
    "a list for info": (lambda answer: (*answer[:4], [{}]), "as info a list of 1, expected a dict with 'env_id'"),
    "no ids": (lambda answer: (*answer[:4], {"a": 1}), r"as info a dict with \['a'\], expected a dict with 'env_id'"),
    "ids twice": (with_info(env_id=np.array([1, 1])), r"as info\['env_id'\] \[1, 1\], expected 2 different ones, of"),
    "other ids": (with_info(env_id=np.array([1, -1])), r"as info\['env_id'\] \[1, -1\], .* last action: \[\d"),
    "ids in floats": (with_info(env_id=np.ones(2)), r"\['env_id'\] an array float64\[2\], expected an array int\[2\]"),
    "ids in a list": (with_info(env_id=[0, 1]), r"\['env_id'\] a list of 2, expected an array int\[2\]"),
    "float flags": (with_flags(np.float32), r"terminated an array float32\[2\], expected an array bool\[2\]"),
    "int flags": (
        with_flags(np.int64),
        r"terminated an array int64\[2\], expected an array bool\[2\], since batch_size is",
    ),
    "flags [K, 1]": (with_flags(lambda flags: flags[:, None]), r"terminated an array bool\[2, 1\], expected an array"),
    "listed flags": (with_flags(np.ndarray.tolist), r"as terminated a list of 2, expected an array bool\[2\]"),
    "a number too few": (lambda answer: (answer[0], answer[1][:1], *answer[2:]), r"as reward an array float32\[1\], "),
}


@pytest.mark.parametrize("at", [0, 1, 7])
@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_of_another_form_is_refused(name: str, at: int) -> None:
    changed, message = ANSWERS[name]
    pool = pool_of(4, 2)
    usual, calls = pool.recv, iter(range(1000))
    pool.recv = lambda: changed(usual()) if next(calls) == at else usual()  # type: ignore[method-assign]
    with (
        pytest.raises(EnvError, match=f"lane 0, recv gave.*{message.removeprefix('recv gave')}"),
        Rollout(pool, module=NumberedModule(), fragment_length=4) as rollout,
    ):
        list(rollout.fragments())


@pytest.mark.parametrize("step", [0, 3])
def test_later_observations_are_checked_and_their_slots_named(step: int, caplog: pytest.LogCaptureFixture) -> None:
    pool = pool_of(4, 2)
    usual, slots = pool.recv, list[int]()

    def recv() -> Any:
        observations, *others = usual()
        slots.extend(others[-1]["env_id"].tolist())
        observations[1] -= 1000 * (len(slots) == 4 + 4 * step + 2)  # the first answers of that vector step
        return observations, *others

    pool.recv = recv  # type: ignore[method-assign]
    with Rollout(pool, module=NumberedModule(), fragment_length=8, num_fragments=1) as rollout:
        list(rollout.fragments())
    slot = slots[4 + 4 * step + 1]
    assert f"lane 0, slot {slot}, vector step {step}: observation" in caplog.text


def in_same_step() -> StandInPool:
    pool = pool_of(4, 2)
    pool.metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}
    return pool


@pytest.mark.parametrize(
    ("pool", "options", "message"),
    [
        (lambda: pool_of(5, 2), {}, "num_envs is 5 and batch_size is 2: .* a multiple of it"),
        (lambda: RecordEpisodeStatistics(pool_of(4, 2)), {}, "RecordEpisodeStatistics wraps an asynchronous pool"),
        (in_same_step, {}, "autoreset_mode is AutoresetMode.SAME_STEP, expected NEXT_STEP"),
        (lambda: pool_of(4, 2), {"where": "threads"}, "StandInPool answers for some .* where='inline' alone"),
        (lambda: pool_of(4, 2), {"seed": [1, 2, 3, 4]}, "takes one seed for its 4 slots"),
    ],
)
def test_what_does_not_work_is_refused(pool: Callable[[], Any], options: Any, message: str) -> None:
    with pytest.raises((EnvError, ValueError), match=message), Rollout(pool(), module=NumberedModule(), **options) as r:
        next(iter(r.fragments()))


@pytest.mark.parametrize("call", range(10))
@pytest.mark.parametrize("batch_size", [1, 2])
def test_an_error_of_the_pool_names_its_place_and_no_step_is_lost_twice(call: int, batch_size: int) -> None:
    """A fragment has two vector steps here, so that calls fail within it, and where all are waited for."""
    pool = pool_of(6, batch_size)
    usual, calls, handed = pool.recv, 0, list[Fragment]()

    def recv() -> Any:
        nonlocal calls
        calls += bool(handed)
        if calls > call:
            raise OSError("the simulator has ended")
        return usual()

    pool.recv = recv  # type: ignore[method-assign]
    rollout = Rollout(pool, module=NumberedModule(), fragment_length=2)
    with rollout, pytest.raises(OSError, match="the simulator has ended") as raised:
        for fragment in rollout.fragments():
            handed.append(fragment)
    assert any(note.startswith("lane 0, vector step ") for note in raised.value.__notes__)
    assert steps_made(pool) == sum(fragment.num_steps for fragment in handed) + rollout.lost["failed"]


@pytest.mark.parametrize("fragment_length", [1, 4])
def test_the_stall_doctor_names_the_lane_wherever_answers_are_awaited(fragment_length: int) -> None:
    pool = pool_of(6, 1)
    usual, told = pool.recv, list[tuple[str, ...]]()

    def recv() -> Any:
        told.append(tuple(f"{wait.where} {wait.doing}" for wait in rollout.environments.at_work("env")))
        return usual()

    pool.recv = recv  # type: ignore[method-assign]
    rollout = Rollout(pool, module=NumberedModule(), fragment_length=fragment_length, num_fragments=2)
    with rollout:
        list(rollout.fragments())
        assert not list(rollout.environments.at_work("env"))
    assert {*told[:6]} == {("lane 0 is in reset()",)}
    assert {*told[6:]} == {("lane 0 is in step()",)}


class Blind(gym.Env[Any, Any]):
    """Sees nothing: an observation has no numbers."""

    observation_space, action_space = gym.spaces.Box(0, 1, (0,)), gym.spaces.Discrete(7)

    def reset(self, **kwargs: Any) -> Any:
        return np.zeros(0, np.float32), {"number": 0}

    def step(self, action: Any) -> Any:
        return np.zeros(0, np.float32), 1.0, False, False, {"number": 0}


class Guesses(RLModule):
    def _forward(self, batch: Any, **kwargs: Any) -> Any:
        return {"action_dist_inputs": torch.zeros(len(batch["obs"]), 7)}


def test_observations_may_have_no_numbers() -> None:
    pool = StandInPool([Blind() for _ in range(4)], 2)
    with Rollout(pool, module=Guesses(), fragment_length=4, num_fragments=2) as rollout:
        assert [fragment.num_steps for fragment in rollout.fragments()] == [16, 16]
