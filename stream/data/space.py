"""gymnasium spaces as trees of arrays: items, rows, one-hot vectors and flat vectors of a space."""

import math
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from numpy.typing import DTypeLike, NDArray

from rollflow.stream.data.errors import ColumnError
from rollflow.stream.data.ranges import check_range
from rollflow.stream.data.tree import Tree, library_of, map_tree

Space = gym.Space[Any]
Numerics = tuple[Any, Callable[[Any], Any], Callable[..., Any]]
"""Functions over arrays, or over tensors: numpy or torch; what makes numbers f64; and what makes items of a space
without parts of numbers any[..., *shape], given (space, numbers, bounds as `whole_bounds` gives them, or None)."""
_NUMERIC = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)
_EXPECTED = "expected Box, Discrete, MultiDiscrete, MultiBinary, or a Dict or Tuple of those"


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


def map_items(change: Callable[[Space, Any], Any], space: Space, items: Tree) -> Tree:
    """The tree of `change(space, items)` over the leaves of items of a space."""
    if isinstance(space, spaces.Dict):
        return {key: map_items(change, part, items[key]) for key, part in space.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(map_items(change, part, item) for part, item in zip(space, items, strict=True))
    return change(space, items)


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

    def limits(self) -> tuple[Any, Any]:
        """Lowest and highest value of each number, any[...], in the dtype of the space."""
        space: Any = self.space
        if isinstance(space, spaces.Box):
            return space.low, space.high
        if isinstance(space, spaces.Discrete):
            return space.start, space.start + space.n - 1
        if isinstance(space, spaces.MultiDiscrete):
            return space.start, space.start + space.nvec - 1
        return np.zeros(self.shape, self.dtype), np.ones(self.shape, self.dtype)

    def bounds(self) -> NDArray[np.float64]:
        """Lowest and highest value of each number, f64[2, size]."""
        return np.stack([np.asarray(end, np.float64).reshape(-1) for end in self.limits()])

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


def is_columnar(space: Space) -> bool:
    """True if items of the space have numeric arrays of fixed shape at their leaves."""
    return all(isinstance(leaf.space, _NUMERIC) for leaf in leaves_within(space, ""))


def check_columnar(space: Space, name: str = "space") -> None:
    """Raise ColumnError, with the part's keys, for a space that has a part without columns."""
    for leaf in leaves_within(space, ""):
        if not isinstance(leaf.space, _NUMERIC):
            where = f"at {leaf.path} is {leaf.space}, which" if leaf.path else f"{leaf.space}"
            raise ColumnError(f"{name} {where} has no columns; {_EXPECTED}")


def item_of(space: Space, value: float = 0) -> Tree:
    """One item, a tree of arrays `dtype[...]` full of `value`, in the dtypes and shapes of the space.

    Raises ColumnError for a space whose items are no numbers of a fixed shape.
    """
    check_columnar(space)
    return tree_of(lambda leaf: np.full(leaf.shape or (), value, leaf.dtype)[()], space)


def row_of(space: gym.Space[Any], slots: int) -> Tree:
    """A tree of zeros `dtype[slots, ...]`, one item for each slot. Raises ColumnError as `item_of` does."""
    return map_tree(lambda leaf: np.zeros((slots, *leaf.shape), leaf.dtype), item_of(space))


def items_in(space: gym.Space[Any], items: Tree, *, rounds: bool = False) -> Tree:
    """Items of a space in the dtypes of their leaves' spaces.

        items     one item, or a tree of arrays `any[..., ...]` with leading axes
        rounds    True: floats for a Box of whole numbers become the nearest ones in its bounds

    Whole numbers for a narrower Box are clipped to its bounds. The very same object is returned if nothing changes;
    what can't be converted, as items of another structure, stays as it is. Raises ColumnError for numbers that a
    Discrete, MultiDiscrete or MultiBinary leaf's dtype can't hold, and for NaN in the place of whole numbers.
    """
    if isinstance(space, spaces.Dict):
        if not isinstance(items, Mapping) or items.keys() != space.spaces.keys():
            return items
        made = {key: items_in(part, items[key], rounds=rounds) for key, part in space.items()}
        return items if all(made[key] is items[key] for key in made) else made
    if isinstance(space, spaces.Tuple):
        if not isinstance(items, tuple | list) or len(items) != len(space):
            return items
        several = tuple(items_in(part, item, rounds=rounds) for part, item in zip(space, items, strict=True))
        return items if all(map(operator.is_, several, items)) else several
    values, dtype = np.asarray(items), np.dtype(space.dtype)
    if values.dtype == dtype:
        return items
    if isinstance(space, spaces.Box) and dtype.kind in "iub":
        if values.dtype.kind == "f":
            return nearest(space, values) if rounds else items
        return clipped(space, values) if values.dtype.kind in "iub" else items
    if not np.can_cast(values.dtype, dtype, "same_kind"):
        return items
    check_range(values, dtype, str(space))
    return values.astype(dtype)


def whole_bounds(box: spaces.Box) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The largest floats, f64[...], that are no larger than the lower bounds of a Box of whole numbers, and likewise
    the smallest ones for its upper bounds: a float has too few digits for all of 64 bits.
    """
    shape = box.shape
    below = [_rounded(int(low), -math.inf) for low in box.low.reshape(-1)]
    above = [_rounded(int(high), math.inf) for high in box.high.reshape(-1)]
    return np.array(below, np.float64).reshape(shape), np.array(above, np.float64).reshape(shape)


def _rounded(number: int, towards: float) -> float:
    """The float nearest to a whole number in one direction."""
    near = float(number)
    is_beyond = int(near) < number if towards > 0 else int(near) > number
    return math.nextafter(near, towards) if is_beyond else near


def nearest(
    box: spaces.Box, values: Any, bounds: tuple[NDArray[np.float64], NDArray[np.float64]] | None = None
) -> NDArray[Any]:
    """The whole numbers of a Box, dtype[..., ...], that are nearest to floats any[..., ...]; halves go to even ones.

    bounds    as `whole_bounds` gives them; None: they are worked out

    Raises ColumnError for NaN.
    """
    below, above = whole_bounds(box) if bounds is None else bounds
    numbers = np.rint(np.asarray(values, np.float64))
    if np.isnan(numbers).any():
        raise ColumnError(f"got NaN, expected a number for {box}")
    is_low, is_high = numbers <= below, numbers >= above
    made: NDArray[Any] = np.where(is_low | is_high, 0.0, numbers).astype(box.dtype)
    return np.where(is_low, box.low, np.where(is_high, box.high, made))


def _in_type(space: Space, items: Any, bounds: Any = None) -> NDArray[Any]:
    """Numbers any[..., *shape] in the dtype of a space without parts."""
    numbers: NDArray[Any] = np.asarray(items)
    is_whole, are_floats = np.dtype(space.dtype).kind != "f", numbers.dtype.kind == "f"
    if is_whole and isinstance(space, spaces.Box):
        made: NDArray[Any] = nearest(space, numbers, bounds) if are_floats else items_in(space, numbers)
        return made
    return (np.rint(numbers) if is_whole and are_floats else numbers).astype(space.dtype, copy=False)


ARRAYS: Numerics = np, lambda numbers: numbers, _in_type


def clipped(box: spaces.Box, values: NDArray[Any]) -> NDArray[Any]:
    """Whole numbers any[..., ...] clipped to the bounds of a Box of whole numbers, in its dtype."""
    dtype: Any = box.dtype
    if values.dtype.kind == "b" or dtype.kind == "b":
        values = np.clip(values.astype(np.int64), box.low.astype(np.int64), box.high.astype(np.int64))
        return values.astype(dtype)
    ours, theirs = np.iinfo(dtype), np.iinfo(cast("Any", values.dtype))
    values = np.clip(values, max(int(ours.min), int(theirs.min)), min(int(ours.max), int(theirs.max)))
    made: NDArray[Any] = np.clip(values.astype(dtype), box.low, box.high)
    return made


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

        items    one item, or a tree of arrays, or of tensors, `any[..., ...]` with leading axes

    A MultiDiscrete's vectors are joined end to end. Other leaves are unchanged.
    """
    return map_items(_one_hot, space, items)


def _one_hot(space: Space, items: Any) -> Any:
    if not isinstance(space, spaces.Discrete | spaces.MultiDiscrete):
        return items
    xp = library_of(items)
    numbers = xp.asarray(items)
    if isinstance(space, spaces.Discrete):
        return _vectors(numbers, int(space.start), int(space.n))
    flat, ends = _raveled(numbers, space), zip(space.start.reshape(-1), space.nvec.reshape(-1), strict=True)
    return xp.concatenate([_vectors(flat[..., i], int(start), int(n)) for i, (start, n) in enumerate(ends)], -1)


def _vectors(numbers: Any, start: int, n: int) -> Any:
    xp = library_of(numbers)
    there = {} if xp is np else {"device": numbers.device}
    return xp.asarray(numbers[..., None] == xp.arange(start, start + n, **there), dtype=xp.float32)


def flat_size(space: gym.Space[Any]) -> int:
    """Length of the vector that `flatten` makes of one item. Raises ColumnError as `item_of` does."""
    return int(flatten(space, item_of(space)).shape[-1])


def flatten(space: gym.Space[Any], items: Tree) -> Any:
    """Items as vectors `f32[..., D]`: a Dict's parts by sorted key, a Tuple's in order, end to end.

        items    one item, or a tree of arrays, or of tensors, with leading axes

    Discrete and MultiDiscrete parts become one-hot vectors, all others are raveled. Raises ColumnError for a Dict or
    Tuple without parts.
    """
    if isinstance(space, spaces.Dict | spaces.Tuple) and not len(space):
        raise ColumnError(f"space {space} has no parts, expected at least one")
    if isinstance(space, spaces.Dict | spaces.Tuple):
        keys: Any = sorted(space.keys()) if isinstance(space, spaces.Dict) else range(len(space))
        vectors = [flatten(space[key], items[key]) for key in keys]
        return library_of(vectors[0]).concatenate(vectors, -1)
    if isinstance(space, spaces.Discrete | spaces.MultiDiscrete):
        return _one_hot(space, items)
    xp = library_of(items)
    return _raveled(xp.asarray(items, dtype=xp.float32), space)


def _raveled(items: Any, space: gym.Space[Any]) -> Any:
    """Items `any[..., *shape]` as vectors `any[..., D]`, also if there are no items."""
    shape = space.shape or ()
    return items.reshape(*items.shape[: items.ndim - len(shape)], math.prod(shape))


Plain = dict[str, Any]


def describe_space(space: gym.Space[Any]) -> Plain:
    """Describe a space as plain data. Raises ColumnError for a space that has no columns."""
    check_columnar(space)
    return _described(space)


def _described(space: gym.Space[Any]) -> Plain:
    if isinstance(space, spaces.Dict):
        return {"kind": "Dict", "parts": [[key, _described(part)] for key, part in space.items()]}
    if isinstance(space, spaces.Tuple):
        return {"kind": "Tuple", "parts": [_described(part) for part in space]}
    if isinstance(space, spaces.Box):
        return {"kind": "Box", "low": _array(space.low), "high": _array(space.high)}
    if isinstance(space, spaces.Discrete):
        return {"kind": "Discrete", "n": int(space.n), "start": int(space.start), "dtype": space.dtype.str}
    if isinstance(space, spaces.MultiDiscrete):
        return {"kind": "MultiDiscrete", "nvec": _array(space.nvec), "start": _array(space.start)}
    assert isinstance(space, spaces.MultiBinary)
    # MultiBinary(4) is not MultiBinary((4,)) to gymnasium.
    return {"kind": "MultiBinary", "shape": space.n if isinstance(space.n, int) else list(space.shape)}


def space_of(plain: Plain) -> gym.Space[Any]:
    """The space of a description that `describe_space` returned. Raises ColumnError for anything else."""
    try:
        return _made(plain["kind"], plain)
    except (KeyError, TypeError, ValueError) as error:
        raise ColumnError(f"no description of a space: {str(plain)[:200]}: {error!r}") from error


def _made(kind: str, plain: Plain) -> gym.Space[Any]:
    if kind == "Dict":
        return spaces.Dict([(key, space_of(part)) for key, part in plain["parts"]])
    if kind == "Tuple":
        return spaces.Tuple([space_of(part) for part in plain["parts"]])
    if kind == "MultiBinary":
        return spaces.MultiBinary(plain["shape"])
    if kind == "Discrete":
        return _discrete(plain)
    first, second = {"Box": ("low", "high"), "MultiDiscrete": ("nvec", "start")}[kind]
    one, other = _array_of(plain[first]), _array_of(plain[second])
    dtype: Any = one.dtype.type
    return spaces.Box(one, other, dtype=dtype) if kind == "Box" else spaces.MultiDiscrete(one, dtype=dtype, start=other)


def _array(values: NDArray[Any]) -> list[Any]:
    """[dtype, shape, bytes] of an array any[...]; the bytes of one number if all numbers are the same."""
    if values.size and (values == values.flat[0]).all():
        return [values.dtype.str, list(values.shape), values.flat[0].tobytes()]
    return [values.dtype.str, list(values.shape), values.tobytes()]


def _array_of(plain: list[Any]) -> NDArray[Any]:
    dtype, shape, data = np.dtype(plain[0]), tuple(plain[1]), plain[2]
    values = np.frombuffer(data, dtype)
    return np.full(shape, values[0]) if values.size == 1 else values.reshape(shape).copy()


def _discrete(plain: Plain) -> gym.Space[Any]:
    dtype: Any = np.dtype(plain["dtype"]).type
    try:
        return spaces.Discrete(plain["n"], start=plain["start"], dtype=dtype)
    except TypeError:  # gymnasium before 1.3 has one dtype only
        return spaces.Discrete(plain["n"], start=plain["start"])
