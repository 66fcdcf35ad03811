"""Action masks in observations: which actions are ruled out."""

from typing import Any

import gymnasium as gym
import torch
from gymnasium import spaces

from rollflow.stream.errors import ModuleError
from rollflow.stream.tree import Tree

ACTION_MASK = "action_mask"


def without_mask(observation_space: gym.Space[Any], action_space: gym.Space[Any]) -> gym.Space[Any] | None:
    """What is left of a Dict space of observations beside `action_mask`; None where that rules out nothing.

    It does for Discrete actions, where there is something beside it. Raises ModuleError for a mask that does not have
    a number for each action.
    """
    if not isinstance(observation_space, spaces.Dict) or not isinstance(action_space, spaces.Discrete):
        return None
    if ACTION_MASK not in observation_space.spaces or len(observation_space.spaces) == 1:
        return None
    mask = observation_space[ACTION_MASK]
    if mask.shape != (action_space.n,):
        raise ModuleError(
            f"observation_space has '{ACTION_MASK}' in {mask}, expected shape ({action_space.n},): a number for each "
            f"action of {action_space}, 0 where it is ruled out"
        )
    return spaces.Dict({key: space for key, space in observation_space.items() if key != ACTION_MASK})


def ruled_out(logits: torch.Tensor, observations: Tree) -> torch.Tensor:
    """Logits f32[..., n], those of actions whose mask is 0 lowered as far as a float goes, so that sums stay finite."""
    return logits.masked_fill(observations[ACTION_MASK] == 0, torch.finfo(logits.dtype).min)
