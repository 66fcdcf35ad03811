"""gymnasium spaces as trees of columns."""

import math
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from rollflow.stream.errors import ColumnError
from rollflow.stream.tree import Tree, map_tree

_NUMERIC = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)


def is_columnar(space: gym.Space[Any]) -> bool:
    """Whether items of the space have numeric arrays of fixed shape at their leaves."""
    if isinstance(space, spaces.Dict):
        return all(is_columnar(part) for part in space.values())
    if isinstance(space, spaces.Tuple):
        return all(is_columnar(part) for part in space)
    return isinstance(space, _NUMERIC)


def item_of(space: gym.Space[Any], value: float = 0) -> Tree:
    """One item with every leaf full of `value`, in the leaf's dtype and shape.

    Raises ColumnError for a space whose items are no numbers of a fixed shape.
    """
    if isinstance(space, spaces.Dict):
        return {key: item_of(part, value) for key, part in space.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(item_of(part, value) for part in space)
    if not isinstance(space, _NUMERIC):
        raise ColumnError(
            f"space {space} has no columns; expected Box, Discrete, MultiDiscrete, MultiBinary, or a Dict or "
            "Tuple of those"
        )
    return np.full(space.shape or (), value, space.dtype)[()]


def row_of(space: gym.Space[Any], slots: int) -> Tree:
    """A tree of zero arrays `dtype[slots, ...]`: the items of several slots. Raises ColumnError as `item_of`."""
    return map_tree(lambda leaf: np.zeros((slots, *leaf.shape), leaf.dtype), item_of(space))


def one_hot(space: gym.Space[Any], items: Tree) -> Tree:
    """Discrete and MultiDiscrete leaves as one-hot vectors `f32[..., n]`; the others stay.

    `items` is one item, or a tree of arrays with leading axes. A MultiDiscrete's vectors are joined end to end.
    """
    if isinstance(space, spaces.Dict):
        return {key: one_hot(part, items[key]) for key, part in space.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(one_hot(part, item) for part, item in zip(space, items, strict=True))
    if isinstance(space, spaces.Discrete):
        return _vectors(np.asarray(items) - space.start, int(space.n))
    if isinstance(space, spaces.MultiDiscrete):
        numbers = np.asarray(items) - space.start
        flat = _unrolled(numbers, space)
        sizes = space.nvec.reshape(-1).tolist()
        return np.concatenate([_vectors(flat[..., i], n) for i, n in enumerate(sizes)], axis=-1)
    return items


def _vectors(numbers: NDArray[Any], n: int) -> NDArray[np.float32]:
    vectors: NDArray[np.float32] = (numbers[..., None] == np.arange(n)).astype(np.float32)
    return vectors


def flat_size(space: gym.Space[Any]) -> int:
    """How many numbers `flatten` makes of one item. Raises ColumnError as `item_of`."""
    return int(flatten(space, item_of(space)).shape[-1])


def flatten(space: gym.Space[Any], items: Tree) -> NDArray[np.float32]:
    """Items as vectors `f32[..., D]`: a Dict's parts by sorted key, a Tuple's in order, end to end.

    `items` is one item, or a tree of arrays with leading axes. Discrete and MultiDiscrete parts are one-hot vectors,
    all others are unrolled. Raises ColumnError for a Dict or Tuple without parts.
    """
    if isinstance(space, spaces.Dict | spaces.Tuple) and not len(space):
        raise ColumnError(f"space {space} has no parts, expected at least one")
    if isinstance(space, spaces.Dict):
        return np.concatenate([flatten(space[key], items[key]) for key in sorted(space.keys())], axis=-1)
    if isinstance(space, spaces.Tuple):
        return np.concatenate([flatten(part, item) for part, item in zip(space, items, strict=True)], axis=-1)
    if isinstance(space, spaces.Discrete | spaces.MultiDiscrete):
        vectors: NDArray[np.float32] = one_hot(space, items)
        return vectors
    return _unrolled(np.asarray(items, np.float32), space)


def _unrolled(items: NDArray[Any], space: gym.Space[Any]) -> NDArray[Any]:
    """Each item as a vector `any[..., D]`, also where there are none."""
    shape = space.shape or ()
    return items.reshape(*items.shape[: items.ndim - len(shape)], math.prod(shape))
