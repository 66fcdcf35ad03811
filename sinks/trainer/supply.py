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

    def has_newcomers(self, present: Sequence[Source]) -> bool:
        """Nobody waits to be let in."""
        return False

    def begin(self, present: Sequence[Source], version: int) -> bool:
        """Nobody is let in."""
        return False

    def add(self, arrived: Arrived) -> None:
        """Take an item in."""
        self._waiting.append(arrived)
        self._counts[arrived.source] += 1

    def take(self, present: Sequence[Source]) -> list[list[Arrived]]:
        """The next sets; none where they are not all there and others may come from those that are `present`."""
        count = self._count or max(1, sum(map(self._share, {*present, *self._counts})))
        sets = len(self._waiting) // count if present else min(1, len(self._waiting))
        return [[self._taken() for _ in range(min(count, len(self._waiting)))] for _ in range(sets)]

    def _taken(self) -> Arrived:
        arrived = self._waiting.popleft()
        self._counts[arrived.source] -= 1
        if not self._counts[arrived.source]:
            del self._counts[arrived.source]
        return arrived

    def _share(self, source: Source) -> int:
        """How many items of a rollout belong to a set."""
        return source.streams if source.is_present else min(source.streams, self._counts[source])


class Rounds:
    """One fragment of every lane at a time, each lane's next, or one train batch of every rollout.

    Of which lanes a round is to be is said when it begins: lanes that come meanwhile are in the next one, and one that
    is gone is in those for which it has given fragments.
    """

    def __init__(self) -> None:
        self._waiting: dict[tuple[bytes, int], deque[Arrived]] = {}
        self._has_begun = False

    def has_newcomers(self, present: Sequence[Source]) -> bool:
        """Whether there are lanes that no round has had yet."""
        return any(source.lanes - source.gone - source.awaited for source in present)

    def begin(self, present: Sequence[Source], version: int) -> bool:
        """Have the next round be of all lanes that there are now, unless one is waited for; whether these are others.

        version    the newest policy version, when the trainer has nothing in its hands that it may publish for
        """
        if self._has_begun and any(source.awaited - source.gone for source in present):
            return False
        return any([source.await_all(version) for source in present])

    def add(self, arrived: Arrived) -> None:
        """Take an item in; one that was handed over before a restart belongs to a round that is over."""
        if arrived.number in arrived.source.beyond:
            return
        self._waiting.setdefault((arrived.source.session.token, arrived.lane), deque()).append(arrived)

    def take(self, present: Sequence[Source]) -> list[list[Arrived]]:
        """The next round, alone; none where it is not whole and others may come from those that are `present`."""
        awaited = {(source.session.token, lane) for source in present for lane in source.awaited - source.gone}
        self._has_begun = not awaited <= self._waiting.keys()
        if self._has_begun:
            return []
        taken = [items.popleft() for items in self._waiting.values()]
        self._waiting = {key: items for key, items in self._waiting.items() if items}
        return [taken] if taken else []
