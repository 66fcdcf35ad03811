"""Spaces as plain descriptions for JSON, and back."""

import math
from collections.abc import Mapping
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from rollflow.stream.data.errors import PolicyError

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
    """A space as a dict of JSON's types. Raises PolicyError for a space that has no description."""
    kind = type(space).__name__
    if isinstance(space, spaces.Box):
        bounds = {"low": _numbers(space.low), "high": _numbers(space.high)}
        return {"type": kind, **bounds, "shape": list(space.shape), "dtype": str(space.dtype)}
    if isinstance(space, spaces.Discrete):
        return {"type": kind, "n": int(space.n), "start": int(space.start), "dtype": str(space.dtype)}
    if isinstance(space, spaces.MultiDiscrete):
        numbers = {"nvec": _numbers(space.nvec), "start": _numbers(space.start)}
        return {"type": kind, **numbers, "shape": list(space.shape), "dtype": str(space.dtype)}
    if isinstance(space, spaces.MultiBinary):
        return {"type": kind, "n": space.n if isinstance(space.n, int) else list(space.shape)}
    if isinstance(space, spaces.Dict):
        return {"type": kind, "spaces": [[key, described(part)] for key, part in space.items()]}
    if isinstance(space, spaces.Tuple):
        return {"type": kind, "spaces": [described(part) for part in space]}
    raise PolicyError(f"space {space} can't be saved, expected {', '.join(_FIELDS)}")


def space_of(description: Any, where: str) -> gym.Space[Any]:
    """The space of a description. Raises PolicyError, with the place `where`, for what describes none."""
    kind = description.get("type") if isinstance(description, Mapping) else None
    if kind not in _FIELDS:
        raise PolicyError(f"{where}: type is {kind!r}, expected a space of type {', '.join(_FIELDS)}")
    expected = {"type", *_FIELDS[kind]}
    if description.keys() != expected:
        raise PolicyError(f"{where}: a {kind} with {sorted(description)}, expected {sorted(expected)}")
    try:
        return _made(kind, description, where)
    except PolicyError:
        raise
    except Exception as error:  # gymnasium raises assertions and more
        raise PolicyError(f"{where}: no {kind} can be made of this description: {error}") from None


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
    if kind == "MultiDiscrete":
        nvec, start = (_array(fields[name], shape, dtype) for name in ("nvec", "start"))
        return spaces.MultiDiscrete(nvec, dtype=dtype.type, start=start)
    low, high = (_array(fields[name], shape, dtype) for name in ("low", "high"))
    return spaces.Box(low, high, shape, dtype.type)


def _shape(shape: Any, where: str) -> tuple[int, ...]:
    if not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape):
        raise PolicyError(f"{where}: shape is {shape!r}, expected a list of whole numbers")
    if math.prod(shape) > MOST_NUMBERS:
        raise PolicyError(f"{where}: shape {shape} has {math.prod(shape)} numbers, expected at most {MOST_NUMBERS}")
    return tuple(shape)


def _numbers(array: NDArray[Any]) -> Any:
    """One number where all are the same, else all of them in a flat list."""
    flat = np.asarray(array).reshape(-1)
    if flat.size and (flat == flat[0]).all():
        return _number(flat[0].item())
    return [_number(each) for each in flat.tolist()]


def _number(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _array(numbers: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    flat = numbers if isinstance(numbers, list) else [numbers]
    values = np.array([float(each) if isinstance(each, str) else each for each in flat], dtype)
    return np.full(shape, values[0], dtype) if not isinstance(numbers, list) else values.reshape(shape)
