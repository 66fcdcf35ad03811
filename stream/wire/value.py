"""What a header says: msgpack, with arrays that lie in the frame's body.

The codes of ext values are those of `stream.packing`, which has the bytes of an array where this has an offset:

    1    array          [dtype, [shape…], offset into the body]
    2    numpy number   [dtype, bytes]
    3    tuple          [values…]
    4    object array   [[shape…], [values…]]
    5    SlotInfos      [a map for each slot…]
"""

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import msgpack
import numpy as np
from numpy.typing import NDArray

from rollflow.stream.errors import ColumnError, WireError
from rollflow.stream.infos import SlotInfos
from rollflow.stream.packing import where_not
from rollflow.stream.wire.joined import Joined
from rollflow.stream.wire.scan import ARRAY, SHORT, scan

_NUMBER, _TUPLE, _OBJECTS, _SLOT_INFOS = range(ARRAY + 1, ARRAY + 5)
_MOST_DIMENSIONS = 32

DTYPES = {
    name: np.dtype(name)
    for name in ("|b1", "|i1", "<i2", "<i4", "<i8", "|u1", "<u2", "<u4", "<u8", "<f2", "<f4", "<f8", "<c8", "<c16")
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def encode_value(value: Any, name: str) -> tuple[bytes, list[NDArray[np.uint8]]]:
    """A value as a header, and the bytes of its arrays, u8[n] each, in the order in which the body has them.

    It may be made of None, bool, numbers, str, bytes, list, tuple, dict, SlotInfos, numpy arrays and numbers. Arrays
    in C order and little-endian are referred to, others are copied. Raises ColumnError for anything else, with the
    way to it from `name`, and WireError for what is beyond the limits of a header.
    """
    writer = _Writer()
    try:
        header = writer.packed(value)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ColumnError(
            f"{name}{where_not(value, _Writer().packed)} can't be sent; expected None, bool, numbers, str, bytes, "
            "list, tuple, dict, or numpy arrays of bool, int, uint, float, complex or objects"
        ) from error
    scan(header)
    return header, writer.arrays


def decode_value(header: bytes, body: NDArray[np.uint8]) -> Any:
    """The value that `encode_value` encoded; arrays are views of the body. Raises WireError for what is none."""
    scan(header)
    reader = _Reader(body)
    try:
        return msgpack.unpackb(header, ext_hook=reader.restored, strict_map_key=False)
    except WireError:
        raise
    except (TypeError, ValueError, OverflowError) as error:  # no UTF-8, a tuple with a list in it as a key, …
        raise WireError(f"header: {error}", "frame") from error


class _Writer:
    def __init__(self) -> None:
        self.arrays: list[NDArray[np.uint8]] = []
        self._offset = 0

    def packed(self, value: Any) -> bytes:
        packed: bytes = msgpack.packb(value, default=self._extended, strict_types=True)
        return packed

    def _extended(self, value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return self._array(value)
        if isinstance(value, np.str_ | np.bytes_):
            return value.item()
        if isinstance(value, np.generic):
            number = value.astype(value.dtype.newbyteorder("<"))
            return msgpack.ExtType(_NUMBER, self.packed([_name_of(number.dtype), number.tobytes()]))
        if isinstance(value, tuple):
            return msgpack.ExtType(_TUPLE, self.packed(list(value)))
        if isinstance(value, SlotInfos):
            return msgpack.ExtType(_SLOT_INFOS, self.packed(value.dicts))
        if isinstance(value, Mapping):
            return dict(value)
        if isinstance(value, Joined):
            return self._joined(value)
        raise TypeError(f"a {type(value).__name__} has no packed form")

    def _array(self, array: NDArray[Any]) -> Any:
        if array.dtype.kind in "OUS":
            return msgpack.ExtType(_OBJECTS, self.packed([list(array.shape), array.reshape(-1).tolist()]))
        plain = array
        if array.dtype not in _NAMES or not array.flags.c_contiguous:
            plain = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
        told = _told(_name_of(plain.dtype), array.shape, self._offset)
        self.arrays.append(plain.reshape(-1).view(np.uint8))
        self._offset += plain.nbytes + -plain.nbytes % 8
        return msgpack.ExtType(ARRAY, told)

    def _joined(self, joined: Joined) -> Any:
        told = _told("|u1", (joined.nbytes,), self._offset)
        self.arrays += joined.parts
        self._offset += joined.nbytes
        return msgpack.ExtType(ARRAY, told)


class _Reader:
    def __init__(self, body: NDArray[np.uint8]) -> None:
        self._body = body
        self._read = 0

    def restored(self, code: int, data: bytes) -> Any:
        if code == ARRAY:
            return self._array(data)
        value = msgpack.unpackb(data, ext_hook=self.restored, strict_map_key=False)
        return _KINDS[code](self, _list_of(value, code))

    def _array(self, told: bytes) -> NDArray[Any]:
        dtype, shape, offset = _place_of(told) if len(told) <= SHORT else _place_of.__wrapped__(told)
        size = math.prod(shape) * dtype.itemsize
        if offset + size > len(self._body):
            raise WireError(
                f"array {_NAMES[dtype]}{list(shape)} of {size} bytes at {offset}, expected no end behind the body's "
                f"{len(self._body)} bytes",
                "frame",
            )
        self._read += size
        if self._read > len(self._body):
            raise WireError(f"arrays of more than the body's {len(self._body)} bytes in all", "frame")
        return _viewed(self._body[offset : offset + size], dtype, shape)

    def _number(self, value: list[Any]) -> Any:
        name, data = _exactly(value, 2, "[dtype, bytes]")
        dtype = dtype_of(name)
        if type(data) is not bytes or len(data) != dtype.itemsize:
            raise WireError(f"number {name} of {data!r:.40}, expected {dtype.itemsize} bytes", "frame")
        return _viewed(np.frombuffer(data, np.uint8), dtype, (1,))[0]

    def _tuple(self, value: list[Any]) -> tuple[Any, ...]:
        return tuple(value)

    def _objects(self, value: list[Any]) -> NDArray[Any]:
        shape, items = _exactly(value, 2, "[shape, values]")
        if count_of(shape) != len(_list_of(items, _OBJECTS)):
            raise WireError(f"object array {shape} of {len(items)} values", "frame")
        array = np.empty(len(items), object)
        for index, item in enumerate(items):
            array[index] = item
        return array.reshape(shape)

    def _slot_infos(self, value: list[Any]) -> SlotInfos:
        for slot, info in enumerate(value):
            if type(info) is not dict:
                raise WireError(f"infos of slot {slot}: a {type(info).__name__}, expected a map", "frame")
        return SlotInfos(value)


_KINDS = {
    _NUMBER: _Reader._number,
    _TUPLE: _Reader._tuple,
    _OBJECTS: _Reader._objects,
    _SLOT_INFOS: _Reader._slot_infos,
}


@lru_cache
def _told(name: str, shape: tuple[int, ...], offset: int) -> bytes:
    """Where an array lies, packed: the same in every step."""
    told: bytes = msgpack.packb([name, list(shape), offset])
    return told


@lru_cache
def _place_of(told: bytes) -> tuple[np.dtype[Any], tuple[int, ...], int]:
    value = msgpack.unpackb(told, ext_hook=_no_ext, strict_map_key=False)
    name, shape, offset = _exactly(_list_of(value, ARRAY), 3, "[dtype, shape, offset]")
    dtype, _ = dtype_of(name), count_of(shape)
    if type(offset) is not int or offset < 0 or offset % 8:
        raise WireError(f"array at {offset!r:.40}, expected a multiple of 8", "frame")
    return dtype, tuple(shape), offset


def _no_ext(code: int, _: bytes) -> Any:
    raise WireError(f"array described with ext value {code}, expected [dtype, shape, offset]", "frame")


def _viewed(data: NDArray[np.uint8], dtype: np.dtype[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    if dtype.kind == "b" and data.size and data.max() > 1:
        raise WireError(f"array |b1{list(shape)} has a byte {data.max()}, expected 0 or 1", "frame")
    return data.view(dtype).reshape(shape)


def _name_of(dtype: np.dtype[Any]) -> str:
    try:
        return _NAMES[dtype]
    except KeyError:
        raise TypeError(f"dtype {dtype} has no packed form") from None


def dtype_of(name: Any) -> np.dtype[Any]:
    """The dtype of a name. Raises WireError where there is none."""
    dtype = DTYPES.get(name) if type(name) is str else None
    if dtype is None:
        raise WireError(f"dtype {name!r:.40}, expected one of {', '.join(DTYPES)}", "frame")
    return dtype


def count_of(shape: Any) -> int:
    """How many items an array of this shape has; where a dimension is 0, the others have limits as well."""
    if type(shape) is not list or len(shape) > _MOST_DIMENSIONS:
        raise WireError(f"shape {shape!r:.100}, expected a list of at most {_MOST_DIMENSIONS} numbers", "frame")
    for size in shape:
        if type(size) is not int or size < 0:
            raise WireError(f"shape {shape!r:.100}, expected numbers of 0 or more", "frame")
    if math.prod(size or 1 for size in shape) >= 1 << 40:
        raise WireError(f"shape {shape!r:.100}, expected fewer than 2**40 items", "frame")
    return math.prod(shape)


def _list_of(value: Any, code: int) -> list[Any]:
    if type(value) is not list:
        raise WireError(f"ext value {code} of a {type(value).__name__}, expected a list", "frame")
    return value


def _exactly(value: list[Any], count: int, told: str) -> list[Any]:
    if len(value) != count:
        raise WireError(f"a list of {len(value)} values, expected {told}", "frame")
    return value
