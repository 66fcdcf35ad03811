"""Environments that keep what they were given, or write over what they gave: the same recordings everywhere."""

from typing import Any, Literal

import gymnasium as gym
import numpy as np
import pytest

from rollflow import Rollout

WHERE: list[Literal["inline", "threads", "processes", "rollouts"]] = ["inline", "threads", "processes", "rollouts"]


class Keeping(gym.Env[Any, Any]):
    """Pays for the difference between two actions, then writes over the action; its infos are one array for ever."""

    observation_space = gym.spaces.Box(-1, 1, (1,), np.float32)
    action_space = gym.spaces.Box(-10, 10, (2,), np.float32)

    def __init__(self) -> None:
        self.info = {"steps": np.zeros(1), "nested": {"list": [np.zeros(1)]}}

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.last = np.zeros(2, np.float32)
        return np.zeros(1, np.float32), self.info

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        difference = float(np.abs(action - self.last).sum())
        self.last = action
        self.info["steps"] += 1
        self.info["nested"]["list"][0] -= 1
        return np.zeros(1, np.float32), difference, False, False, self.info


class Overwriting(Keeping):
    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        answer = super().step(action.copy())
        action *= 0
        return answer


@pytest.mark.slow
@pytest.mark.parametrize(
    ("env", "where"),
    [*((env, where) for env in (Keeping, Overwriting) for where in WHERE[:-1]), (Overwriting, "rollouts")],
)
def test_what_was_recorded_is_what_was_meant_at_the_time(env: Any, where: Any) -> None:
    with Rollout(env, where=where, lanes=1, seed=1, num_fragments=1, fragment_length=4) as rollout:
        [fragment] = rollout.fragments()
    chunk = fragment.chunk(0)
    actions = np.clip(chunk.get_actions(slice(0, None)), -10, 10)
    if rollout.module_to_env["NormalizeAndClipActions"].normalize_actions:
        actions = actions * 10  # as the environment gets them
    before = np.concatenate([np.zeros((1, 2)), actions[:-1]])
    np.testing.assert_allclose(chunk.get_rewards(), np.abs(actions - before).sum(-1), rtol=1e-4)
    infos = chunk.get_infos(slice(0, None))
    assert [float(info["steps"][0]) for info in infos] == [0, 1, 2, 3, 4]
    assert [float(info["nested"]["list"][0][0]) for info in infos] == [0, -1, -2, -3, -4]
