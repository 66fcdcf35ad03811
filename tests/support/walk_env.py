"""An environment whose state no attribute shows."""

import threading
from typing import Any

import gymnasium as gym
import numpy as np


class Walk(gym.Env[Any, Any]):
    """A walk of a generator that no attribute shows: only its actions since the last reset tell where it stands."""

    observation_space = gym.spaces.Box(-9, 9, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.steps = iter(range(1, 100))
        self.at = self.np_random.normal(size=2).astype(np.float32).clip(-9, 9)
        return self.at, {"step": 0}

    def step(self, action: Any) -> Any:
        count = next(self.steps)
        self.at = (self.at + 0.1 * self.np_random.normal(size=2) + 0.1 * action).astype(np.float32).clip(-9, 9)
        return self.at, float(self.at[0]), bool(self.at[0] > 2), count > 20, {"step": count}


class Stuck(Walk):
    """It never says its state."""

    def get_state(self) -> Any:
        threading.Event().wait()

    def set_state(self, state: Any) -> None:
        raise NotImplementedError
