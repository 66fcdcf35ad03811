"""Spaces of observations and actions: part by part, and agent by agent."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from rollflow.stream.data.errors import ConnectorError, shown
from rollflow.stream.data.space import is_columnar
from rollflow.stream.data.tree import Tree

Space = gym.Space[Any]


def map_space(change: Callable[[Space], Space], space: Space) -> Space:
    """The space with every part of a Dict or Tuple changed, however nested."""
    if isinstance(space, spaces.Dict):
        return spaces.Dict({key: map_space(change, part) for key, part in space.items()})
    if isinstance(space, spaces.Tuple):
        return spaces.Tuple([map_space(change, part) for part in space])
    return change(space)


def tree_of(make: Callable[[Space], Any], space: Space) -> Tree:
    """The tree of what is made of every part of a Dict or Tuple, however nested, in the space's order."""
    if isinstance(space, spaces.Dict):
        return {key: tree_of(make, part) for key, part in space.items()}
    return tuple(tree_of(make, part) for part in space) if isinstance(space, spaces.Tuple) else make(space)


def space_of_agent(space: Any, agent_id: Any) -> Any:
    """An agent's part of a Dict space by agent ids; any other space is the same for all agents."""
    if agent_id is not None and isinstance(space, spaces.Dict) and agent_id in space.spaces:
        return space.spaces[agent_id]
    return space


def check_is_space(space: Any, origin: str) -> None:
    """Raise ConnectorError for anything but a space; `origin` begins the text."""
    if not isinstance(space, gym.Space):
        raise ConnectorError(f"{origin} {shown(space)}, {type(space).__name__}, expected a gymnasium space").see(
            "piece"
        )


def check_has_numbers(space: Any, refusal: str) -> None:
    """Raise ConnectorError, "`refusal` in ...", for a space that is not made of numbers alone."""
    if not is_columnar(space):
        raise ConnectorError(
            f"{refusal} in {space}; expected Box, Discrete, MultiDiscrete, MultiBinary, or a Dict or Tuple of those"
        )


def space_by_agents(observation_space: Space, action_space: Any, made: Callable[[Space, Any, Any], Space]) -> Space:
    """The Dict space, agent id -> `made(observation space, action space, agent id)` of each agent's part.

    Raises ConnectorError for an observation space that is no Dict.
    """
    if not isinstance(observation_space, spaces.Dict):
        raise ConnectorError(
            f"multi_agent=True and an observation space {observation_space}, expected a Dict by agent ids; in a "
            "MultiAgentRollout, whose pieces see each agent by itself, multi_agent is to be left out"
        )
    return spaces.Dict(
        {
            agent_id: made(part, space_of_agent(action_space, agent_id), agent_id)
            for agent_id, part in observation_space.spaces.items()
        }
    )


@dataclass(frozen=True, slots=True, eq=False)
class Leaf:
    """A part of a space that is an array.

    path     "observation", "observation['speed']", …
    keys     of Dicts and places of Tuples that lead to it
    space    Box, Discrete, MultiDiscrete or MultiBinary
    """

    path: str
    keys: tuple[Any, ...]
    space: Space

    @property
    def shape(self) -> tuple[int, ...]:
        return self.space.shape or ()

    @property
    def size(self) -> int:
        """Numbers in one item."""
        return math.prod(self.shape)

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(self.space.dtype)

    @property
    def is_whole(self) -> bool:
        """True if the leaf is of whole numbers."""
        return self.dtype.kind != "f"

    def numbers(self) -> list[str]:
        """The paths of a vector's numbers; a single number has the path of the leaf, an array of more axes none."""
        if not self.shape:
            return [self.path]
        return [f"{self.path}[{place}]" for place in range(self.size)] if len(self.shape) == 1 else []

    def bounds(self) -> NDArray[np.float64]:
        """Lowest and highest value of each number, f64[2, size]."""
        space: Any = self.space
        if isinstance(space, spaces.Box):
            ends = [np.asarray(space.low), np.asarray(space.high)]
        elif isinstance(space, spaces.Discrete):
            ends = [np.array([space.start]), np.array([space.start + space.n - 1])]
        elif isinstance(space, spaces.MultiDiscrete):
            ends = [np.asarray(space.start), np.asarray(space.start + space.nvec - 1)]
        else:
            ends = [np.zeros(self.shape), np.ones(self.shape)]
        return np.stack([end.astype(np.float64).reshape(-1) for end in ends])

    def found(self, items: Tree) -> Any:
        """The leaf in items of the whole space, any[..., *shape]."""
        for key in self.keys:
            items = items[key]
        return items


def leaves_within(space: Any, path: str, keys: tuple[Any, ...] = ()) -> Iterator[Leaf]:
    """The leaves of a space, whose own path is `path`."""
    if isinstance(space, spaces.Dict | spaces.Tuple):
        parts = space.spaces.items() if isinstance(space, spaces.Dict) else enumerate(space.spaces)
        for key, part in parts:
            yield from leaves_within(part, f"{path}[{key!r}]", (*keys, key))
    else:
        yield Leaf(path, keys, space)


def check_fits(left: Any, expected: Any, name: str, connectors: object) -> None:
    """Raise ConnectorError, with a line for each field, if items of a space `left` are none of the space `expected`.

    name          "observation", which a policy takes, or "action", which an environment takes
    connectors    that leave the items
    """
    if problems := list(_misfits(left, expected, name)):
        taker = "policy" if name == "observation" else "environment"
        text = f"{name}s in {left} come out of {connectors}, but the {taker} takes {expected}; expected connectors for"
        raise ConnectorError("\n  ".join([f"{text} these:", *problems]))


def _misfits(left: Space, expected: Space, name: str) -> Iterator[str]:
    given, wanted = ({leaf.path: leaf for leaf in leaves_within(each, name)} for each in (left, expected))
    yield from (f"{path} in {leaf.space} is missing" for path, leaf in wanted.items() if path not in given)
    for path, leaf in given.items():
        own = wanted.get(path)
        if own is None:
            yield f"{path} in {leaf.space} is not taken"
        elif leaf.shape != own.shape:
            yield f"{path} has shape {list(leaf.shape)}, expected shape {list(own.shape)}"
        elif not (np.can_cast(leaf.dtype, own.dtype, "same_kind") or (leaf.is_whole and own.is_whole)):
            yield f"{path} has dtype {leaf.dtype}, expected dtype {own.dtype}"
        elif not any(isinstance(each.space, spaces.Box) for each in (leaf, own)):
            (low, high), (least, most) = leaf.bounds(), own.bounds()
            if (low < least).any() or (high > most).any():
                yield f"{path} is in {leaf.space}, expected {own.space}"
