"""Intake of a trainer: which of the items that have come are handed over together."""

from collections import Counter
from collections.abc import Collection, Iterable

from rollflow.sinks.trainer.rollout_peer import ArrivedItem, RolloutPeer

_ByLane = dict[tuple[bytes, int], tuple[ArrivedItem, ...]]


class ArrivalOrder:
    """Sets of `count` items, in the order in which they came.

    count    None: one for every lane of the rollouts that are there, and what is left of others

    waiting    items that have come, oldest first
    """

    def __init__(self, count: int | None) -> None:
        self.waiting: list[ArrivedItem] = []
        self._count = count

    def begin(self, present: Collection[RolloutPeer], version: int) -> bool:
        """False: the lanes that take part do not change here."""
        return False

    def joined(self, arrived: Iterable[ArrivedItem]) -> list[ArrivedItem]:
        """Waiting items, with `arrived` added."""
        return [*self.waiting, *arrived]

    def take(self, present: Collection[RolloutPeer]) -> tuple[list[list[ArrivedItem]], list[ArrivedItem]]:
        """Next sets, and the items that wait then; no sets unless one is whole, or no rollout is `present` any more."""
        count, waiting = self._size(present), self.waiting
        num_sets = len(waiting) // count if present else min(1, len(waiting))
        if self._count is None:
            num_sets = min(1, num_sets)  # the next may be of another size
        sets = [waiting[begin : begin + count] for begin in range(0, num_sets * count, count)]
        return sets, waiting[num_sets * count :]

    def _size(self, present: Collection[RolloutPeer]) -> int:
        """Number of items in a set."""
        if self._count is not None:
            return self._count
        size = sum(source.streams for source in present)
        if len(self.waiting) >= size and (left := {arrived.source for arrived in self.waiting}.difference(present)):
            counts = Counter(arrived.source for arrived in self.waiting)
            size += sum(min(source.streams, counts[source]) for source in left)
        return max(1, size)


class LaneRounds:
    """Rounds of one fragment of every lane, each lane's next, or of one train batch of every rollout.

    waiting    (token, lane) -> items that have come

    The lanes of a round are settled when it begins. A lane that comes meanwhile is in the next one; a lane that is gone
    is in those for which it has given fragments.
    """

    def __init__(self) -> None:
        self.waiting: _ByLane = {}
        self._has_begun = False

    def begin(self, present: Collection[RolloutPeer], version: int) -> bool:
        """Let the next round be of all lanes that there are now, unless a round has begun; True if they have changed.

        version    newest policy version, when the trainer has no batch that it may publish for
        """
        if self._has_begun and any(source.awaited - source.gone for source in present):
            return False
        return any([source.await_all(version) for source in present])

    def joined(self, arrived: Iterable[ArrivedItem]) -> _ByLane:
        """Waiting items, with `arrived` added but for those that were handed over before a restart."""
        waiting = dict(self.waiting)
        for each in arrived:
            if each.number not in each.source.beyond:
                key = each.source.session.token, each.lane
                waiting[key] = (*waiting.get(key, ()), each)
        return waiting

    def take(self, present: Collection[RolloutPeer]) -> tuple[list[list[ArrivedItem]], _ByLane]:
        """Next round, alone, and the items that wait then; no round unless it has all lanes that are waited for."""
        awaited = {(source.session.token, lane) for source in present for lane in source.awaited - source.gone}
        self._has_begun = not awaited <= self.waiting.keys()
        if self._has_begun or not self.waiting:
            return [], self.waiting
        taken = [items[0] for items in self.waiting.values()]
        return [taken], {key: items[1:] for key, items in self.waiting.items() if len(items) > 1}
