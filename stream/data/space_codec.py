"""Descriptions of gymnasium spaces for another process or host: numbers, strings, bytes, lists and dicts alone."""

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from rollflow.stream.data.errors import ColumnError
from rollflow.stream.data.space import check_columnar

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
        made: gym.Space[Any] = _MADE[plain["kind"]](plain)
    except (KeyError, TypeError, ValueError) as error:
        raise ColumnError(f"no description of a space: {str(plain)[:200]}: {error!r}") from error
    return made


def _array(values: NDArray[Any]) -> list[Any]:
    """[dtype, shape, bytes] of an array any[...]; the bytes of one number where all numbers are the same."""
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


def _box(plain: Plain) -> gym.Space[Any]:
    low = _array_of(plain["low"])
    dtype: Any = low.dtype.type
    return spaces.Box(low, _array_of(plain["high"]), dtype=dtype)


def _multi_discrete(plain: Plain) -> gym.Space[Any]:
    nvec = _array_of(plain["nvec"])
    dtype: Any = nvec.dtype.type
    return spaces.MultiDiscrete(nvec, dtype=dtype, start=_array_of(plain["start"]))


_MADE: dict[str, Any] = {
    "Dict": lambda plain: spaces.Dict([(key, space_of(part)) for key, part in plain["parts"]]),
    "Tuple": lambda plain: spaces.Tuple([space_of(part) for part in plain["parts"]]),
    "Box": _box,
    "Discrete": _discrete,
    "MultiDiscrete": _multi_discrete,
    "MultiBinary": lambda plain: spaces.MultiBinary(plain["shape"]),
}
