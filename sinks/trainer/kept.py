"""What a source has given to a trainer and may have to send again."""

import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from rollflow.sinks.trainer.spill import Place, Spill
from rollflow.stream.wire import Fragment


@dataclass(slots=True)
class _Entry:
    """A message, in memory or on disk."""

    at: Fragment | Place
    lane: int
    nbytes: int
    steps: int


class Kept:
    """Messages by their numbers 1, 2, …, until they are forgotten. From any thread.

    max_bytes    that are kept in memory
    spill        where the others go; None: nowhere, they are in memory all the same

    nbytes       of those in memory
    needs        how many there is room for in memory, however large they are
    """

    def __init__(self, max_bytes: int, spill: Spill | None = None) -> None:
        self.nbytes, self.needs = 0, 1
        self.max_bytes, self._spill = max_bytes, spill
        self._count = 0  # of those in memory
        self._first = 1  # number of the oldest
        self._entries: deque[_Entry] = deque()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def is_full(self) -> bool:
        """Whether there is as much in memory as may be."""
        return self.is_over and self._count >= self.needs

    @property
    def is_over(self) -> bool:
        """Whether there are as many bytes in memory as may be, needed or not."""
        return self.nbytes >= self.max_bytes

    @property
    def nbytes_needed(self) -> int:
        """About as many bytes as those have that are needed at a time."""
        with self._lock:
            return self.nbytes * self.needs // max(1, self._count)

    @property
    def last(self) -> int:
        """The number given out last."""
        return self._first + len(self._entries) - 1

    def add(self, message: Fragment, nbytes: int, steps: int) -> None:
        """Keep the next one, with so many transitions."""
        with self._lock:
            assert message.number == self.last + 1
            self._entries.append(_Entry(message, message.lane, nbytes, steps))
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

    def steps(self, after: int) -> int:
        """Transitions in those with numbers greater than `after`."""
        with self._lock:
            return sum(entry.steps for entry in self._later_than(after))

    def count(self, lane: int, after: int) -> int:
        """How many of a lane there are with numbers greater than `after`."""
        with self._lock:
            return sum(entry.lane == lane for entry in self._later_than(after))

    def _hold(self, nbytes: int, count: int) -> None:
        """So many more are in memory, or fewer."""
        self.nbytes += nbytes
        self._count += count

    def _later_than(self, number: int) -> Iterator[_Entry]:
        return islice(self._entries, max(0, number + 1 - self._first), None)
