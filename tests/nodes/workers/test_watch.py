"""Lanes that are looked at: whoever is at the same for too long is late, and nobody else."""

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from hypothesis import given
from hypothesis import strategies as st
from numbered_env import NumberedEnv

from rollflow.nodes.stepping import blends_resets, step_of
from rollflow.nodes.workers import deadlines, watch
from rollflow.nodes.workers.phase import Doing, Phase
from rollflow.nodes.workers.watch import Watch

timeouts = st.none() | st.integers(1, 9)
phases = st.lists(st.tuples(st.sampled_from([Doing.STEP, Doing.RESET]), st.integers(0, 40)), min_size=1, max_size=8)


@given(step=timeouts, reset=timeouts, phases=phases)
def test_late_is_who_is_at_the_same_for_too_long_and_little_later(
    step: int | None, reset: int | None, phases: list[tuple[Doing, int]]
) -> None:
    now, count, doing = 0.0, 0, phases[0][0]
    allowed = {Doing.STEP: step, Doing.RESET: reset}
    shortest = min((seconds for seconds in (step, reset) if seconds is not None), default=0)
    with pytest.MonkeyPatch.context() as patch:
        for module in (deadlines, watch):
            patch.setattr(module, "monotonic", lambda: now)
        watched = Watch(step, reset, lambda lane: (count, doing))
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
                assert seconds is None or lasts <= seconds + (shortest if count else 0)
                continue
            assert seconds is not None
            assert now - began >= seconds - 1e-5
            assert count or now - began == pytest.approx(seconds)
            assert late == {0: f"no answer to a {'step' if doing is Doing.STEP else 'reset'} within {seconds} s"}
            return


def test_who_has_answered_is_not_waited_for() -> None:
    watched = Watch(1.0, 1.0, lambda lane: (0, Doing.STEP))
    watched.begin(3)
    assert watched.left is not None
    watched.end(3)
    assert (watched.left, watched.overdue()) == (None, {})


def test_where_everything_may_take_for_ever_nobody_is_looked_at() -> None:
    watched = Watch(None, None, lambda lane: (0, Doing.BOTH))
    watched.begin(0)
    assert watched.left is None


def test_resets_that_can_not_be_told_from_their_step_add_to_its_time() -> None:
    phase = Phase()
    assert phase.doing is Doing.STEP
    phase.set_blended(True)
    assert phase.doing is Doing.BOTH
    watched = Watch(1.0, 5.0, lambda lane: (phase.turns, phase.doing))
    watched.begin(0)
    assert watched._until[0] - watch.monotonic() == pytest.approx(6.0, abs=0.5)


# What tells of it


class Tells(NumberedEnv):
    """Keeps what its phase says in each of its steps and resets; raises in its third reset."""

    def __init__(self, phase: Phase) -> None:
        super().__init__(0, lengths=(2, 2))
        self.phase = phase
        self.told: list[tuple[str, Doing]] = []

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
    phase = Phase()
    env = Tells(phase)
    mode = AutoresetMode.SAME_STEP if is_ours else AutoresetMode.DISABLED
    envs = SyncVectorEnv([lambda: env], autoreset_mode=mode)
    assert not blends_resets(envs, is_ours=is_ours)
    step = step_of(envs, is_ours=is_ours, turn=phase.turn)
    envs.reset()
    actions = np.zeros(1, np.int64)
    for _ in range(3):
        step(actions)
    with pytest.raises(RuntimeError, match="it broke"):
        step(actions)
    within = [("step", Doing.STEP), ("step", Doing.STEP), ("reset", Doing.RESET)]
    assert env.told[1:] == 2 * within
    assert phase.doing is Doing.STEP


@pytest.mark.parametrize("mode", [AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP])
def test_vectorized_environments_reset_where_nobody_can_tell(mode: AutoresetMode) -> None:
    envs = SyncVectorEnv([lambda: NumberedEnv(0)], autoreset_mode=mode)
    assert blends_resets(envs, is_ours=False)
    assert blends_resets(gym.make_vec("CartPole-v1", num_envs=2), is_ours=True)
