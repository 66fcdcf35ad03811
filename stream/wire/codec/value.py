"""Encoding of a header: msgpack as by `stream.data.packing`, with arrays in the frame's body.

An array is [dtype, [shape…], offset into the body]; dtypes are little-endian. Of a value whose arrays lie in blocks of
shared memory, an array is [dtype, [shape…], index of the block, offset into it].
"""

import math
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import msgpack
import numpy as np
from numpy.typing import NDArray

from rollflow.stream.data.errors import WireError, shown
from rollflow.stream.data.infos import SlotInfos
from rollflow.stream.data.packing import NUMBER, OBJECTS, SLOT_INFOS, TUPLE, UNPACKABLE, Packer, check_plain, refusal
from rollflow.stream.wire.codec.scan import ARRAY, SHORT, scan

_MOST_DIMENSIONS = 32
_REMEMBERED = 4096  # most bytes of a header that is not scanned again if it was lately

DTYPES = {
    name: np.dtype(name)
    for name in ("|b1", "|i1", "<i2", "<i4", "<i8", "|u1", "<u2", "<u4", "<u8", "<f2", "<f4", "<f8", "<c8", "<c16")
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_NO_BLOCK = np.zeros(0, np.uint8)
Put = Callable[[NDArray[Any]], tuple[int, int]]


def encode_value(value: Any, name: str, put: Put | None = None) -> tuple[bytes, list[NDArray[np.uint8]]]:
    """Encode a value as a header and the bytes of its arrays, u8[n] each, in the order of the body.

    put    gives the index of a block that an array, little-endian and in C order, lies in, and the offset in it: there
           are no arrays of objects and strings, whose values would be in the header; None: arrays lie in the body

    The value is made of None, bool, numbers, str, bytes, list, tuple, dict, SlotInfos, numpy arrays and numbers. Arrays
    any[...] in C order and little-endian are not copied. Raises ColumnError for anything else, with the path to it
    from `name`, and WireError for a value beyond the limits of a header.
    """
    writer = _Writer(put)
    try:
        header = writer.packed(value)
    except UNPACKABLE as error:
        arrays = f"numpy arrays of bool, int, uint, float{', complex or objects' if put is None else ' or complex'}"
        raise refusal(value, name, "sent", arrays, _Writer if put is None else _lending_writer) from error
    scan(header)
    return header, writer.arrays


def decode_value(header: bytes, body: NDArray[np.uint8]) -> Any:
    """The value of a header; arrays any[...] are views of the body, u8[n]. Raises WireError for invalid bytes."""
    scan(header)
    return _read(header, _Reader([body], is_lent=False))


def decode_lent(header: bytes, blocks: Sequence[NDArray[np.uint8]]) -> Any:
    """The value of a header whose arrays lie in blocks, of which they are views.

    Raises WireError for invalid bytes.
    """
    (_scan_once if len(header) <= _REMEMBERED else scan)(header)
    return _read(header, _Reader(blocks, is_lent=True))


_scan_once = lru_cache(256)(scan)


def _read(header: bytes, reader: "_Reader") -> Any:
    try:
        return msgpack.unpackb(header, ext_hook=reader.restored, strict_map_key=False)
    except WireError:
        raise
    except (TypeError, ValueError, OverflowError) as error:  # no UTF-8, a tuple with a list in it as a key, …
        raise WireError(f"header: {error}", "frame") from error


class _Writer(Packer):
    """Packs a value, and collects its arrays."""

    def __init__(self, put: Put | None = None) -> None:
        self.arrays: list[NDArray[np.uint8]] = []
        self._put, self._offset = put, 0

    def _number(self, number: Any) -> Any:
        if isinstance(number, np.str_ | np.bytes_):
            return number.item()
        little = number.astype(number.dtype.newbyteorder("<"))
        return msgpack.ExtType(NUMBER, self.packed([_name_of(little.dtype), little.tobytes()]))

    def _array(self, array: NDArray[Any]) -> Any:
        check_plain(array)
        if array.dtype.kind in "OUS" and self._put is None:
            return self._objects(array)
        plain = array
        if array.dtype not in _NAMES or not array.flags.c_contiguous:
            plain = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
        name = _name_of(plain.dtype)
        if self._put is not None:
            return msgpack.ExtType(ARRAY, _description(name, array.shape, *self._put(plain)))
        description = _description(name, array.shape, self._offset)
        self.arrays.append(plain.reshape(-1).view(np.uint8))
        self._offset += plain.nbytes + -plain.nbytes % 8
        return msgpack.ExtType(ARRAY, description)


_lending_writer = partial(_Writer, lambda array: (0, 0))  # to find what can't be lent


class _Reader:
    """Restores ext values, with arrays as views of a frame's body, or of blocks that they are lent in."""

    def __init__(self, bodies: Sequence[NDArray[np.uint8]], *, is_lent: bool) -> None:
        self._bodies, self._is_lent = bodies, is_lent
        self._left = sum(map(len, bodies))

    def restored(self, code: int, data: bytes) -> Any:
        if code == ARRAY:
            return self._array(data)
        value = msgpack.unpackb(data, ext_hook=self.restored, strict_map_key=False)
        return _KINDS[code](self, _list_of(value, code))

    def _array(self, description: bytes) -> NDArray[Any]:
        place_of = _place_of if len(description) <= SHORT else _place_of.__wrapped__
        dtype, shape, index, offset = place_of(description, self._is_lent)
        body = self._bodies[index] if index < len(self._bodies) else _NO_BLOCK
        size = math.prod(shape) * dtype.itemsize
        if offset + size > len(body) and (size or not self._is_lent):
            where, code = (f"block {index}", "memory") if self._is_lent else ("the body", "frame")
            raise WireError(
                f"array {_NAMES[dtype]}{list(shape)} of {size} bytes at {offset}, expected no end behind {where}'s "
                f"{len(body)} bytes",
                code,
            )
        self._left -= 0 if self._is_lent else size  # what is lent may be lent to two columns
        if self._left < 0:
            raise WireError(f"arrays of more than the body's {sum(map(len, self._bodies))} bytes in all", "frame")
        if not size:
            return np.empty(shape, dtype)
        array: NDArray[Any] = np.ndarray(shape, dtype, body, offset)
        if dtype.kind == "b":
            _check_flags(array)
        return array

    def _number(self, value: list[Any]) -> Any:
        name, data = _exactly(value, 2, "[dtype, bytes]")
        dtype = dtype_of(name)
        if type(data) is not bytes or len(data) != dtype.itemsize:
            raise WireError(f"number {name} of {shown(data)}, expected {dtype.itemsize} bytes", "frame")
        number = np.frombuffer(data, dtype)
        if dtype.kind == "b":
            _check_flags(number)
        return number[0]

    def _objects(self, value: list[Any]) -> NDArray[Any]:
        shape, items = _exactly(value, 2, "[shape, values]")
        if count_of(shape) != len(_list_of(items, OBJECTS)):
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


_KINDS: dict[int, Callable[[_Reader, list[Any]], Any]] = {
    NUMBER: _Reader._number,
    TUPLE: lambda reader, value: tuple(value),
    OBJECTS: _Reader._objects,
    SLOT_INFOS: _Reader._slot_infos,
}


@lru_cache
def _description(name: str, shape: tuple[int, ...], *place: int) -> bytes:
    """An array's description, packed; cached, since it is the same in every step."""
    packed: bytes = msgpack.packb([name, list(shape), *place])
    return packed


@lru_cache
def _place_of(description: bytes, is_lent: bool) -> tuple[np.dtype[Any], tuple[int, ...], int, int]:
    """The dtype, shape, index of the block and offset in an array's description; the body has index 0."""
    value = msgpack.unpackb(description, ext_hook=_no_ext, strict_map_key=False)
    expected = "[dtype, shape, index, offset]" if is_lent else "[dtype, shape, offset]"
    name, shape, *place = _exactly(_list_of(value, ARRAY), 4 if is_lent else 3, expected)
    dtype, _ = dtype_of(name), count_of(shape)
    if not all(type(each) is int and each >= 0 for each in place) or place[-1] % 8:
        raise WireError(f"array at {shown(place[-1])}, expected a multiple of 8", "frame")
    return dtype, tuple(shape), place[0] if is_lent else 0, place[-1]


def _no_ext(code: int, _: bytes) -> Any:
    raise WireError(f"array described with ext value {code}, expected [dtype, shape, offset]", "frame")


def _check_flags(array: NDArray[Any]) -> None:
    """Raise WireError for an array of bool with a byte that is neither 0 nor 1."""
    if (most := array.view(np.uint8).max()) > 1:
        raise WireError(f"array |b1{list(array.shape)} has a byte {most}, expected 0 or 1", "frame")


def _name_of(dtype: np.dtype[Any]) -> str:
    try:
        return _NAMES[dtype]
    except KeyError:
        raise TypeError(f"dtype {dtype} has no packed form") from None


def dtype_of(name: Any) -> np.dtype[Any]:
    """The dtype of a name. Raises WireError for an unknown name."""
    dtype = DTYPES.get(name) if type(name) is str else None
    if dtype is None:
        raise WireError(f"dtype {shown(name)}, expected one of {', '.join(DTYPES)}", "frame")
    return dtype


def count_of(shape: Any) -> int:
    """Number of items in an array of this shape. Raises WireError for an invalid or too large one, also of 0 items."""
    if type(shape) is not list or len(shape) > _MOST_DIMENSIONS:
        raise WireError(f"shape {shown(shape)}, expected a list of at most {_MOST_DIMENSIONS} numbers", "frame")
    for size in shape:
        if type(size) is not int or size < 0:
            raise WireError(f"shape {shown(shape)}, expected numbers of 0 or more", "frame")
    if math.prod(size or 1 for size in shape) >= 1 << 40:
        raise WireError(f"shape {shown(shape)}, expected fewer than 2**40 items", "frame")
    return math.prod(shape)


def _list_of(value: Any, code: int) -> list[Any]:
    if type(value) is not list:
        raise WireError(f"ext value {code} of a {type(value).__name__}, expected a list", "frame")
    return value


def _exactly(value: list[Any], count: int, expected: str) -> list[Any]:
    if len(value) != count:
        raise WireError(f"a list of {len(value)} values, expected {expected}", "frame")
    return value
