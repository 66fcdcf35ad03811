"""Which of the items that have come are handed over together."""

from collections import Counter, deque
from collections.abc import Sequence

from rollflow.sinks.trainer.source import Arrived, Source


class FirstCome:
    """So many items at a time, in the order in which they came.

    count    None: one for every lane of the rollouts that are there, and what there is left of others
    """

    def __init__(self, count: int | None) -> None:
        self._count = count
        self._waiting: deque[Arrived] = deque()
        self._counts: Counter[Source] = Counter()  # of those that wait, by whose they are

    def add(self, arrived: Arrived) -> None:
        """Take an item in."""
        self._waiting.append(arrived)
        self._counts[arrived.source] += 1

    def take(self, present: Sequence[Source]) -> list[Arrived]:
        """The next items; none where they are not all there and others may come from those that are `present`."""
        count = self._count or max(1, sum(map(self._share, {*present, *self._counts})))
        if len(self._waiting) < count and present:
            return []
        taken = [self._waiting.popleft() for _ in range(min(count, len(self._waiting)))]
        for arrived in taken:
            self._counts[arrived.source] -= 1
            if not self._counts[arrived.source]:
                del self._counts[arrived.source]
        return taken

    def _share(self, source: Source) -> int:
        """How many items of a rollout belong to a set."""
        return source.streams if source.is_present else min(source.streams, self._counts[source])


class Rounds:
    """One fragment of every lane at a time, each lane's next, or one train batch of every rollout."""

    def __init__(self) -> None:
        self._waiting: dict[tuple[bytes, int], deque[Arrived]] = {}

    def add(self, arrived: Arrived) -> None:
        """Take an item in."""
        self._waiting.setdefault((arrived.source.session.token, arrived.lane), deque()).append(arrived)

    def take(self, present: Sequence[Source]) -> list[Arrived]:
        """The next round; none where it is not whole and others may come from those that are `present`."""
        for source in present:
            token = source.session.token
            lanes = sum(each == token and not source.is_gone(lane) for each, lane in self._waiting)
            if lanes < source.streams:
                return []
        taken = [items.popleft() for items in self._waiting.values()]
        self._waiting = {key: items for key, items in self._waiting.items() if items}
        return taken
