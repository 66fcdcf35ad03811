"""Spaces that a host describes, made again, and the arrays of a message held against them."""

import math
from collections.abc import Mapping
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from rollflow.stream.errors import ColumnError, WireError
from rollflow.stream.space_codec import space_of
from rollflow.stream.tree import Tree
from rollflow.stream.wire.field import shown
from rollflow.stream.wire.value import DTYPES

_INTS = ("|i1", "<i2", "<i4", "<i8", "|u1", "<u2", "<u4", "<u8")
_NUMBERS = (*_INTS, "|b1", "<f2", "<f4", "<f8")
_MOST_ITEM = 64 << 20  # bytes of one item, and as many of a space's limits
_SPACE = 1 << 10  # bytes, about, of a space itself
_MOST_DIMENSIONS = 16


def read_space(told: Any, where: str) -> gym.Space[Any]:
    """The space that `describe_space` described. Raises WireError where it is no such description."""
    _check(told, where)
    try:
        return space_of(told)
    except (ColumnError, AssertionError, TypeError, ValueError, OverflowError) as error:
        raise WireError(f"{where}: no space: {error}", "spaces") from error


def placed(tree: Tree, space: gym.Space[Any], count: int, where: str, code: str = "rows") -> Tree:
    """The items of a space, with tuples where it has them, from a tree that may have lists.

    Raises WireError where a leaf is not `any[count, ...]` in the leaf's dtype and shape, or the tree has other parts.
    """
    if isinstance(space, spaces.Dict):
        if not isinstance(tree, dict) or tree.keys() != space.spaces.keys():
            got = shown(sorted(tree) if isinstance(tree, dict) else tree)
            raise WireError(f"{where} is {got}, expected a map of {', '.join(map(repr, space))}", code)
        return {key: placed(tree[key], part, count, f"{where}[{key!r}]", code) for key, part in space.items()}
    if isinstance(space, spaces.Tuple):
        if not isinstance(tree, list | tuple) or len(tree) != len(space.spaces):
            raise WireError(f"{where} is {shown(tree)}, expected a list of {len(space.spaces)} parts", code)
        parts = zip(tree, space, strict=True)
        return tuple(placed(part, each, count, f"{where}[{i}]", code) for i, (part, each) in enumerate(parts))
    shape = (count, *(space.shape or ()))
    if not isinstance(tree, np.ndarray) or tree.dtype != space.dtype or tree.shape != shape:
        expected = f"an array {np.dtype(space.dtype).newbyteorder('<').str}{list(shape)}"
        raise WireError(f"{where} is {shown(tree)}, expected {expected}", code)
    return tree


def _check(told: Any, where: str) -> int:
    """How many bytes the space will take, about.

    Raises WireError for what `space_of` must not be given from outside: it trusts what it gets.
    """
    kind = told.get("kind") if isinstance(told, Mapping) else None
    if not isinstance(kind, str) or kind not in _CHECKS:
        raise _wrong(where, told, f"a space: one of {', '.join(_CHECKS)}")
    assert isinstance(told, Mapping)
    missing = [name for name in _FIELDS[kind] if name not in told]
    if missing:
        raise _wrong(where, told, f"{', '.join(_FIELDS[kind])} of a {kind}")
    return _SPACE + _CHECKS[kind](told, where)


def _dict(told: Mapping[str, Any], where: str) -> int:
    keys, size = set(), 0
    for part in _list(told["parts"], f"{where}.parts"):
        if type(part) is not list or len(part) != 2 or type(part[0]) is not str or part[0] in keys:
            raise _wrong(f"{where}.parts", part, "[key, space], each key once")
        keys.add(part[0])
        size = _sum(size, _check(part[1], f"{where}[{part[0]!r}]"), where)
    return size


def _tuple(told: Mapping[str, Any], where: str) -> int:
    size = 0
    for index, part in enumerate(_list(told["parts"], f"{where}.parts")):
        size = _sum(size, _check(part, f"{where}[{index}]"), where)
    return size


def _sum(size: int, more: int, where: str) -> int:
    if size + more > _MOST_ITEM:
        raise WireError(f"{where} takes more than {_MOST_ITEM} bytes, expected less", "spaces")
    return size + more


