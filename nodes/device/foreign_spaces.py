"""Spaces of gymnax and gym in gymnasium's form."""

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from rollflow.stream.data.errors import EnvError, shown


def gymnasium_space(space: Any, seen: Any = None) -> gym.Space[Any]:
    """Gymnasium's form of a space. Raises EnvError for one of another kind.

    seen    what lies in it, a tree of what has a dtype, which a Box then has, rather than the one it says; bounds that
            lie beyond that are its least and its greatest number
    """
    kind = type(space).__name__
    if kind == "Discrete":
        return spaces.Discrete(int(space.n))
    if kind == "MultiDiscrete":
        return spaces.MultiDiscrete(np.asarray(space.nvec))
    if kind == "Box":
        dtype = np.dtype(space.dtype if seen is None else seen.dtype)
        if dtype.kind not in "iubf":  # such as bfloat16
            what = "a space's Box" if seen is None else "an observation"
            raise EnvError(f"{what} is {dtype}, expected a dtype that numpy has")
        bounds: list[Any] = [np.asarray(bound) for bound in (space.low, space.high)]
        if dtype.kind in "iub":  # as numbers of Python, since greatest ones of floats are others
            bounds = [np.clip(bound.astype(object), *whole_limits(dtype)) for bound in bounds]
        low, high = (np.broadcast_to(np.asarray(bound, dtype), space.shape) for bound in bounds)
        return spaces.Box(low, high, dtype=dtype.type)
    if kind == "Dict":
        return spaces.Dict({key: gymnasium_space(part, seen and seen[key]) for key, part in space.spaces.items()})
    if kind == "Tuple":
        parts = enumerate(space.spaces)
        return spaces.Tuple([gymnasium_space(part, seen and seen[place]) for place, part in parts])
    raise EnvError(f"a space is {shown(space)}, expected a Discrete, MultiDiscrete, Box, Dict or Tuple")


def whole_limits(dtype: np.dtype[Any]) -> tuple[int, int]:
    """The least and the greatest of the whole numbers, or of False and True, that a dtype has."""
    return (0, 1) if dtype.kind == "b" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
