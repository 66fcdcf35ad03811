"""What every node and edge counts, always: plain integers, written by whoever does the work."""

from time import perf_counter_ns
from typing import Final

clock: Final = perf_counter_ns


class NodeMeter:
    """One node's counters.

        items         taken in, or for a source given out
        busy_ns       time in the node's own work
        blocked_ns    time in which an outlet of the node waited for room

    What is left of the elapsed time is idle: waiting for items, or for the turn of others in the same task. A
    synchronous node adds up its calls; an asynchronous one lives from `begin_life` to `end_life` and is busy whenever
    it neither waits nor is blocked. Where several tasks of a node wait at once, that is one wait, from the first to
    the last.
    """

    __slots__ = (
        "_blocked",
        "_blocked_since",
        "_lives_since",
        "_waiting",
        "_waits_since",
        "blocked_ns",
        "busy_ns",
        "items",
        "name",
    )

    def __init__(self, name: str) -> None:
        self.name = name
        self.items = 0
        self.busy_ns = 0
        self.blocked_ns = 0
        self._lives_since: int | None = None
        self._waits_since: int | None = None
        self._blocked_since: int | None = None
        self._waiting = 0
        self._blocked = 0

    def begin_life(self) -> None:
        """From now on the node is busy, but for its waits; of one that lives this changes nothing."""
        if self._lives_since is None:
            self._lives_since = clock()
            if self._waiting:
                self._waits_since = self._lives_since

    def end_life(self) -> None:
        """The node is busy no more."""
        self.busy_ns, self.blocked_ns = self.read()
        self._lives_since = self._waits_since = self._blocked_since = None

    def begin_wait(self) -> None:
        """From now on the node waits for an item."""
        if not self._waiting:
            self._waits_since = clock()
        self._waiting += 1

    def end_wait(self) -> None:
        """The wait is over."""
        self._waiting -= 1
        if not self._waiting:
            if self._waits_since is not None and self._lives_since is not None:
                self.busy_ns -= clock() - self._waits_since
            self._waits_since = None

    def begin_block(self) -> None:
        """From now on the node waits for room."""
        if not self._blocked:
            self._blocked_since = clock()
        self._blocked += 1

    def end_block(self) -> None:
        """There is room."""
        self._blocked -= 1
        if not self._blocked:
            if self._blocked_since is not None:
                blocked = clock() - self._blocked_since
                self.blocked_ns += blocked
                if self._lives_since is not None:
                    self.busy_ns -= blocked
            self._blocked_since = None

    def read(self) -> tuple[int, int]:
        """busy_ns and blocked_ns as of now, what is under way included."""
        now, busy, blocked = clock(), self.busy_ns, self.blocked_ns
        lives, waits, blocks = self._lives_since, self._waits_since, self._blocked_since
        if blocks is not None:
            blocked += now - blocks
        if lives is not None:
            busy += now - lives
            busy -= 0 if waits is None else now - waits
            busy -= 0 if blocks is None else now - blocks
        return max(busy, 0), blocked


class EdgeMeter:
    """One channel's counters.

    items            taken in
    dropped          thrown away by the overflow policy
    peak             most items held at a time
    blocked_count    how often a sender had to wait
    full_ns          time in which the channel was full
    item_ns          integral of the items held over time
    """

    __slots__ = (
        "_held",
        "_since",
        "blocked_count",
        "capacity",
        "dropped",
        "full_ns",
        "item_ns",
        "items",
        "name",
        "peak",
    )

    def __init__(self, name: str, capacity: int) -> None:
        self.name = name
        self.capacity = capacity
        self.items = 0
        self.dropped = 0
        self.peak = 0
        self.blocked_count = 0
        self.full_ns = 0
        self.item_ns = 0
        self._held = 0
        self._since = clock()

    def holds(self, count: int) -> None:
        """From now on the channel holds `count` items."""
        now = clock()
        held, self._held = self._held, count
        elapsed = now - self._since
        self._since = now
        self.item_ns += held * elapsed
        if held >= self.capacity:
            self.full_ns += elapsed
        if count > self.peak:
            self.peak = count

    @property
    def held(self) -> int:
        """Items held now."""
        return self._held

    def read(self) -> tuple[int, int]:
        """item_ns and full_ns as of now."""
        held, elapsed = self._held, clock() - self._since
        return self.item_ns + held * elapsed, self.full_ns + (elapsed if held >= self.capacity else 0)
