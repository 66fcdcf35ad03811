"""What a source has given to a trainer and may have to send again."""

import threading
from collections import deque
from dataclasses import dataclass

from rollflow.stream.wire import Fragment


@dataclass(frozen=True, slots=True)
class _Entry:
    message: Fragment
    nbytes: int
    steps: int


class Kept:
    """Messages by their numbers 1, 2, …, until they are forgotten. From any thread.

    nbytes    of all that are kept
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self._first = 1  # number of the oldest
        self._entries: deque[_Entry] = deque()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def last(self) -> int:
        """The number given out last."""
        return self._first + len(self._entries) - 1

    def add(self, message: Fragment, nbytes: int, steps: int) -> None:
        """Keep the next one, with so many transitions."""
        with self._lock:
            assert message.number == self.last + 1
            self._entries.append(_Entry(message, nbytes, steps))
            self.nbytes += nbytes

    def get(self, number: int) -> Fragment:
        """One that is kept."""
        with self._lock:
            return self._entries[number - self._first].message

    def forget(self, number: int) -> None:
        """Keep nothing up to this number."""
        with self._lock:
            while self._entries and self._first <= number:
                self.nbytes -= self._entries.popleft().nbytes
                self._first += 1

    def steps(self, after: int) -> int:
        """Transitions in those with numbers greater than `after`."""
        with self._lock:
            return sum(entry.steps for entry in self._entries if entry.message.number > after)

    def count(self, lane: int, after: int) -> int:
        """How many of a lane there are with numbers greater than `after`."""
        with self._lock:
            return sum(entry.message.lane == lane and entry.message.number > after for entry in self._entries)
