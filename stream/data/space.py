"""gymnasium spaces as trees of arrays: items, rows, one-hot vectors and flat vectors of a space."""

import math
from collections.abc import Iterator
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from numpy.typing import DTypeLike, NDArray

from rollflow.stream.data.errors import ColumnError
from rollflow.stream.data.tree import Tree, map_tree

_NUMERIC = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)
_EXPECTED = "expected Box, Discrete, MultiDiscrete, MultiBinary, or a Dict or Tuple of those"


def is_columnar(space: gym.Space[Any]) -> bool:
    """True if items of the space have numeric arrays of fixed shape at their leaves."""
    return next(_parts_without_columns(space, ""), None) is None


def check_columnar(space: gym.Space[Any], name: str = "space") -> None:
    """Raise ColumnError, with the part's keys, for a space that has a part without columns."""
    for path, part in _parts_without_columns(space, ""):
        where = f"{part}" if not path else f"at {path} is {part}, which"
        raise ColumnError(f"{name} {where} has no columns; {_EXPECTED}")


def _parts_without_columns(space: gym.Space[Any], path: str) -> Iterator[tuple[str, gym.Space[Any]]]:
    """The path and the space of every leaf whose items are no numbers of a fixed shape."""
    if isinstance(space, spaces.Dict):
        for key, part in space.items():
            yield from _parts_without_columns(part, f"{path}[{key!r}]")
    elif isinstance(space, spaces.Tuple):
        for place, part in enumerate(space):
            yield from _parts_without_columns(part, f"{path}[{place}]")
    elif not isinstance(space, _NUMERIC):
        yield path, space


def item_of(space: gym.Space[Any], value: float = 0) -> Tree:
    """One item, a tree of arrays `dtype[...]` full of `value`, in the dtypes and shapes of the space.

    Raises ColumnError for a space whose items are no numbers of a fixed shape.
    """
    check_columnar(space)
    return _item(space, value)


def _item(space: gym.Space[Any], value: float) -> Tree:
    if isinstance(space, spaces.Dict):
        return {key: _item(part, value) for key, part in space.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(_item(part, value) for part in space)
    return np.full(space.shape or (), value, space.dtype)[()]


def row_of(space: gym.Space[Any], slots: int) -> Tree:
    """A tree of zeros `dtype[slots, ...]`, one item for each slot. Raises ColumnError as `item_of` does."""
    return map_tree(lambda leaf: np.zeros((slots, *leaf.shape), leaf.dtype), item_of(space))


def one_hot(
    x: Any, depth: int = 0, on_value: float = 1.0, off_value: float = 0.0, dtype: DTypeLike = np.float32
) -> NDArray[Any]:
    """Whole numbers `int[...]` as vectors `dtype[..., depth]` with `on_value` in one place.

        x         an int, an array, a tensor or a list
        depth     length of the vectors; 0: as long as the largest number needs

    Raises ValueError for numbers that are not whole, or outside 0 … depth - 1.
    """
    numbers = np.asarray(x)
    if numbers.dtype.kind not in "iub" and numbers.size:
        raise ValueError(f"one_hot of {numbers.dtype}{list(numbers.shape)}, expected whole numbers")
    least, most = int(numbers.min(initial=0)), int(numbers.max(initial=-1))
    depth = depth or most + 1
    if least < 0 or most >= depth:
        raise ValueError(f"one_hot of numbers from {least} to {most}, expected 0 … {depth - 1}")
    vectors: NDArray[Any] = np.where(numbers[..., None] == np.arange(depth), on_value, off_value).astype(dtype)
    return vectors


def one_hot_items(space: gym.Space[Any], items: Tree) -> Tree:
    """Items of a space with Discrete and MultiDiscrete leaves as one-hot vectors `f32[..., n]`.

    `items` is one item, or a tree of arrays `any[..., ...]` with leading axes. A MultiDiscrete's vectors are joined end
    to end. Other leaves are unchanged.
    """
    if isinstance(space, spaces.Dict):
        return {key: one_hot_items(part, items[key]) for key, part in space.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(one_hot_items(part, item) for part, item in zip(space, items, strict=True))
    if isinstance(space, spaces.Discrete):
        return _vectors(np.asarray(items) - space.start, int(space.n))
    if isinstance(space, spaces.MultiDiscrete):
        numbers = np.asarray(items) - space.start
        flat = _raveled(numbers, space)
        sizes = space.nvec.reshape(-1).tolist()
        return np.concatenate([_vectors(flat[..., i], n) for i, n in enumerate(sizes)], axis=-1)
    return items


def _vectors(numbers: NDArray[Any], n: int) -> NDArray[np.float32]:
    vectors: NDArray[np.float32] = (numbers[..., None] == np.arange(n)).astype(np.float32)
    return vectors


def flat_size(space: gym.Space[Any]) -> int:
    """Length of the vector that `flatten` makes of one item. Raises ColumnError as `item_of` does."""
    return int(flatten(space, item_of(space)).shape[-1])


def flatten(space: gym.Space[Any], items: Tree) -> NDArray[np.float32]:
    """Items as vectors `f32[..., D]`: a Dict's parts by sorted key, a Tuple's in order, end to end.

    `items` is one item, or a tree of arrays with leading axes. Discrete and MultiDiscrete parts become one-hot vectors,
    all others are raveled. Raises ColumnError for a Dict or Tuple without parts.
    """
    if isinstance(space, spaces.Dict | spaces.Tuple) and not len(space):
        raise ColumnError(f"space {space} has no parts, expected at least one")
    if isinstance(space, spaces.Dict):
        return np.concatenate([flatten(space[key], items[key]) for key in sorted(space.keys())], axis=-1)
    if isinstance(space, spaces.Tuple):
        return np.concatenate([flatten(part, item) for part, item in zip(space, items, strict=True)], axis=-1)
    if isinstance(space, spaces.Discrete | spaces.MultiDiscrete):
        vectors: NDArray[np.float32] = one_hot_items(space, items)
        return vectors
    return _raveled(np.asarray(items, np.float32), space)


def _raveled(items: NDArray[Any], space: gym.Space[Any]) -> NDArray[Any]:
    """Items `any[..., *shape]` as vectors `any[..., D]`, also where there are no items."""
    shape = space.shape or ()
    return items.reshape(*items.shape[: items.ndim - len(shape)], math.prod(shape))
