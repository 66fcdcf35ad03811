"""Spaces as plain descriptions for JSON, and back."""

import math
from collections.abc import Mapping
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from rollflow.stream.data.errors import PolicyError, refused

MOST_NUMBERS = 1 << 24  # in an item of one space

_FIELDS = {
    "Box": ("low", "high", "shape", "dtype"),
    "Discrete": ("n", "start", "dtype"),
    "MultiDiscrete": ("nvec", "start", "shape", "dtype"),
    "MultiBinary": ("n",),
    "Dict": ("spaces",),
    "Tuple": ("spaces",),
}


def described(space: gym.Space[Any]) -> dict[str, Any]:
    """A space as a dict of JSON's types. Raises PolicyError for a space that has no description.

    One of a subclass is described as its base.
    """
    kind = next((name for name in _FIELDS if isinstance(space, getattr(spaces, name))), None)
    if kind is None:
        raise PolicyError(f"space {space} can't be saved, expected {', '.join(_FIELDS)}")
    if isinstance(space, spaces.Dict):
        return {"type": kind, "spaces": [[key, described(part)] for key, part in space.items()]}
    if isinstance(space, spaces.Tuple):
        return {"type": kind, "spaces": [described(part) for part in space]}
    return {"type": kind, **{name: _plain(getattr(space, name)) for name in _FIELDS[kind]}}


def space_of(description: Any, where: str) -> gym.Space[Any]:
    """The space of a description. Raises PolicyError, with the place `where`, for what describes none."""
    kind = description.get("type") if isinstance(description, Mapping) else None
    if kind not in _FIELDS:
        raise PolicyError(f"{where}: type is {kind!r}, expected a space of type {', '.join(_FIELDS)}")
    expected = {"type", *_FIELDS[kind]}
    if description.keys() != expected:
        raise PolicyError(f"{where}: a {kind} with {sorted(description)}, expected {sorted(expected)}")
    with refused(f"{where}: no {kind} can be made of this description"):
        space = _made(kind, description, where)
    return space


def _made(kind: str, fields: Mapping[str, Any], where: str) -> gym.Space[Any]:
    if kind == "Dict":
        return spaces.Dict({key: space_of(part, f"{where}[{key!r}]") for key, part in fields["spaces"]})
    if kind == "Tuple":
        return spaces.Tuple([space_of(part, f"{where}[{place}]") for place, part in enumerate(fields["spaces"])])
    if kind == "MultiBinary":
        size = fields["n"]
        shape = _shape(size if isinstance(size, list) else [size], where)
        return spaces.MultiBinary(list(shape) if isinstance(size, list) else size)
    shape = _shape(fields.get("shape", []), where)
    dtype = np.dtype(fields["dtype"])
    if dtype.kind not in "biuf":
        raise PolicyError(f"{where}: dtype is {fields['dtype']!r}, expected one of numbers")
    if kind == "Discrete":
        return spaces.Discrete(fields["n"], start=fields["start"], dtype=dtype.type)
    one, other = (_array(fields[name], shape, dtype) for name in _FIELDS[kind][:2])
    if kind == "MultiDiscrete":
        return spaces.MultiDiscrete(one, dtype=dtype.type, start=other)
    return spaces.Box(one, other, shape, dtype.type)


def _shape(shape: Any, where: str) -> tuple[int, ...]:
    if not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape):
        raise PolicyError(f"{where}: shape is {shape!r}, expected a list of whole numbers")
    if math.prod(shape) > MOST_NUMBERS:
        raise PolicyError(f"{where}: shape {shape} has {math.prod(shape)} numbers, expected at most {MOST_NUMBERS}")
    return tuple(shape)


def _plain(field: Any) -> Any:
    """A space's field as JSON has it; of an array one number if all are the same, else all in a flat list."""
    if isinstance(field, np.dtype):
        return str(field)
    if not isinstance(field, np.ndarray):
        return list(field) if isinstance(field, tuple) else int(field)
    numbers = field.reshape(-1).tolist()
    if numbers and numbers.count(numbers[0]) == len(numbers):
        numbers = numbers[:1]
    texts = [str(each) if isinstance(each, float) and not math.isfinite(each) else each for each in numbers]
    return texts[0] if len(texts) == 1 else texts


def _array(numbers: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    flat = numbers if isinstance(numbers, list) else [numbers]
    values = np.array([float(each) if isinstance(each, str) else each for each in flat], dtype)
    return np.full(shape, values[0], dtype) if not isinstance(numbers, list) else values.reshape(shape)
