"""Environments whose observations are not what their spaces say."""

from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from small_env import SmallEnv
from together import Together

from rollflow import RLModule, Rollout
from rollflow.stream.data.tree import leaves_of

SPACE = spaces.Dict({"near": spaces.Box(-1, 1, (3,), np.float32), "door": spaces.Discrete(2)})


class Zeros(RLModule):
    """Always acts by 0."""

    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        return {"actions": torch.zeros(len(leaves_of(batch["obs"])[0]), dtype=torch.int64)}


def fragments_of(env: Any, *, kind: Any = Rollout, **options: Any) -> list[Any]:
    """The fragments of a rollout that acts by 0: three of four rows, unless the options say otherwise."""
    settings = {"module": Zeros(), "fragment_length": 4, "num_fragments": 3, "seed": 0, **options}
    with kind(env, **settings) as rollout:
        return list(rollout.fragments())


def observation(step: int, late: bool) -> dict[str, Any]:
    """In float64; after a step, and if `late` after three, a number is too great."""
    near = np.zeros(3)
    if step >= (3 if late else 1):
        near[1] = 7.0
    return {"near": near, "door": 1}


class Sloppy(SmallEnv):
    """Episodes of five steps.

    faulty    whether it gives what is outside the space; else all is as it should be
    """

    observation_space = SPACE
    length = 5

    def __init__(self, faulty: bool = True, *, late: bool = False) -> None:
        self.faulty, self.late = faulty, late

    def look(self) -> Any:
        return observation(self.t, self.late) if self.faulty else {"near": np.zeros(3, np.float32), "door": 1}


def sloppy_agents() -> Together:
    """Two agents, of whom the second gives what is outside its space."""
    return Together({"a": Sloppy(False), "b": Sloppy()})
