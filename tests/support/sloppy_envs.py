"""Environments whose observations are not what their spaces say."""

from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces

from rollflow import RLModule
from rollflow.nodes import MultiAgentEnv

SPACE = spaces.Dict({"near": spaces.Box(-1, 1, (3,), np.float32), "door": spaces.Discrete(2)})


class Zeros(RLModule):
    """Always acts by 0."""

    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        return {"actions": torch.zeros(len(batch["obs"]["door"]), dtype=torch.int64)}


def observation(step: int, late: bool) -> dict[str, Any]:
    """In float64; after a step, and if `late` after three, a number is too great."""
    near = np.zeros(3)
    if step >= (3 if late else 1):
        near[1] = 7.0
    return {"near": near, "door": 1}


class Sloppy(gym.Env[Any, Any]):
    """Episodes of five steps.

    faulty    whether it gives what is outside the space; else all is as it should be
    """

    observation_space = SPACE
    action_space = spaces.Discrete(2)

    def __init__(self, faulty: bool = True, *, late: bool = False) -> None:
        self.faulty, self.late = faulty, late

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.t = 0
        return self._seen(), {}

    def step(self, action: Any) -> Any:
        self.t += 1
        return self._seen(), 1.0, self.t == 5, False, {}

    def _seen(self) -> Any:
        return observation(self.t, self.late) if self.faulty else {"near": np.zeros(3, np.float32), "door": 1}


class SloppyAgents(MultiAgentEnv):
    """Two agents, of whom the second gives what is outside its space. Episodes of five steps."""

    possible_agents = ("a", "b")
    observation_spaces = dict.fromkeys(possible_agents, SPACE)
    action_spaces = dict.fromkeys(possible_agents, spaces.Discrete(2))

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.t = 0
        return self._seen(), {}

    def step(self, actions: Any) -> Any:
        self.t += 1
        return self._seen(), dict.fromkeys("ab", 1.0), {"__all__": self.t == 5}, {"__all__": False}, {}

    def _seen(self) -> Any:
        return {"a": {"near": np.zeros(3, np.float32), "door": 1}, "b": observation(self.t, False)}
