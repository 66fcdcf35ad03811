"""Packing of infos and other small data for another process: msgpack, with arrays, tuples and numpy's numbers.

Numbers, strings, bytes and lists of subclasses, such as members of an IntEnum, are packed as the plain values that they
are equal to.

The codes of ext values, and what is packed in each:

    1    array          [dtype, [shape…], bytes]
    2    numpy number   [dtype, bytes]
    3    tuple          [values…]
    4    object array   [[shape…], [values…]]
    5    SlotInfos      [a map for each slot…]
"""

from collections.abc import Callable, Mapping
from typing import Any

import msgpack
import numpy as np
from numpy.typing import NDArray

from rollflow.stream.data.errors import ColumnError, shown
from rollflow.stream.data.infos import SlotInfos

ARRAY, NUMBER, TUPLE, OBJECTS, SLOT_INFOS = range(1, 6)
UNPACKABLE = (TypeError, ValueError, OverflowError, RecursionError)  # what `Packer.packed` raises
_MAX_DEPTH = 16  # of the search for a part that can't be packed: a value may contain itself


Drop = Callable[[str], None]  # is told where an entry of infos was, and what it was


def pack(value: Any, name: str = "value") -> bytes:
    """The bytes of a value made of None, bool, numbers, str, bytes, list, tuple, dict, numpy arrays and numbers.

    Arrays are any[...], also of objects. Raises ColumnError for anything else, with the path to it from `name`.
    """
    try:
        return Packer().packed(value)
    except UNPACKABLE as error:
        raise refusal(value, name, "handed to another process", "numpy arrays") from error


def can_pack(value: Any, packed: Callable[[Any], object] | None = None) -> bool:
    """True if `pack` takes a value, or another function that packs."""
    try:
        (packed or Packer().packed)(value)
    except UNPACKABLE:
        return False
    return True


def sendable(value: Any, drop: Drop, can_send: Callable[[Any], bool] = can_pack) -> Any:
    """A value of dicts and lists, without those entries of infos in it that can't be sent.

    Infos are what stands under keys that end in "infos": SlotInfos, gymnasium's vector form, lists of such, and lists
    of [number, dict].
    """
    if type(value) is dict:
        return {
            key: _sendable_infos(part, drop, can_send, key)
            if type(key) is str and key.endswith("infos")
            else sendable(part, drop, can_send)
            for key, part in value.items()
        }
    return [sendable(part, drop, can_send) for part in value] if type(value) is list else value


def _sendable_infos(infos: Any, drop: Drop, can_send: Callable[[Any], bool], where: str) -> Any:
    if isinstance(infos, SlotInfos):
        of_slots = enumerate(infos.dicts)
        return SlotInfos([sendable_info(info, drop, can_send, f"slot {slot}: info") for slot, info in of_slots])
    if isinstance(infos, list | tuple) and len(infos) == 2 and isinstance(infos[1], Mapping) and type(infos[0]) is int:
        return [infos[0], sendable_info(infos[1], drop, can_send, f"agent {infos[0]}: info")]
    if isinstance(infos, list | tuple):
        return [_sendable_infos(each, drop, can_send, where) for each in infos]
    if not isinstance(infos, Mapping):
        return infos
    kept = sendable_info(infos, drop, can_send, where)
    lost = {f"_{key}" for key in infos if key not in kept}  # masks of the vector form
    return {key: part for key, part in kept.items() if key not in lost}


def sendable_info(
    info: Mapping[Any, Any], drop: Drop, can_send: Callable[[Any], bool] = can_pack, where: str = "info"
) -> dict[Any, Any]:
    """An info dict without the entries that can't be sent, to any depth. `where` begins what `drop` is told."""
    kept: dict[Any, Any] = {}
    for key, value in info.items():
        if can_send({key: value}):
            kept[key] = value
        elif isinstance(value, Mapping) and can_send({key: None}) and where.count("[") < _MAX_DEPTH:
            kept[key] = sendable_info(value, drop, can_send, f"{where}[{key!r}]")
        else:
            drop(f"{where}[{shown(key)}] is {shown(value)}, of type {type(value).__name__}")
    return kept


def unpack(data: bytes | memoryview) -> Any:
    """The value that was packed; arrays, any[...], are read-only views of `data`."""
    return msgpack.unpackb(data, ext_hook=_restored, strict_map_key=False)


_PLAIN: dict[type, Callable[[Any], Any]] = {
    int: int.__int__,
    float: float.__float__,
    str: str.__str__,
    bytes: bytes.__bytes__,
    list: list,
}
"""Class -> a function that makes the plain value of an instance of a subclass."""


def check_plain(array: NDArray[Any]) -> None:
    """Raise TypeError for an array any[...] with more than its values: a mask, or fields."""
    if isinstance(array, np.ma.MaskedArray) or array.dtype.kind == "V":
        raise TypeError(f"a {type(array).__name__} of {array.dtype} has no packed form")


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
        for kind, plain in _PLAIN.items():
            if isinstance(value, kind):
                return plain(value)
        return self._other(value)

    def _other(self, value: Any) -> Any:
        raise TypeError(f"a {type(value).__name__} has no packed form")

    def _array(self, array: NDArray[Any]) -> Any:
        check_plain(array)
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


def refusal(value: Any, name: str, cannot: str, arrays: str, packer: Callable[[], Packer] = Packer) -> ColumnError:
    """The error for a value that can't be packed: the path to the part from `name`, what can't be done, what can be."""
    plain = "None, bool, numbers, str, bytes, list, tuple, dict"
    return ColumnError(f"{name}{_where_not(value, packer)} can't be {cannot}; expected {plain}, or {arrays}")


def _where_not(value: Any, packer: Callable[[], Packer], depth: int = _MAX_DEPTH) -> str:
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
    return f": {shown(value)} of type {type(value).__name__}"
