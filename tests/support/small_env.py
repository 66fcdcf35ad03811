"""An environment of which a test writes what it needs."""

from typing import Any

import gymnasium as gym
import numpy as np


class SmallEnv(gym.Env[Any, Any]):
    """Shows zeros, pays nothing, and ends after `length` steps; subclasses replace what is to be otherwise.

    length       None: no episode ends
    truncates    whether ends are truncations
    t            steps of the episode so far
    action       the step's; None after a reset
    """

    observation_space: gym.Space[Any] = gym.spaces.Box(-1, 1, (1,))
    action_space: gym.Space[Any] = gym.spaces.Discrete(2)
    length: int | None = None
    truncates = False

    def look(self) -> Any:
        """The observation."""
        return np.zeros(self.observation_space.shape, self.observation_space.dtype)  # type: ignore[arg-type]

    def pay(self, action: Any) -> Any:
        """The step's reward."""
        return 0.0

    def tell(self) -> dict[str, Any]:
        """The infos."""
        return {}

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.t, self.action = 0, None
        return self.look(), self.tell()

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        self.t, self.action = self.t + 1, action
        reward, ends = self.pay(action), self.t == self.length
        return self.look(), reward, ends and not self.truncates, ends and self.truncates, self.tell()
