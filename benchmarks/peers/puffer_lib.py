"""PufferLib's `Serial` over its wrapper of gymnasium's environments; the loop written by hand does the rest."""

from typing import Any

import gymnasium as gym
import pufferlib.emulation
import pufferlib.vector
from gymnasium.vector import AutoresetMode

from benchmarks.loop import Loop


class _Serial:
    """What the loop knows of a vector environment."""

    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}  # noqa: RUF012

    def __init__(self, env_id: str, slots: int) -> None:
        def make(**given: Any) -> Any:
            return pufferlib.emulation.GymnasiumPufferEnv(env=gym.make(env_id, disable_env_checker=True), **given)

        self._envs = pufferlib.vector.make(make, num_envs=slots, backend=pufferlib.vector.Serial)
        self.num_envs, self.single_observation_space = slots, self._envs.single_observation_space
        self.reset, self.step = self._envs.reset, self._envs.step


class Runner:
    """Collects a fragment at a time."""

    def __init__(self, env_id: str, slots: int, policy: Any) -> None:
        self.fragment = Loop(_Serial(env_id, slots), policy).fragment
