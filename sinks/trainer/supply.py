"""Which of the items that have come are handed over together.

What waits is never changed in place: it is exchanged together with what was taken of it, or was added to it, by one
assignment, so that a signal whose handler raises loses nothing.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

from rollflow.sinks.trainer.source import Arrived, Source

_ByLane = dict[tuple[bytes, int], tuple[Arrived, ...]]


class FirstCome:
    """So many items at a time, in the order in which they came.

    count    None: one for every lane of the rollouts that are there, and what there is left of others

    waiting    items that have come, oldest first
    """

    def __init__(self, count: int | None) -> None:
        self.waiting: list[Arrived] = []
        self._count = count

    def has_newcomers(self, present: Sequence[Source]) -> bool:
        """Nobody waits to be let in."""
        return False

    def begin(self, present: Sequence[Source], version: int) -> bool:
        """Nobody is let in."""
        return False

    def joined(self, arrived: Iterable[Arrived]) -> list[Arrived]:
        """What waits, when these have come as well."""
        return [*self.waiting, *arrived]

    def take(self, present: Sequence[Source]) -> tuple[list[list[Arrived]], list[Arrived]]:
        """The next sets, and what waits then; none where they are not whole and more may come of some `present`."""
        count, waiting = self._size(present), self.waiting
        whole = len(waiting) // count if present else min(1, len(waiting))
        if self._count is None:
            whole = min(1, whole)  # the next may be of another size
        sets = [waiting[begin : begin + count] for begin in range(0, whole * count, count)]
        return sets, waiting[whole * count :]

    def _size(self, present: Sequence[Source]) -> int:
        """How many items are a set."""
        if self._count is not None:
            return self._count
        size = sum(source.streams for source in present)
        if len(self.waiting) >= size and (left := {arrived.source for arrived in self.waiting}.difference(present)):
            counts = Counter(arrived.source for arrived in self.waiting)
            size += sum(min(source.streams, counts[source]) for source in left)
        return max(1, size)


class Rounds:
    """One fragment of every lane at a time, each lane's next, or one train batch of every rollout.

    waiting    (token, lane) -> items that have come

    Of which lanes a round is to be is said when it begins: lanes that come meanwhile are in the next one, and one that
    is gone is in those for which it has given fragments.
    """

    def __init__(self) -> None:
        self.waiting: _ByLane = {}
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

    def joined(self, arrived: Iterable[Arrived]) -> _ByLane:
        """What waits, when these have come as well; one that was handed over before a restart is of a round before."""
        waiting = dict(self.waiting)
        for each in arrived:
            if each.number not in each.source.beyond:
                key = each.source.session.token, each.lane
                waiting[key] = (*waiting.get(key, ()), each)
        return waiting

    def take(self, present: Sequence[Source]) -> tuple[list[list[Arrived]], _ByLane]:
        """The next round, alone, and what waits then; none where it is not whole and others may come of `present`."""
        awaited = {(source.session.token, lane) for source in present for lane in source.awaited - source.gone}
        self._has_begun = not awaited <= self.waiting.keys()
        if self._has_begun or not self.waiting:
            return [], self.waiting
        taken = [items[0] for items in self.waiting.values()]
        return [taken], {key: items[1:] for key, items in self.waiting.items() if len(items) > 1}
