"""msgpack with arrays in it, as msgpack-numpy packs them and openpi's clients send them."""

from typing import Any

import msgpack
import numpy as np

from rollflow.policy.serving.request import RequestError

CONTENT_TYPE = "application/msgpack"
_ARRAY_MARK, _NUMBER_MARK = "__ndarray__", "__npgeneric__"
_KINDS = "biuf"  # never objects: their bytes are pickles


def pack(message: Any) -> bytes:
    """A message as msgpack; arrays of bool, integer or float [...], and numpy's numbers, keep dtype and shape."""
    packed: bytes = msgpack.packb(message, default=_packed)
    return packed


def unpack(data: bytes) -> Any:
    """A message from msgpack; its arrays are read-only.

    Raises RequestError for what is no msgpack, and for arrays that are not numbers.
    """
    try:
        return msgpack.unpackb(data, object_hook=_unpacked, strict_map_key=False)
    except RequestError:
        raise
    except Exception as error:
        raise RequestError(f"the message is no msgpack: {type(error).__name__}: {error}") from None


def _packed(value: Any) -> Any:
    if isinstance(value, np.ndarray) and value.dtype.kind in _KINDS:
        return {_ARRAY_MARK.encode(): True, b"data": value.tobytes(), b"dtype": value.dtype.str, b"shape": value.shape}
    if isinstance(value, np.generic) and value.dtype.kind in _KINDS:
        return {_NUMBER_MARK.encode(): True, b"data": value.item(), b"dtype": value.dtype.str}
    raise TypeError(f"{type(value).__name__} can't be sent, expected numbers, texts, lists, maps and arrays of numbers")


def _unpacked(message: dict[Any, Any]) -> Any:
    fields = {key.decode("ascii", "replace") if isinstance(key, bytes) else key: key for key in message}
    if _ARRAY_MARK not in fields and _NUMBER_MARK not in fields:
        return message
    try:
        dtype = np.dtype(_text(message[fields["dtype"]]))
        data = message[fields["data"]]
        if dtype.kind not in _KINDS:
            raise RequestError(f"an array has dtype {dtype}, expected numbers")
        if _NUMBER_MARK in fields:
            return dtype.type(data)
        return np.frombuffer(data, dtype).reshape(message[fields["shape"]])
    except RequestError:
        raise
    except Exception as error:
        raise RequestError(
            f"an array can't be read: {error}; expected dtype, shape and data, the bytes of its items in C order"
        ) from None


def _text(value: Any) -> str:
    return value.decode("ascii") if isinstance(value, bytes) else str(value)
