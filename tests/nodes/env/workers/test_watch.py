"""Lanes that are looked at: whoever is at the same for too long is late, and nobody else."""

from collections.abc import Callable
from time import perf_counter_ns
from typing import Any
from unittest.mock import Mock

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from hypothesis import given, strategies as st
from numbered_env import NumberedEnv

from rollflow.nodes.env.observation_check import Deviations
from rollflow.nodes.env.stepping import LaneVectorEnv, SideBySide, nothing
from rollflow.nodes.env.workers.lanes_elsewhere import LanesElsewhere
from rollflow.nodes.env.workers.watch import Activity, ActivityFlag, ProgressWatch
from rollflow.stream.graph.meter import CallTimes
from rollflow.stream.net.backoff import waiting

timeouts = st.none() | st.integers(1, 9)
phases = st.lists(
    st.tuples(st.sampled_from([Activity.STEP, Activity.RESET]), st.integers(0, 40)), min_size=1, max_size=8
)


@given(step=timeouts, reset=timeouts, phases=phases)
def test_late_is_who_is_at_the_same_for_too_long_and_little_later(
    step: int | None, reset: int | None, phases: list[tuple[Activity, int]]
) -> None:
    now, count, doing = 0.0, 0, phases[0][0]
    allowed = {Activity.STEP: step, Activity.RESET: reset}
    shortest = min((seconds for seconds in (step, reset) if seconds is not None), default=0)
    with waiting(clock=lambda: now):
        watched = ProgressWatch(step, reset, lambda lane: (count, doing))
        watched.begin(0)
        for count, (doing, lasts) in enumerate(phases):
            began, seconds = now, allowed[doing]
            while watched.left is not None and now + watched.left <= began + lasts:
                now += watched.left
                if late := watched.overdue():
                    break
            else:
                now = began + lasts
                # It is found late when it has been seen for as long as it may, from its first look on.
                assert seconds is None or lasts <= seconds + (shortest / 8 + 1e-5 if count else 0)
                continue
            assert seconds is not None
            assert now - began >= seconds - 1e-5
            assert count or now - began == pytest.approx(seconds)
            assert late == {0: f"no answer to a {'step' if doing is Activity.STEP else 'reset'} within {seconds} s"}
            return


def test_who_has_answered_is_not_waited_for() -> None:
    watched = ProgressWatch(1.0, 1.0, lambda lane: (0, Activity.STEP))
    watched.begin(3)
    assert watched.left is not None
    watched.end(3)
    assert (watched.left, watched.overdue()) == (None, {})


def test_where_everything_may_take_for_ever_nobody_is_looked_at() -> None:
    watched = ProgressWatch(None, None, lambda lane: (0, Activity.BOTH))
    watched.begin(0)
    assert watched.left is None


def test_resets_that_can_not_be_told_from_their_step_add_to_its_time() -> None:
    phase = ActivityFlag()
    assert phase.doing is Activity.STEP
    phase.set_blended(True)
    assert phase.doing is Activity.BOTH
    watched = ProgressWatch(1.0, 5.0, lambda lane: (phase.turns, phase.doing))
    with waiting(clock=float):
        watched.begin(0)
    assert watched._until[0] == 6.0


def test_a_call_takes_time_on_the_clock_of_waits_and_its_span_on_traces(forward: Callable[[float], None]) -> None:
    watched, lane = ProgressWatch(9.0, 9.0, lambda lane: (0, Activity.STEP)), Mock(index=0, is_set_aside=False)
    source = Mock(deadlines=watched, remotes=[lane], call_times=CallTimes(), keeps_order=False)
    source._completed = lambda: [lane]
    source._counted = lambda: LanesElsewhere._counted(source)
    source._waits_for = lambda remote, name, began, age_s: [(remote, began, age_s)]
    watched.begin(0)
    forward(2.0)
    assert list(LanesElsewhere.at_work(source, "env")) == [(lane, watched.began[0], 2.0)]
    before = perf_counter_ns()
    assert list(LanesElsewhere.completed(source)) == [lane]
    began, took = source.trace.stepped.call_args.args[1], source.call_times.longest
    assert took == 2_000_000_000
    assert before <= began + took <= perf_counter_ns()


# What tells of it


class Tells(NumberedEnv):
    """Keeps what its phase says in each of its steps and resets; raises in its third reset."""

    def __init__(self, phase: ActivityFlag) -> None:
        super().__init__(0, lengths=(2, 2))
        self.phase = phase
        self.told: list[tuple[str, Activity]] = []

    def reset(self, **kwargs: Any) -> Any:
        self.told.append(("reset", self.phase.doing))
        if self.episode == 1:
            raise RuntimeError("it broke")
        return super().reset(**kwargs)

    def step(self, action: Any) -> Any:
        self.told.append(("step", self.phase.doing))
        return super().step(action)


@pytest.mark.parametrize("is_ours", [True, False])
def test_a_reset_within_a_step_is_told_of_and_its_end_as_well(is_ours: bool) -> None:
    phase = ActivityFlag()
    env = Tells(phase)
    mode = AutoresetMode.SAME_STEP if is_ours else AutoresetMode.DISABLED
    envs = (SideBySide if is_ours else SyncVectorEnv)([lambda: env], autoreset_mode=mode)
    lane_env = LaneVectorEnv(envs, deviations=Deviations())
    assert lane_env.tell_resets(phase.turn)
    envs.reset()
    actions = np.zeros(1, np.int64)
    for _ in range(3):
        lane_env.step(actions)
    with pytest.raises(RuntimeError, match="it broke"):
        lane_env.step(actions)
    within = [("step", Activity.STEP), ("step", Activity.STEP), ("reset", Activity.RESET)]
    assert env.told[1:] == 2 * within
    assert phase.doing is Activity.STEP


@pytest.mark.parametrize("mode", AutoresetMode)
def test_the_first_step_after_a_reset_is_one_though_an_episode_had_ended(mode: AutoresetMode) -> None:
    envs = SideBySide([lambda: NumberedEnv(0, lengths=(2, 2))], autoreset_mode=mode)
    lane_env = LaneVectorEnv(envs, deviations=Deviations())
    for steps in (2, 1):
        lane_env.reset([0])
        for _ in range(steps):
            observations, *_ = lane_env.step(np.zeros(1, np.int64))
    assert observations[0, 2] == 1


@pytest.mark.parametrize("mode", [AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP])
def test_vectorized_environments_reset_where_nobody_can_tell(mode: AutoresetMode) -> None:
    for envs in SyncVectorEnv([lambda: NumberedEnv(0)], autoreset_mode=mode), gym.make_vec("CartPole-v1", num_envs=2):
        assert not LaneVectorEnv(envs, deviations=Deviations()).tell_resets(nothing)
