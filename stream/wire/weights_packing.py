"""Weights that take less room on the way: told by their difference from those before, and compressed.

From one version to the next most weights change little: the bytes of a float that hold its sign, its exponent and its
first digits stay. So the frame of a `Weights` is told by its exclusive or with the frame before; of each four bytes of
that all first ones come first, then all second ones, and so on; all of it is one frame of Zstandard.
"""

import zlib
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from rollflow.stream.data import zstd
from rollflow.stream.data.errors import WireError
from rollflow.stream.wire.codec.message import decode, encode
from rollflow.stream.wire.codec.messages import Weights
from rollflow.stream.wire.codec.sharing import WeightsPacked

_LEAST_BYTES = 1 << 12  # of a frame: a smaller one goes as it is
_MOST_FRAMES, _MOST_BYTES = 4, 256 << 20  # of versions that are kept; two are, however large
_WIDTH = 4  # bytes of most weights

Bytes = NDArray[np.uint8]


class WeightsPacker:
    """Packs the newest weights of modules for other ends, each of which has some of the last versions, or none.

    It keeps the frames of a module's last four versions, of two where they are large.
    """

    def __init__(self) -> None:
        self._modules: dict[str | None, _Frames] = {}

    def packed(self, weights: Weights, base: int | None) -> Weights | WeightsPacked:
        """The newest weights of a module as a message, or themselves where they are small or no smaller when packed.

        base    version that the other end got last as such a message; None: it got none
        """
        message = self._modules.setdefault(weights.module, _Frames()).packed(weights, base)
        return replace(message, share=weights.share)


class _Frames:
    """Frames of a module's last versions, and the newest weights, packed by each of them."""

    def __init__(self) -> None:
        self._frames: dict[int, Bytes] = {}
        self._packed: dict[int | None, Weights | WeightsPacked] = {}  # by version of the base

    def packed(self, weights: Weights, base: int | None) -> Weights | WeightsPacked:
        if weights.version not in self._frames:
            self._add(weights)
        frame, before = self._frames[weights.version], None if base is None else self._frames.get(base)
        if before is None or before.size != frame.size:
            base = before = None
        if base not in self._packed:
            self._packed[base] = _packed(weights, frame, base, before)
        return self._packed[base]

    def _add(self, weights: Weights) -> None:
        self._frames[weights.version] = np.frombuffer(b"".join(encode(replace(weights, share=False))), np.uint8)
        self._packed = {}
        while len(self._frames) > 2 and (
            len(self._frames) > _MOST_FRAMES or sum(frame.size for frame in self._frames.values()) > _MOST_BYTES
        ):
            del self._frames[next(iter(self._frames))]


class WeightsUnpacker:
    """Makes weights of what came packed through one connection. It keeps the last frame of each module."""

    def __init__(self) -> None:
        self._last: dict[str | None, tuple[int, Bytes]] = {}  # module -> version, frame

    def unpacked(self, message: WeightsPacked, most: int) -> Weights:
        """The weights of a message, whose tensors must not be changed.

        most    bytes of the largest frame that this end takes

        Raises WireError for a message that makes none.
        """
        if message.size > most:
            raise WireError(f"packed weights of {message.size} bytes, expected at most {most}", "frame")
        version, before = self._last.get(message.module, (None, None))
        if message.base is not None and (message.base != version or before is None or before.size != message.size):
            raise WireError(f"packed weights by version {message.base}, expected those that came before", "weights")
        try:
            frame = _unpacked(message, None if message.base is None else before)
        except ValueError as error:
            raise WireError(f"packed weights: {error}", "weights") from error
        weights = decode(frame)
        if not isinstance(weights, Weights) or (weights.version, weights.module) != (message.version, message.module):
            raise WireError("packed weights are others than their message says", "weights")
        self._last[message.module] = message.version, frame
        return replace(weights, share=message.share)


def _packed(weights: Weights, frame: Bytes, base: int | None, before: Bytes | None) -> Weights | WeightsPacked:
    if frame.size < _LEAST_BYTES:
        return weights
    difference = frame if before is None else frame ^ before
    packed = zstd.compressed(np.ascontiguousarray(difference.reshape(-1, _WIDTH).T).reshape(-1))
    if packed.size >= frame.size:
        return weights
    return WeightsPacked(weights.version, base, frame.size, zlib.crc32(frame.data), packed, weights.module)


def _unpacked(message: WeightsPacked, before: Bytes | None) -> Bytes:
    """The frame of a message. Raises ValueError where it makes none."""
    if message.packed.dtype != np.uint8 or message.packed.ndim != 1 or message.size % _WIDTH:
        raise ValueError("expected bytes, of a whole frame")
    planes = zstd.decompressed(message.packed, message.size).reshape(_WIDTH, -1)
    frame = np.ascontiguousarray(planes.T).reshape(-1)
    if before is not None:
        frame ^= before
    if zlib.crc32(frame.data) != message.checksum:
        raise ValueError("they have another checksum than their message says")
    return frame
