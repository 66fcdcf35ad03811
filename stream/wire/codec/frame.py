"""Frames: a header and arrays as bytes, and a decoder for bytes that come in any pieces.

    u32 length of all that follows | u32 length of the header | header, msgpack | zeros | arrays, with zeros between

Both numbers are little-endian. Header and arrays are padded with zeros to multiples of 8 bytes, from the frame's first
byte on. So a frame in aligned memory has aligned arrays.
"""

import struct
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollflow.stream.data.errors import WireError
from rollflow.stream.wire.codec.limits import MAX_HEADER

Buffer = bytes | memoryview
Frame = bytearray | NDArray[np.uint8]  # as received: a large frame is an array

_LENGTHS = struct.Struct("<II")
_INBOX = 64 << 10  # bytes received at a time while no large frame is under way
_FIRST = 4  # inboxes allocated for a large frame before more of it has come
_MOST_SPARE, _MOST_SPARE_BYTES = 8, 512 << 20  # of memory of large frames kept for reuse
_COPIED = 16 << 10  # bytes up to which an array is copied rather than sent by itself


def frame_of(header: bytes, arrays: Sequence[NDArray[np.uint8]] = ()) -> list[Buffer]:
    """The bytes of a frame, as a list of buffers.

    arrays    u8[n] each, C order; large ones are not copied: they must not change until sent

    Raises WireError if the header or the frame is too large for its length field.
    """
    begin = _padded(_LENGTHS.size + len(header))
    total = begin + sum(_padded(array.nbytes) for array in arrays)
    if len(header) > MAX_HEADER:
        raise WireError(f"header of {len(header)} bytes, expected at most {MAX_HEADER}", "frame")
    if total - 4 > 0xFFFFFFFF:
        raise WireError(f"frame of {total} bytes, expected at most 4 GiB", "frame")
    buffers: list[Buffer] = []
    small: list[Buffer] = [_LENGTHS.pack(total - 4, len(header)), header, bytes(-len(header) % 8)]
    for array in arrays:
        if array.nbytes > _COPIED:
            buffers += b"".join(small), array.data
            small = []
        else:
            small.append(array.tobytes())
        small.append(bytes(-array.nbytes % 8))
    if rest := b"".join(small):
        buffers.append(rest)
    return buffers


def taken_apart(frame: Frame | bytes) -> tuple[bytes, NDArray[Any]]:
    """A whole frame's header, and the body after it as u8[n], a view."""
    whole = np.frombuffer(frame, np.uint8)
    _, length = _LENGTHS.unpack_from(whole.data)
    begin = _LENGTHS.size
    return whole[begin : begin + length].tobytes(), whole[_padded(begin + length) :]


