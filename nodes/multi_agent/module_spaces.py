"""Whether a module's actions are those that its agents' environments take."""

from typing import Any

import gymnasium as gym
import numpy as np

from rollflow.stream.errors import ModuleError


def check_actions(module: Any, expected: gym.Space[Any], agent: Any) -> None:
    """Raise ModuleError where a module chooses actions that are none in the space `expected`, that of an agent's."""
    given = module.action_space
    if not are_alike(given, expected):
        raise ModuleError(
            f"'{type(module).__name__}' was made for actions in {given}, but those of agent {agent!r} are in {expected}"
        )


def are_alike(one: Any, other: Any) -> bool:
    """Whether actions of the one space are actions of the other, but for the bounds and the dtype of Boxes."""
    if type(one) is not type(other) or one.shape != other.shape:
        return False
    if isinstance(one, gym.spaces.Discrete):
        return bool(one.n == other.n and one.start == other.start)
    if isinstance(one, gym.spaces.MultiDiscrete):
        return np.array_equal(one.nvec, other.nvec) and np.array_equal(one.start, other.start)
    if isinstance(one, gym.spaces.Dict):
        return one.keys() == other.keys() and all(are_alike(one[key], other[key]) for key in one.keys())
    if isinstance(one, gym.spaces.Tuple):
        return len(one) == len(other) and all(map(are_alike, one, other))
    return True
