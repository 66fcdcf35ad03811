"""Resend buffer: messages that the trainer has not acknowledged yet, in memory or in files of a spill folder."""

import logging
import os
import tempfile
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from rollflow.nodes.argument_checks import checked_count
from rollflow.stream.data.errors import RunError
from rollflow.stream.data.loss_ledger import Origin
from rollflow.stream.wire import Fragment, FrameDecoder, SourceSession, decode, encode

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
class SpillLocation:
    """Place of a message in a segment."""

    segment: _Segment
    offset: int
    size: int


class SpillFolder:
    """Writes messages to files in a folder, which must be there, and reads them again.

    Raises RunError where that can't be, as when the disk is full.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._segment: _Segment | None = None

    def write(self, message: Fragment) -> SpillLocation:
        """Put a message on disk."""
        buffers = encode(message)
        try:
            if self._segment is None or self._segment.size >= _SEGMENT_BYTES:
                self._segment = _Segment(self._folder)
            segment = self._segment
            place = SpillLocation(segment, segment.size, sum(map(len, buffers)))
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

    def read(self, place: SpillLocation) -> Fragment:
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


logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Entry:
    """A message, in memory or on disk."""

    at: Fragment | SpillLocation
    lane: int
    nbytes: int
    steps: int
    origins: Sequence[Origin]


class ResendBuffer:
    """Messages by their numbers 1, 2, …, until they are forgotten. From any thread.

    max_bytes    that are kept in memory
    spill        where the others go; None: nowhere, they are in memory all the same

    nbytes       of those in memory
    needs        how many there is room for in memory, however large they are
    """

    def __init__(self, max_bytes: int, spill: SpillFolder | None = None) -> None:
        self.nbytes, self.needs = 0, 1
        self.max_bytes, self._spill = checked_count("max_bytes", max_bytes, 1), spill
        self._count = 0  # of those in memory
        self._first = 1  # number of the oldest
        self._entries: deque[_Entry] = deque()
        self._lock = threading.Lock()
        self._has_warned = False

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def is_full(self) -> bool:
        """True if there is as much in memory as may be."""
        return self.is_over and self._count >= self.needs

    @property
    def is_over(self) -> bool:
        """True if there are as many bytes in memory as may be, needed or not."""
        return self.nbytes >= self.max_bytes

    @property
    def nbytes_needed(self) -> int:
        """About as many bytes as those have that are needed at a time."""
        with self._lock:
            return self.nbytes * self.needs // max(1, self._count)

    def has_room(self, items: str) -> bool:
        """True if another may be added; logs once that more bytes than `max_bytes` are needed. `items` names them."""
        if self.is_full:
            return False
        if self.is_over and not self._has_warned:
            self._has_warned = True
            text = "the trainer needs %d %s at a time, of about %d bytes, more than max_bytes=%d: as many are kept"
            logger.warning(text, self.needs, items, self.nbytes_needed, self.max_bytes)
        return True

    @property
    def last(self) -> int:
        """The number given out last."""
        return self._first + len(self._entries) - 1

    def add(self, message: Fragment, nbytes: int, steps: int, origins: Sequence[Origin] = ()) -> None:
        """Keep the next one, with so many transitions, which are those of fragments with these origins."""
        with self._lock:
            assert message.number == self.last + 1
            self._entries.append(_Entry(message, message.lane, nbytes, steps, origins))
            self._hold(nbytes, 1)

    def get(self, number: int) -> Fragment:
        """One that is kept. Raises RunError where it can't be read."""
        with self._lock:
            at = self._entries[number - self._first].at
        if isinstance(at, Fragment):
            return at
        assert self._spill is not None
        return self._spill.read(at)

    def make_room(self, number: int) -> bool:
        """Put what need not be sent now, which are those up to this number, on disk, until there are less bytes.

        In the thread that calls `forget`. False: there was nothing to do. Raises RunError where that can't be.
        """
        if self._spill is None or not self.is_over:
            return False
        has_put = False
        with self._lock:
            entries = list(islice(self._entries, max(0, number + 1 - self._first)))
        for entry in entries:
            if not self.is_over:
                break
            if isinstance(entry.at, Fragment):
                place = self._spill.write(entry.at)  # without the lock: it may take long
                with self._lock:
                    entry.at = place
                    self._hold(-entry.nbytes, -1)
                has_put = True
        return has_put

    def forget(self, number: int) -> None:
        """Keep nothing up to this number."""
        with self._lock:
            while self._entries and self._first <= number:
                entry = self._entries.popleft()
                self._first += 1
                if isinstance(entry.at, Fragment):
                    self._hold(-entry.nbytes, -1)

    def held_back(self, session: SourceSession, items: str) -> str:
        """The reason for which a trainer that is there takes no more, for people; `items` names what it is sent."""
        if self.is_full:
            awaits_ack = session.done > session.kept
            until = "acknowledges them, by ack() or by moving on" if awaits_ack else "moves on from them"
            return f"{self.nbytes} bytes are kept until it {until}; max_bytes is {self.max_bytes}"
        return f"it has {session.given - session.done} {items} that it has not moved on from"

    def steps(self, after: int) -> int:
        """Transitions in those with numbers greater than `after`."""
        with self._lock:
            return sum(entry.steps for entry in self._later_than(after))

    def origins(self, after: int) -> list[Origin]:
        """The origins of the fragments in those with numbers greater than `after`."""
        with self._lock:
            return [origin for entry in self._later_than(after) for origin in entry.origins]

    def count(self, lane: int, after: int) -> int:
        """Number of messages of a lane with numbers greater than `after`."""
        with self._lock:
            return sum(entry.lane == lane for entry in self._later_than(after))

    def _hold(self, nbytes: int, count: int) -> None:
        """So many more are in memory, or fewer."""
        self.nbytes += nbytes
        self._count += count

    def _later_than(self, number: int) -> Iterator[_Entry]:
        return islice(self._entries, max(0, number + 1 - self._first), None)