def _box(told: Mapping[str, Any], where: str) -> int:
    low, high = (_array(told[name], f"{where}.{name}", _NUMBERS) for name in ("low", "high"))
    if low != high:
        raise _wrong(f"{where}.high", told["high"][:2], "the dtype and shape of low")
    return _bytes(low)


def _discrete(told: Mapping[str, Any], where: str) -> int:
    limits = _dtype(told["dtype"], f"{where}.dtype", _INTS)
    n, start = told["n"], told["start"]
    if type(n) is not int or type(start) is not int or n < 1:
        raise _wrong(where, [n, start], "whole numbers n > 0 and start")
    most = np.iinfo(limits)
    if not most.min <= start <= start + n - 1 <= most.max:
        raise _wrong(where, [n, start], f"start and start + n - 1 from {most.min} to {most.max}")
    return 0


def _multi_discrete(told: Mapping[str, Any], where: str) -> int:
    nvec, start = (_array(told[name], f"{where}.{name}", _INTS) for name in ("nvec", "start"))
    if nvec != start:
        raise _wrong(f"{where}.start", told["start"][:2], "the dtype and shape of nvec")
    return _bytes(nvec)


def _multi_binary(told: Mapping[str, Any], where: str) -> int:
    size = told["shape"]
    shape = _shape([size] if type(size) is int else size, f"{where}.shape", 1)
    if not shape or 0 in shape:
        raise _wrong(f"{where}.shape", told["shape"], "a list of numbers of 1 or more")
    return math.prod(shape)


_CHECKS = {
    "Dict": _dict,
    "Tuple": _tuple,
    "Box": _box,
    "Discrete": _discrete,
    "MultiDiscrete": _multi_discrete,
    "MultiBinary": _multi_binary,
}
_FIELDS = {
    "Dict": ("parts",),
    "Tuple": ("parts",),
    "Box": ("low", "high"),
    "Discrete": ("n", "start", "dtype"),
    "MultiDiscrete": ("nvec", "start"),
    "MultiBinary": ("shape",),
}


def _array(told: Any, where: str, dtypes: tuple[str, ...]) -> tuple[str, list[int]]:
    """The dtype and the shape of what is [dtype, shape, bytes]."""
    if type(told) is not list or len(told) != 3 or type(told[2]) is not bytes:
        raise _wrong(where, told, "[dtype, shape, bytes]")
    size = _dtype(told[0], where, dtypes).itemsize
    shape = _shape(told[1], where, size)
    if len(told[2]) not in (size, size * math.prod(shape)):
        raise _wrong(where, told, f"{size} bytes, where all numbers are the same, or {size * math.prod(shape)}")
    if told[0] == "|b1" and any(byte > 1 for byte in told[2]):
        raise _wrong(where, told, "bytes of 0 or 1")
    return told[0], shape


def _bytes(array: tuple[str, list[int]]) -> int:
    dtype, shape = array
    return DTYPES[dtype].itemsize * math.prod(shape)


def _dtype(told: Any, where: str, dtypes: tuple[str, ...]) -> np.dtype[Any]:
    if type(told) is not str or told not in dtypes:
        raise _wrong(where, told, f"a dtype, one of {', '.join(dtypes)}")
    return DTYPES[told]


def _shape(told: Any, where: str, size: int) -> list[int]:
    shape = _list(told, where)
    if len(shape) > _MOST_DIMENSIONS or any(type(each) is not int or each < 0 for each in shape):
        raise _wrong(where, told, f"a shape: at most {_MOST_DIMENSIONS} numbers of 0 or more")
    if math.prod(each or 1 for each in shape) * size > _MOST_ITEM:
        raise _wrong(where, told, f"a shape of at most {_MOST_ITEM} bytes")
    return shape


def _list(told: Any, where: str) -> list[Any]:
    if type(told) is not list:
        raise _wrong(where, told, "a list")
    return told


def _wrong(where: str, told: Any, expected: str) -> WireError:
    return WireError(f"{where} is {shown(told)}, expected {expected}", "spaces")
