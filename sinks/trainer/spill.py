"""Messages on disk, for as long as a trainer may want them again."""

import os
import tempfile
import weakref
from dataclasses import dataclass
from pathlib import Path

from rollflow.stream.errors import RunError
from rollflow.stream.wire import Fragment, FrameDecoder, decode, encode

_SEGMENT_BYTES = 64 << 20


class _Segment:
    """A file that no folder lists: the system takes it back when nothing in it is wanted any more, or the process ends.

    size    bytes written so far
    """

    def __init__(self, folder: Path) -> None:
        self.size = 0
        with tempfile.TemporaryFile(dir=folder) as file:
            self.fd = os.dup(file.fileno())
        weakref.finalize(self, os.close, self.fd)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a message lies."""

    segment: _Segment
    offset: int
    size: int


class Spill:
    """Writes messages to files in a folder, which must be there, and reads them again.

    Raises RunError where that can't be, as when the disk is full.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._segment: _Segment | None = None

    def write(self, message: Fragment) -> Place:
        """Put a message on disk."""
        buffers = encode(message)
        try:
            if self._segment is None or self._segment.size >= _SEGMENT_BYTES:
                self._segment = _Segment(self._folder)
            segment = self._segment
            place = Place(segment, segment.size, sum(map(len, buffers)))
            offset = place.offset
            for buffer in buffers:
                rest = memoryview(buffer).cast("B")
                while rest:
                    written = os.pwrite(segment.fd, rest, offset)
                    offset, rest = offset + written, rest[written:]
        except OSError as error:
            raise RunError(f"fragments can't be kept in {self._folder}: {error.strerror or error}") from error
        segment.size += place.size
        return place

    def read(self, place: Place) -> Fragment:
        """The message at a place."""
        decoder = FrameDecoder(place.size)
        try:
            data = os.pread(place.segment.fd, place.size, place.offset)
        except OSError as error:
            raise RunError(f"fragments can't be read in {self._folder}: {error.strerror or error}") from error
        [frame] = decoder.feed(data)
        message = decode(frame)
        assert isinstance(message, Fragment)
        return message
