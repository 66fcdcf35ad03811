"""Infos and other small data as bytes for another process: msgpack, with arrays, tuples and numpy's numbers."""

from collections.abc import Callable, Mapping
from typing import Any

import msgpack
import numpy as np
from numpy.typing import NDArray

from rollflow.stream.errors import ColumnError
from rollflow.stream.infos import SlotInfos

_ARRAY, _NUMBER, _TUPLE, _OBJECTS, _SLOT_INFOS = range(1, 6)
_FAR = 16  # steps into a value: it may be inside itself


def pack(value: Any, name: str = "value") -> bytes:
    """The bytes of a value made of None, bool, numbers, str, bytes, list, tuple, dict, numpy arrays and numbers.

    Raises ColumnError for anything else, with the way to it from `name`.
    """
    try:
        return _packed(value)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ColumnError(
            f"{name}{where_not(value, _packed)} can't be handed to another process; expected None, bool, numbers, str, "
            "bytes, list, tuple, dict, or numpy arrays"
        ) from error


def unpack(data: bytes | memoryview) -> Any:
    """The value that `pack` packed; arrays are read-only views of `data`."""
    return msgpack.unpackb(data, ext_hook=_restored, strict_map_key=False)


def _extended(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        if value.dtype.hasobject:
            return msgpack.ExtType(_OBJECTS, _packed([list(value.shape), value.reshape(-1).tolist()]))
        return msgpack.ExtType(_ARRAY, _packed([value.dtype.str, list(value.shape), value.tobytes()]))
    if isinstance(value, np.generic):
        return msgpack.ExtType(_NUMBER, _packed([value.dtype.str, value.tobytes()]))
    if isinstance(value, tuple):
        return msgpack.ExtType(_TUPLE, _packed(list(value)))
    if isinstance(value, SlotInfos):
        return msgpack.ExtType(_SLOT_INFOS, _packed(value.dicts))
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"a {type(value).__name__} has no packed form")


def _restored(code: int, data: bytes) -> Any:
    value = unpack(data)
    if code == _TUPLE:
        return tuple(value)
    if code == _SLOT_INFOS:
        return SlotInfos(value)
    if code == _NUMBER:
        return _array(value[0], [], value[1])[()]
    if code == _ARRAY:
        return _array(value[0], value[1], value[2])
    if code != _OBJECTS:
        raise ColumnError(f"packed data of kind {code}, expected 1 to {_SLOT_INFOS}")
    array = np.empty(len(value[1]), object)
    array[:] = value[1]
    return array.reshape(value[0])


def _array(dtype: str, shape: list[int], data: bytes) -> NDArray[Any]:
    if not np.dtype(dtype).itemsize:
        return np.zeros(shape, dtype)  # np.str_("") and such: frombuffer takes no dtype without bytes
    return np.frombuffer(data, dtype).reshape(shape)


def _packed(value: Any) -> bytes:
    packed: bytes = msgpack.packb(value, default=_extended, strict_types=True)
    return packed


def where_not(value: Any, packed: Callable[[Any], object], depth: int = _FAR) -> str:
    """What in a value `packed` can't pack: the way to it, at most so many steps long, and its type."""
    parts: list[tuple[str, Any]] = []
    if isinstance(value, SlotInfos):
        parts = [(f" of slot {slot}", info) for slot, info in enumerate(value.dicts)]
    elif isinstance(value, Mapping):
        parts = [(f"[{key!r}]", part) for key, part in value.items()]
    elif isinstance(value, list | tuple) or (isinstance(value, np.ndarray) and value.dtype.hasobject):
        parts = [(f"[{index}]", part) for index, part in enumerate(value)]
    for told, part in parts if depth else ():
        try:
            packed(part)
        except (TypeError, ValueError, OverflowError, RecursionError):
            return told + where_not(part, packed, depth - 1)
    return f": {value!r:.100} of type {type(value).__name__}"
