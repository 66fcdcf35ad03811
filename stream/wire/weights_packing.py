"""Weights that take less room on the way: encoded as a difference from those before, and compressed.

From one version to the next most weights change little: the bytes of a float that hold its sign, its exponent and its
first digits stay. So the frame of a `Weights` is combined by exclusive or with the frame before; of each four bytes of
that all first ones come first, then all second ones, and so on; all of it is one frame of Zstandard.
"""

import threading
import zlib

import numpy as np
from numpy.typing import NDArray

from rollflow.stream.data import zstd
from rollflow.stream.data.errors import WireError
from rollflow.stream.wire.codec.message import decode, encode
from rollflow.stream.wire.codec.messages import Weights
from rollflow.stream.wire.codec.sharing import WeightsPacked

MOST_MODULES = 256  # whose weights go packed through one connection: the other end keeps a frame of each
_LEAST_BYTES = 1 << 12  # of a frame: a smaller one goes as it is
_MOST_FRAMES, _MOST_BYTES = 4, 256 << 20  # of versions that are kept; two are, however large
_WIDTH = 4  # bytes of most weights

Bytes = NDArray[np.uint8]


class WeightsPacker:
    """Packs the newest weights of modules for other ends, each of which has some of the last versions, or none.

    It keeps the frames of a module's last four versions, of two where they are large. Any thread may use it.
    """

    def __init__(self) -> None:
        self._modules: dict[str | None, _Frames] = {}

    def prepare(self, weights: Weights) -> None:
        """Pack weights for ends that have the version before: large ones take seconds, for which a lock is not held."""
        frames = self._frames_of(weights)
        frames.packed(weights, frames.version_before(weights))

    def packed(self, weights: Weights, base: int | None) -> Weights | WeightsPacked:
        """Weights of a module as a message, or themselves where they are small or no smaller when packed.

        base    version that the other end got last as such a message; None: it got none
        """
        return self._frames_of(weights).packed(weights, base)

    def _frames_of(self, weights: Weights) -> "_Frames":
        return self._modules.setdefault(weights.module, _Frames())


class _Frames:
    """Frames of a module's last versions, and the last two of them, packed by each of the others."""

    def __init__(self) -> None:
        self._frames: dict[int, Bytes] = {}
        self._packed: dict[tuple[int, int | None], Weights | WeightsPacked] = {}  # by version and base
        self._lock = threading.Lock()

    def version_before(self, weights: Weights) -> int | None:
        """The newest version before that of the weights; None: there was none."""
        with self._lock:
            return max((version for version in self._frames if version < weights.version), default=None)

    def packed(self, weights: Weights, base: int | None) -> Weights | WeightsPacked:
        with self._lock:
            if weights.version not in self._frames:
                self._add(weights)
            frame, before = self._frames[weights.version], None if base is None else self._frames.get(base)
            if before is None or before.size != frame.size:
                base = before = None
            made = self._packed.get((weights.version, base))
        if made is None:
            made = _packed(weights, frame, base, before)
            with self._lock:
                self._packed[weights.version, base] = made
        return made

    def _add(self, weights: Weights) -> None:
        self._frames[weights.version] = np.frombuffer(b"".join(encode(weights)), np.uint8)
        last = [*self._frames][-2:]
        self._packed = {key: made for key, made in self._packed.items() if key[0] in last}
        while len(self._frames) > 2 and (
            len(self._frames) > _MOST_FRAMES or sum(frame.size for frame in self._frames.values()) > _MOST_BYTES
        ):
            del self._frames[next(iter(self._frames))]


class WeightsUnpacker:
    """Makes weights of what came packed through one connection. It keeps the last frame of each module."""

    def __init__(self) -> None:
        self._last: dict[str | None, tuple[int, Bytes]] = {}  # module -> version, frame

    def unpacked(self, message: WeightsPacked, most: int) -> Weights:
        """The weights of a message, whose tensors may be written to.

        most    bytes of the largest frame that this end takes

        Raises WireError, code `packed`, for a message that makes none: the next connection begins anew.
        """
        what = "packed weights" if message.module is None else f"packed weights of module '{message.module}'"
        what = f"{what}, version {message.version}"
        try:
            frame = _unpacked(message, self._base_of(message), most)
            weights = decode(frame)
            made = getattr(weights, "version", None), getattr(weights, "module", None)
            if not isinstance(weights, Weights) or made != (message.version, message.module):
                raise ValueError(f"they are {weights.kind} of version {made[0]}, module {made[1]!r}, expected the same")
        except (ValueError, WireError) as error:
            raise WireError(f"{what}: {error}", "packed") from error
        self._last[message.module] = message.version, frame.copy()  # users may write to the tensors
        return weights

    def _base_of(self, message: WeightsPacked) -> Bytes | None:
        """The frame that a message's is a difference from. Raises ValueError where this end does not have it."""
        version, frame = self._last.get(message.module, (None, None))
        if version is None and len(self._last) == MOST_MODULES:
            raise ValueError(f"there are those of {MOST_MODULES} modules already, expected no more")
        if message.base is None:
            return None
        if message.base != version or frame is None:
            raise ValueError(f"a difference from version {message.base}, expected {version}, which came last")
        if frame.size != message.size:
            raise ValueError(f"a frame of {message.size} bytes, expected {frame.size} as of version {version}")
        return frame


def _packed(weights: Weights, frame: Bytes, base: int | None, before: Bytes | None) -> Weights | WeightsPacked:
    if frame.size < _LEAST_BYTES:
        return weights
    difference = frame if before is None else frame ^ before
    packed = zstd.compressed(np.ascontiguousarray(difference.reshape(-1, _WIDTH).T).reshape(-1))
    if packed.size >= frame.size:
        return weights
    return WeightsPacked(weights.version, base, frame.size, zlib.crc32(frame.data), packed, weights.module)


def _unpacked(message: WeightsPacked, before: Bytes | None, most: int) -> Bytes:
    """The frame of a message. Raises ValueError where it makes none."""
    if message.nbytes > most:
        raise ValueError(f"a frame of {message.nbytes} bytes, expected at most {most}")
    if message.packed.dtype != np.uint8 or message.packed.ndim != 1:
        raise ValueError(f"an array {message.packed.dtype}{list(message.packed.shape)}, expected uint8[n]")
    if message.size % _WIDTH:
        raise ValueError(f"a frame of {message.size} bytes in all, expected a multiple of {_WIDTH}")
    planes = zstd.decompressed(message.packed, message.size).reshape(_WIDTH, -1)
    frame = np.ascontiguousarray(planes.T).reshape(-1)
    if before is not None:
        frame ^= before
    checksum = zlib.crc32(frame.data)
    if checksum != message.checksum:
        raise ValueError(f"their checksum is {checksum:#010x}, expected {message.checksum:#010x}")
    length = int.from_bytes(frame[:4].tobytes(), "little")
    if length != message.nbytes:
        raise ValueError(f"their frame has a length of {length}, expected {message.nbytes}")
    return frame
