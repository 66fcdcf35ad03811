"""Resend buffer: messages that the trainer has not acknowledged yet."""

import logging
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from rollflow.nodes.argument_checks import checked_count
from rollflow.stream.data.loss_ledger import Origin
from rollflow.stream.wire import Fragment, SourceSession

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Entry:
    message: Fragment
    nbytes: int
    steps: int
    origins: Sequence[Origin]


class ResendBuffer:
    """Messages by their numbers 1, 2, …, until they are forgotten. From any thread.

    max_bytes    that are kept

    nbytes       of all
    needs        how many there is room for, however large they are
    """

    def __init__(self, max_bytes: int) -> None:
        self.nbytes, self.needs = 0, 1
        self.max_bytes = checked_count("max_bytes", max_bytes, 1)
        self._first = 1  # number of the oldest
        self._entries: deque[_Entry] = deque()
        self._lock = threading.Lock()
        self._has_warned = False

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def is_full(self) -> bool:
        """True if there is as much as may be."""
        return self.is_over and len(self) >= self.needs

    @property
    def is_over(self) -> bool:
        """True if there are as many bytes as may be, needed or not."""
        return self.nbytes >= self.max_bytes

    @property
    def nbytes_needed(self) -> int:
        """About as many bytes as those have that are needed at a time."""
        with self._lock:
            return self.nbytes * self.needs // max(1, len(self))

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
            self._entries.append(_Entry(message, nbytes, steps, origins))
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
            return sum(entry.message.lane == lane for entry in self._later_than(after))

    def _later_than(self, number: int) -> Iterator[_Entry]:
        return islice(self._entries, max(0, number + 1 - self._first), None)