class FrameDecoder:
    """Cuts received bytes into frames.

    max_frame    largest frame that is accepted, in bytes, without its length field
    inbox        bytes received at a time while no large frame is under way; few before the handshake

    Either pass received bytes to `feed`, or receive into `buffer()` and report the number by `filled`. Both return an
    iterator of frames, to be exhausted before more is received. It raises WireError for a frame that is refused; the
    decoder is then unusable. Each frame, with its lengths, has memory of its own.

    Memory for a large frame grows with the bytes that have come, or is that of an earlier frame that is no longer in
    use. Memory that the system has to map anew for each frame takes longer than receiving the bytes.
    """

    def __init__(self, max_frame: int, inbox: int = _INBOX) -> None:
        self.max_frame = max_frame
        self._inbox = bytearray(inbox)
        self._begin = self._end = 0  # of the bytes in the inbox
        self._large = bytearray()  # a frame that does not fit into the inbox
        self._total = 0  # size of the large frame; 0: there is none
        self._filled = 0
        self._lent = memoryview(b"")
        self._spare: deque[bytearray] = deque(maxlen=_MOST_SPARE)  # memory of large frames for reuse

    def widen(self, max_frame: int) -> None:
        """Accept frames of `max_frame` bytes from now on, and receive more at a time; to be called between frames."""
        self._lent.release()
        self.max_frame = max_frame
        self._inbox += bytes(_INBOX - len(self._inbox))

    @property
    def half(self) -> int:
        """Number of bytes that have come of an incomplete frame."""
        return self._filled + self._end - self._begin

    def feed(self, data: bytes | bytearray | memoryview) -> Iterator[Frame]:
        """Take bytes, and iterate over the frames that they complete."""
        rest = memoryview(data).cast("B")
        while rest:
            room = self.buffer()
            count = min(len(room), len(rest))
            room[:count] = rest[:count]
            rest = rest[count:]
            yield from self.filled(count)

    def buffer(self) -> memoryview:
        """Memory to receive into, at least one byte; invalid once `filled` is called."""
        self._lent.release()
        if self._total:
            if self._filled == len(self._large):
                memory = bytearray(self._total if self._total < 3 * self._filled else 2 * self._filled)
                memory[: self._filled] = self._large
                self._large = memory
            self._lent = memoryview(self._large)[self._filled : self._total]
        else:
            if self._begin:
                self._inbox[: self._end - self._begin] = self._inbox[self._begin : self._end]
                self._begin, self._end = 0, self._end - self._begin
            self._lent = memoryview(self._inbox)[self._end :]
        return self._lent

    def filled(self, count: int) -> Iterator[Frame]:
        """Take `count` bytes in the last `buffer()`, and iterate over the frames that they complete."""
        self._lent.release()
        if self._total:
            self._filled += count
        else:
            self._end += count
        return self._frames()

    def _frames(self) -> Iterator[Frame]:
        if self._total:
            if self._filled == self._total:
                frame = self._whole()
                self._total = self._filled = 0
                yield frame
            return
        while total := self._size():
            begin, end = self._begin, self._begin + total
            if end > self._end:
                if total > len(self._inbox):
                    self._move_out(total)
                return
            self._begin = end
            yield self._inbox[begin:end]

    def _size(self) -> int:
        """Size of the frame at the beginning of the inbox; 0: too few bytes have come."""
        have = self._end - self._begin
        if have < 4:
            return 0
        length = int.from_bytes(self._inbox[self._begin : self._begin + 4], "little")
        if length > self.max_frame:
            raise WireError(f"frame of {length} bytes, expected at most {self.max_frame}", "frame")
        if length < 12 or (length + 4) % 8:
            raise WireError(f"frame of {length} bytes, expected 12, 20, 28, …", "frame")
        if have < _LENGTHS.size:
            return 0
        _, header = _LENGTHS.unpack_from(self._inbox, self._begin)
        most = min(MAX_HEADER, length - 4)
        if header > most:
            raise WireError(f"header of {header} bytes in a frame of {length}, expected at most {most}", "frame")
        return length + 4

    def _move_out(self, total: int) -> None:
        """Move the frame at the beginning of the inbox to memory of its own."""
        self._filled = self._end - self._begin
        self._large = self._spare_for(total) or bytearray(min(total, max(_FIRST * len(self._inbox), self._filled)))
        self._large[: self._filled] = self._inbox[self._begin : self._end]
        self._begin = self._end = 0
        self._total = total

    def _spare_for(self, total: int) -> bytearray | None:
        """Spare memory for a frame, not much larger, used as late as possible; if none fits, the oldest is freed."""
        spare = [self._spare.pop() for _ in range(len(self._spare))]  # a finalizer may add more meanwhile
        found = next((memory for memory in spare if total <= len(memory) <= 2 * total), None)
        self._spare.extendleft(memory for memory in spare[: None if found is not None else -1] if memory is not found)
        return found

    def _whole(self) -> NDArray[np.uint8]:
        """The large frame, u8[n], whose memory becomes spare once nothing refers to it."""
        memory, self._large = self._large, bytearray()
        frame = np.frombuffer(memory, np.uint8, self._total)
        weakref.finalize(frame, _keep, self._spare, memory).atexit = False
        return frame


def _keep(spare: deque[bytearray], memory: bytearray) -> None:
    """Add memory to the spare memory, unless that would become too large."""
    if sum(map(len, list(spare))) + len(memory) <= _MOST_SPARE_BYTES:
        spare.append(memory)


def _padded(count: int) -> int:
    return count + -count % 8
