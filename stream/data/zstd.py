"""Zstandard, by the package zstandard where it is installed."""

import numpy as np
from numpy.typing import NDArray

from rollflow.stream.data.errors import RollflowError

try:
    import zstandard
except ImportError:  # an extra
    zstandard = None  # type: ignore[assignment]

NAME = "zstd"
_LEVEL = 1  # the network is what is slow
_MOST_BYTES = 1 << 32  # of one array


def available() -> list[str]:
    """Names of the compressions that this process has."""
    return [] if zstandard is None else [NAME]


def check_available(name: str | None) -> None:
    """Raise ValueError for no such compression, RollflowError where its package is missing."""
    if name not in (None, NAME):
        raise ValueError(f"compression is {name!r}, expected {NAME!r} or None")
    if name is not None and name not in available():
        raise RollflowError("compression='zstd' takes the package zstandard: pip install rollflow[compression]")


def compressed(array: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """One frame u8[n] that says its size, of bytes u8[m] in C order."""
    return np.frombuffer(zstandard.ZstdCompressor(level=_LEVEL).compress(array.data), np.uint8)


def decompressed(array: NDArray[np.uint8], size: int) -> NDArray[np.uint8]:
    """The bytes u8[size] of a frame u8[n]; they may be written to.

    Raises ValueError for anything but a frame that says this size, and where zstandard is not installed.
    """
    if zstandard is None:
        raise ValueError("it is compressed, and the package zstandard is not installed")
    packed = array.tobytes()
    try:
        content = zstandard.frame_content_size(packed)
        if size > _MOST_BYTES or content != size:
            raise ValueError(f"a frame of Zstandard of {content} bytes, expected {min(size, _MOST_BYTES)}")
        unpacker = zstandard.ZstdDecompressor()
        plain = unpacker.decompress(packed, max_output_size=size, allow_extra_data=False) if size else b""
    except zstandard.ZstdError as error:
        raise ValueError(str(error)) from error
    whole = np.empty(size, np.uint8)
    whole[:] = np.frombuffer(plain, np.uint8)
    return whole
