"""Spaces from a host's descriptions, which are checked first, and arrays of messages checked against spaces."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from rollflow.stream.data.errors import ColumnError, WireError
from rollflow.stream.data.space import space_of
from rollflow.stream.data.tree import Tree
from rollflow.stream.wire.codec.field import shown
from rollflow.stream.wire.codec.value import DTYPES

_INTS = ("|i1", "<i2", "<i4", "<i8", "|u1", "<u2", "<u4", "<u8")
_NUMBERS = (*_INTS, "|b1", "<f2", "<f4", "<f8")
_MOST_ITEM = 64 << 20  # bytes of one item, and of a space's limits
_SPACE = 1 << 10  # bytes of a space itself, about
_MOST_DIMENSIONS = 16


def read_space(described: Any, where: str) -> gym.Space[Any]:
    """The space of a description by `describe_space`. Raises WireError for an invalid description."""
    _check(described, where)
    try:
        return space_of(described)
    except (ColumnError, AssertionError, TypeError, ValueError, OverflowError) as error:
        raise WireError(f"{where}: no space: {error}", "spaces") from error


def placed(tree: Tree, space: gym.Space[Any], count: int, where: str, code: str = "rows") -> Tree:
    """`count` items of a space, a tree of arrays `any[count, ...]`, with lists replaced by the space's tuples.

    Raises WireError if an array has another dtype or shape than the space, or the tree has other parts.
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


def _check(described: Any, where: str) -> int:
    """Check a description, which `space_of` trusts; return the bytes that the space will take, about.

    Raises WireError for an invalid description.
    """
    kind = described.get("kind") if isinstance(described, Mapping) else None
    if not isinstance(kind, str) or kind not in _CHECKS:
        raise _wrong(where, described, f"a space: one of {', '.join(_CHECKS)}")
    assert isinstance(described, Mapping)
    check, fields = _CHECKS[kind]
    if not described.keys() >= set(fields):
        raise _wrong(where, described, f"{', '.join(fields)} of a {kind}")
    return _SPACE + check(described, where)


def _parts(described: Mapping[str, Any], where: str) -> int:
    """The bytes of the parts of a Dict, [key, space] each, or of a Tuple."""
    keys, size = set(), 0
    for index, part in enumerate(_list(described["parts"], f"{where}.parts")):
        place: Any = index
        if described["kind"] == "Dict":
            if type(part) is not list or len(part) != 2 or type(part[0]) is not str or part[0] in keys:
                raise _wrong(f"{where}.parts", part, "[key, space], each key once")
            place, part = part
            keys.add(place)
        size += _check(part, f"{where}[{place!r}]")
        if size > _MOST_ITEM:
            raise WireError(f"{where} takes more than {_MOST_ITEM} bytes, expected less", "spaces")
    return size


def _alike(one: str, other: str, dtypes: tuple[str, ...]) -> Callable[[Mapping[str, Any], str], int]:
    """Check of two arrays of one dtype and shape."""

    def check(described: Mapping[str, Any], where: str) -> int:
        array, beside = (_array(described[name], f"{where}.{name}", dtypes) for name in (one, other))
        if array != beside:
            raise _wrong(f"{where}.{other}", described[other][:2], f"the dtype and shape of {one}")
        dtype, shape = array
        return DTYPES[dtype].itemsize * math.prod(shape)

    return check


def _discrete(described: Mapping[str, Any], where: str) -> int:
    limits = _dtype(described["dtype"], f"{where}.dtype", _INTS)
    n, start = described["n"], described["start"]
    if type(n) is not int or type(start) is not int or n < 1:
        raise _wrong(where, [n, start], "whole numbers n > 0 and start")
    most = np.iinfo(limits)
    if not most.min <= start <= start + n - 1 <= most.max:
        raise _wrong(where, [n, start], f"start and start + n - 1 from {most.min} to {most.max}")
    return 0


def _multi_binary(described: Mapping[str, Any], where: str) -> int:
    size = described["shape"]
    shape = _shape([size] if type(size) is int else size, f"{where}.shape", 1)
    if not shape or 0 in shape:
        raise _wrong(f"{where}.shape", described["shape"], "a list of numbers of 1 or more")
    return math.prod(shape)


# Kind of space -> its check, and the fields that it looks at.
_CHECKS: dict[str, tuple[Callable[[Mapping[str, Any], str], int], tuple[str, ...]]] = {
    "Dict": (_parts, ("parts",)),
    "Tuple": (_parts, ("parts",)),
    "Box": (_alike("low", "high", _NUMBERS), ("low", "high")),
    "Discrete": (_discrete, ("n", "start", "dtype")),
    "MultiDiscrete": (_alike("nvec", "start", _INTS), ("nvec", "start")),
    "MultiBinary": (_multi_binary, ("shape",)),
}


def _array(described: Any, where: str, dtypes: tuple[str, ...]) -> tuple[str, list[int]]:
    """The dtype and shape in a description [dtype, shape, bytes]."""
    if type(described) is not list or len(described) != 3 or type(described[2]) is not bytes:
        raise _wrong(where, described, "[dtype, shape, bytes]")
    size = _dtype(described[0], where, dtypes).itemsize
    shape = _shape(described[1], where, size)
    if len(described[2]) not in (size, size * math.prod(shape)):
        raise _wrong(where, described, f"{size} bytes, where all numbers are the same, or {size * math.prod(shape)}")
    if described[0] == "|b1" and any(byte > 1 for byte in described[2]):
        raise _wrong(where, described, "bytes of 0 or 1")
    return described[0], shape


def _dtype(described: Any, where: str, dtypes: tuple[str, ...]) -> np.dtype[Any]:
    if type(described) is not str or described not in dtypes:
        raise _wrong(where, described, f"a dtype, one of {', '.join(dtypes)}")
    return DTYPES[described]


def _shape(described: Any, where: str, size: int) -> list[int]:
    shape = _list(described, where)
    if len(shape) > _MOST_DIMENSIONS or any(type(each) is not int or each < 0 for each in shape):
        raise _wrong(where, described, f"a shape: at most {_MOST_DIMENSIONS} numbers of 0 or more")
    if math.prod(each or 1 for each in shape) * size > _MOST_ITEM:
        raise _wrong(where, described, f"a shape of at most {_MOST_ITEM} bytes")
    return shape


def _list(described: Any, where: str) -> list[Any]:
    if type(described) is not list:
        raise _wrong(where, described, "a list")
    return described


def _wrong(where: str, described: Any, expected: str) -> WireError:
    return WireError(f"{where} is {shown(described)}, expected {expected}", "spaces")
