"""Environment with observations and actions of every kind that a space may have, and a module that acts in it."""

from typing import Any

import gymnasium as gym
import numpy as np
import torch

from rollflow import RLModule


class Shapes(gym.Env[Any, Any]):
    """Observations and actions of every kind that a space may have."""

    observation_space = gym.spaces.Dict(
        {
            "picture": gym.spaces.Box(0, 255, (2, 3, 3), np.uint8),
            "pair": gym.spaces.Tuple(
                [gym.spaces.Discrete(5), gym.spaces.Dict({"half": gym.spaces.Box(-1, 1, (2,), np.float16)})]
            ),
            "flags": gym.spaces.MultiBinary(3),
            "counts": gym.spaces.MultiDiscrete([3, 4]),
            "one": gym.spaces.Box(-1, 1, (), np.float64),
        }
    )
    action_space = gym.spaces.Dict({"push": gym.spaces.Box(-1, 1, (2,), np.float32), "pick": gym.spaces.Discrete(3)})

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> Any:
        return self.observation_space.sample(), 1.0, bool(self.np_random.integers(3) == 0), False, {}


class FixedModule(RLModule):
    """The same action always, and an output that is a tree."""

    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        rows = len(batch["obs"]["one"])
        actions = {"push": torch.zeros(rows, 2), "pick": torch.arange(rows) % 3}
        return {"actions": actions, "memory": (torch.ones(rows, 2, 2), {"a": torch.arange(rows)})}
