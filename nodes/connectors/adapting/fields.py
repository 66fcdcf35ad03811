"""Fields of spaces by path: leaves such as `observation['speed']`, and the numbers of vectors, `observation[4]`."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from rollflow.nodes.connectors.spaces import Space
from rollflow.stream.data.tree import Tree


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
    def is_vector(self) -> bool:
        """True if the numbers are fields of their own: the leaf is a vector or a single number."""
        return len(self.shape) <= 1

    def numbers(self) -> list[str]:
        """The paths of a vector's numbers; a single number has the path of the leaf."""
        return [self.number(place) for place in range(self.size)]

    def number(self, place: int) -> str:
        """The path of the number at a place of a vector."""
        return f"{self.path}[{place}]" if self.shape else self.path

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


def leaves_within(space: Space, path: str, keys: tuple[Any, ...] = ()) -> Iterator[Leaf]:
    """The leaves of a space, whose own path is `path`."""
    if isinstance(space, spaces.Dict | spaces.Tuple):
        for key, part in parts_of(space).items():
            yield from leaves_within(part, f"{path}[{key!r}]", (*keys, key))
    else:
        yield Leaf(path, keys, space)


def numbers_within(leaves: Iterable[Leaf]) -> dict[str, tuple[Leaf, int]]:
    """Path of each number of the vectors among some leaves -> its leaf, and its place there."""
    vectors = (leaf for leaf in leaves if leaf.is_vector)
    return {path: (leaf, place) for leaf in vectors for place, path in enumerate(leaf.numbers())}


def parts_of(space: Any) -> dict[Any, Space]:
    """The parts of a Dict by key, or of a Tuple by place."""
    return dict(space.spaces) if isinstance(space, spaces.Dict) else dict(enumerate(space.spaces))
