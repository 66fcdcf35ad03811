"""Frames: a header and arrays, as bytes that may come in any pieces.

    u32 length of all that follows | u32 length of the header | header, msgpack | zeros | arrays, with zeros between

Both numbers are little-endian. Header and arrays are filled up with zeros to multiples of 8 bytes, counted from the
frame's first byte, so that a frame in aligned memory has aligned arrays.
"""

import struct
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollflow.stream.errors import WireError
from rollflow.stream.wire.limits import MAX_HEADER

Buffer = bytes | memoryview
Frame = bytearray | NDArray[np.uint8]  # as it came: a large one is an array

_LENGTHS = struct.Struct("<II")
_INBOX = 64 << 10  # bytes that are received at a time where no large frame is under way
_FIRST = 256 << 10  # bytes that are set aside for a large frame before more of it has come
_MOST_SPARE, _MOST_SPARE_BYTES = 8, 512 << 20  # large frames whose memory is kept for others
_COPIED = 16 << 10  # bytes of an array up to which it is copied rather than sent by itself


def frame_of(header: bytes, arrays: Sequence[NDArray[np.uint8]] = ()) -> list[Buffer]:
    """The bytes of a frame, in buffers one after the other.

    arrays    u8[n] each, C order; large ones are referred to, not copied: they must stay as they are until sent

    Raises WireError when the header or the frame is larger than its length can say.
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
    """A whole frame's header, and the body behind it as u8[n], a view."""
    whole = np.frombuffer(frame, np.uint8)
    _, length = _LENGTHS.unpack_from(whole.data)
    begin = _LENGTHS.size
    return whole[begin : begin + length].tobytes(), whole[_padded(begin + length) :]


class FrameDecoder:
    """Cuts what is received into frames.

    max_frame    bytes of a frame that are taken, behind the length itself; may be changed between frames

    Either `feed` it with what has come, or receive into `buffer()` and tell how much came with `filled`. Both give an
    iterator of frames, to be exhausted before anything more is received; it raises WireError at a frame that is
    refused, and the decoder is of no use from then on. Each frame, its lengths included, has memory of its own. Memory
    for a large frame grows with what has come of it, or is that of another one that nobody refers to any more: memory
    that the system has to find anew for each frame takes longer than the bytes themselves.
    """

    def __init__(self, max_frame: int) -> None:
        self.max_frame = max_frame
        self._inbox = bytearray(_INBOX)
        self._begin = self._end = 0  # of what is in the inbox
        self._large = bytearray()  # a frame that does not fit into the inbox
        self._total = 0  # bytes of it; 0: there is none
        self._filled = 0
        self._lent = memoryview(b"")
        self._spare: deque[bytearray] = deque(maxlen=_MOST_SPARE)  # of large frames that are no more

    @property
    def half(self) -> int:
        """Bytes that have come of a frame that is not complete."""
        return self._filled + self._end - self._begin

    @property
    def allocated(self) -> int:
        """Bytes set aside for what comes."""
        return len(self._inbox) + len(self._large)

    def feed(self, data: bytes | bytearray | memoryview) -> Iterator[Frame]:
        """Take bytes, and iterate over the frames that are complete with them."""
        rest = memoryview(data).cast("B")
        while rest:
            room = self.buffer()
            count = min(len(room), len(rest))
            room[:count] = rest[:count]
            rest = rest[count:]
            yield from self.filled(count)

    def buffer(self) -> memoryview:
        """Where to receive to, at least one byte; not to be held on to once `filled` is called."""
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
        """So many bytes have been put into the last `buffer()`: iterate over the frames that are complete with them."""
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
        """Bytes of the frame that the inbox begins with; 0: too little has come to tell."""
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
        """Give the frame that the inbox begins with memory of its own."""
        self._filled = self._end - self._begin
        self._large = self._found(total) or bytearray(min(total, max(_FIRST, self._filled)))
        self._large[: self._filled] = self._inbox[self._begin : self._end]
        self._begin = self._end = 0
        self._total = total

    def _found(self, total: int) -> bytearray | None:
        """Spare memory for a frame, not much larger: what was used last. Where none fits, the oldest is given back."""
        spare = [self._spare.pop() for _ in range(len(self._spare))]  # more may come meanwhile
        found = next((memory for memory in spare if total <= len(memory) <= 2 * total), None)
        self._spare.extendleft(memory for memory in spare[: None if found is not None else -1] if memory is not found)
        return found

    def _whole(self) -> NDArray[np.uint8]:
        """The large frame, whose memory is spare once nobody refers to it."""
        memory, self._large = self._large, bytearray()
        frame = np.frombuffer(memory, np.uint8, self._total)
        weakref.finalize(frame, _keep, self._spare, memory).atexit = False
        return frame


def _keep(spare: deque[bytearray], memory: bytearray) -> None:
    """Have memory be spare, where it is not too much together with the rest."""
    if sum(map(len, list(spare))) + len(memory) <= _MOST_SPARE_BYTES:
        spare.append(memory)


def _padded(count: int) -> int:
    return count + -count % 8
