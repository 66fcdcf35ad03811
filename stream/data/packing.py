"""Packing of infos and other small data for another process: msgpack, with arrays, tuples and numpy's numbers.

The codes of ext values, and what is packed in each:

    1    array          [dtype, [shape…], bytes]
    2    numpy number   [dtype, bytes]
    3    tuple          [values…]
    4    object array   [[shape…], [values…]]
    5    SlotInfos      [a map for each slot…]
"""

from collections.abc import Mapping
from typing import Any

import msgpack
import numpy as np
from numpy.typing import NDArray

from rollflow.stream.data.errors import ColumnError
from rollflow.stream.data.infos import SlotInfos

ARRAY, NUMBER, TUPLE, OBJECTS, SLOT_INFOS = range(1, 6)
UNPACKABLE = (TypeError, ValueError, OverflowError, RecursionError)  # what `Packer.packed` raises
_MAX_DEPTH = 16  # of the search for a part that can't be packed: a value may contain itself


def pack(value: Any, name: str = "value") -> bytes:
    """The bytes of a value made of None, bool, numbers, str, bytes, list, tuple, dict, numpy arrays and numbers.

    Arrays are any[...], also of objects. Raises ColumnError for anything else, with the path to it from `name`.
    """
    try:
        return Packer().packed(value)
    except UNPACKABLE as error:
        raise refusal(value, name, "handed to another process", "numpy arrays") from error


def unpack(data: bytes | memoryview) -> Any:
    """The value that was packed; arrays, any[...], are read-only views of `data`."""
    return msgpack.unpackb(data, ext_hook=_restored, strict_map_key=False)


class Packer:
    """Packs a value, with each array in its place; a subclass may put arrays elsewhere."""

    def packed(self, value: Any) -> bytes:
        """The bytes of a value. Raises TypeError or another built-in error for one that has no packed form."""
        packed: bytes = msgpack.packb(value, default=self._extended, strict_types=True)
        return packed

    def _extended(self, value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return self._array(value)
        if isinstance(value, np.generic):
            return self._number(value)
        if isinstance(value, tuple):
            return msgpack.ExtType(TUPLE, self.packed(list(value)))
        if isinstance(value, SlotInfos):
            return msgpack.ExtType(SLOT_INFOS, self.packed(value.dicts))
        if isinstance(value, Mapping):
            return dict(value)
        return self._other(value)

    def _other(self, value: Any) -> Any:
        raise TypeError(f"a {type(value).__name__} has no packed form")

    def _array(self, array: NDArray[Any]) -> Any:
        if array.dtype.hasobject:
            return self._objects(array)
        return msgpack.ExtType(ARRAY, self.packed([array.dtype.str, list(array.shape), array.tobytes()]))

    def _objects(self, array: NDArray[Any]) -> Any:
        return msgpack.ExtType(OBJECTS, self.packed([list(array.shape), array.reshape(-1).tolist()]))

    def _number(self, number: Any) -> Any:
        return msgpack.ExtType(NUMBER, self.packed([number.dtype.str, number.tobytes()]))


def _restored(code: int, data: bytes) -> Any:
    value = unpack(data)
    if code == TUPLE:
        return tuple(value)
    if code == SLOT_INFOS:
        return SlotInfos(value)
    if code == NUMBER:
        return _array(value[0], [], value[1])[()]
    if code == ARRAY:
        return _array(value[0], value[1], value[2])
    if code != OBJECTS:
        raise ColumnError(f"packed data of kind {code}, expected 1 to {SLOT_INFOS}")
    array = np.empty(len(value[1]), object)
    array[:] = value[1]
    return array.reshape(value[0])


def _array(dtype: str, shape: list[int], data: bytes) -> NDArray[Any]:
    if not np.dtype(dtype).itemsize:
        return np.zeros(shape, dtype)  # np.str_("") and such: frombuffer takes no dtype without bytes
    return np.frombuffer(data, dtype).reshape(shape)


def refusal(value: Any, name: str, cannot: str, arrays: str, packer: type[Packer] = Packer) -> ColumnError:
    """The error for a value that can't be packed: the path to the part from `name`, what can't be done, what can be."""
    plain = "None, bool, numbers, str, bytes, list, tuple, dict"
    return ColumnError(f"{name}{_where_not(value, packer)} can't be {cannot}; expected {plain}, or {arrays}")


def _where_not(value: Any, packer: type[Packer], depth: int = _MAX_DEPTH) -> str:
    """The path to the part of a value that can't be packed, at most `depth` keys long, and the part's type."""
    parts: list[tuple[str, Any]] = []
    if isinstance(value, SlotInfos):
        parts = [(f" of slot {slot}", info) for slot, info in enumerate(value.dicts)]
    elif isinstance(value, Mapping):
        parts = [(f"[{key!r}]", part) for key, part in value.items()]
    elif isinstance(value, list | tuple) or (isinstance(value, np.ndarray) and value.dtype.hasobject):
        parts = [(f"[{index}]", part) for index, part in enumerate(value)]
    for key_text, part in parts if depth else ():
        try:
            packer().packed(part)
        except UNPACKABLE:
            return key_text + _where_not(part, packer, depth - 1)
    return f": {value!r:.100} of type {type(value).__name__}"
