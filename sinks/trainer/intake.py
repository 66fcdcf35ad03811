"""Intake of a trainer: items that have come, gathered into those that are handed over together."""

import logging
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

from rollflow.sinks.trainer.listener import TrainerListener
from rollflow.sinks.trainer.rollout_peer import ArrivedItem, PeerLife, RolloutPeer
from rollflow.stream.data.errors import RunError
from rollflow.stream.net.backoff import WaitReminder

_ByLane = dict[tuple[bytes, int], tuple[ArrivedItem, ...]]

logger = logging.getLogger(__name__)


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


class Intake:
    """Items that have come to a listener, in the order in which the trainer gets them.

    listener       takes rollouts in
    supply         says which items go together
    is_gathered    whether items that go together are handed over as one, and not one by one
    sources        number of rollouts that are waited for; None: 0, and more may come at any time
    acks           whether a rollout may forget items that are done with
    where          gives the address where they are waited for, for people
    """

    def __init__(
        self,
        listener: TrainerListener,
        supply: ArrivalOrder | LaneRounds,
        *,
        is_gathered: bool,
        sources: int | None,
        acks: bool,
        where: Callable[[], str],
    ) -> None:
        self.listener = listener
        self._supply, self._is_gathered = supply, is_gathered
        self._sets: list[list[ArrivedItem]] = []  # to be handed over after `_taken`
        self._taken: deque[ArrivedItem] = deque()  # together, and not handed over yet
        self._left_out: list[ArrivedItem] = []  # of them
        self._awaited, self._acks, self._where = sources, acks, where
        self._has_begun = self._expects_no_more = False

    def try_take(self, patience: WaitReminder) -> list[ArrivedItem] | None:
        """Items that are handed over next, until `forget`; none while they are waited for, None if no more come.

        Raises RunError if no rollout comes.
        """
        while (error := self.listener.error) is None:
            if not (self._taken or self._sets):
                self.listener.bell.silence()
                with self.listener.lock:
                    present = self.listener.present
                    if not self._has_looked(present, patience):
                        return []
                    if not self._sets:
                        return self._none_or_not_yet(present, patience)
            if not self._taken:
                self._taken, self._sets = deque(self._sets[0]), self._sets[1:]
            if admitted := self._admitted():
                return admitted
        raise error

    def forget(self, items: Sequence[ArrivedItem]) -> list[ArrivedItem]:
        """Go on behind items that were taken last; those left out among them, to be done with when these are."""
        for _ in items:
            self._taken.popleft()
        left_out, self._left_out = self._left_out, []
        return left_out

    def be_done_with(self, items: Sequence[ArrivedItem]) -> None:
        """Be done with items, and tell their rollouts."""
        sources = set()
        with self.listener.lock:
            for arrived in items:
                sources.add(arrived.source)
                arrived.source.move_on(arrived.number)
                if self._acks:
                    arrived.source.keep()
        self.listener.tell_done(sources)

    def expect_no_more(self) -> None:
        """Wait no more for rollouts that are not there. From any thread."""
        self._expects_no_more = True
        self.listener.bell.ring()
        self.listener.wake()  # another thread may be serving there

    def keep(self, state: Mapping[str, Any] | None = None) -> None:
        """Let rollouts forget all items that are done with; of these, only those that a `state_dict` has."""
        saved = None if state is None else {token: entry["done"] for token, entry in state["sources"].items()}
        with self.listener.lock:
            for token, source in self.listener.sources.items():
                source.keep(None if saved is None else saved.get(token.hex(), 0))
        self.listener.wake()

    def refuse(self, items: Sequence[ArrivedItem], reason: str) -> None:
        """Refuse the rollouts that sent items which can't be taken."""
        with self.listener.lock:
            for arrived in items:
                if arrived.source.connection is not None:
                    arrived.source.connection.refuse("fragment", reason)
        self.listener.wake()

    def _has_looked(self, present: Collection[RolloutPeer], patience: WaitReminder) -> bool:
        """Gather items that have come; False: not as many rollouts have come as are waited for."""
        if self.listener.arrived:
            joined = self._supply.joined(self.listener.arrived)
            self._supply.waiting, self.listener.arrived = joined, []
            patience.restart()
        if self._supply.begin(present, self.listener.weights.version):
            self.listener.wake()
        if not self._has_begun and not self._is_enough(present, patience):
            return False
        self._sets, self._supply.waiting = self._supply.take(present)
        return True

    def _admitted(self) -> list[ArrivedItem]:
        """Items taken for a batch, or the first of them, but for those that are too old or left out."""
        most, admitted = len(self._taken) if self._is_gathered else 1, list[ArrivedItem]()
        has_published = self.listener.weights.published is not None
        while len(admitted) < most and len(admitted) < len(self._taken):
            arrived = self._taken[len(admitted)]
            version = self.listener.weights.version
            if not arrived.is_left_out and self.listener.bound.admits(arrived, version, has_published=has_published):
                admitted.append(arrived)
                continue
            del self._taken[len(admitted)]
            self._left_out.append(arrived)
        if not admitted:
            self.be_done_with(self._left_out)
            self._left_out = []
        return admitted

    def _is_enough(self, present: Collection[RolloutPeer], patience: WaitReminder) -> bool:
        """True once as many rollouts have come as are waited for. Raises RunError where they have not in time."""
        self._has_begun = self._expects_no_more or len(self.listener.come) >= (self._awaited or 0)
        if self._has_begun:
            return True
        count = f"{len(present)} of {self._awaited} rollouts came"
        if patience.is_over:
            raise RunError(f"{count} within {patience.limit:g} s: {self._waiting_text()}")
        if patience.is_long:
            most = "any time" if patience.limit is None else f"{patience.limit:g} s"
            waited = f"waiting for {patience.waited_s:.0f} s: {count} so far"
            logger.warning("%s, others have %s (join_timeout): %s", waited, most, self._waiting_text())
        return False

    def _none_or_not_yet(self, present: Collection[RolloutPeer], patience: WaitReminder) -> list[ArrivedItem] | None:
        """None where no more items come, else none yet. Raises RunError where all rollouts are lost, for too long."""
        if present:
            if patience.is_long:
                places = "; ".join(source.whereabouts(self.listener.limits.grace_s) for source in islice(present, 4))
                count = f"{len(present)} rollouts" if len(present) > 1 else "one rollout"
                logger.warning("nothing to hand over for %.0f s, of %s: %s", patience.waited_s, count, places)
            patience.restart()
            return []
        if self._awaited is None and not self._expects_no_more:
            return []
        lost = [source for source in self.listener.sources.values() if source.life is PeerLife.LOST]
        in_their_place = len(self.listener.come) - len(lost)
        if not lost or self._expects_no_more or in_their_place >= (self._awaited or 0):
            logger.info("all rollouts have ended, and all that came of them was handed over: the loop ends")
            return None
        if patience.is_over:
            names = "; ".join(f"{source.name}: {source.reason}" for source in lost)
            raise RunError(
                f"every rollout is lost and none came within {patience.limit:g} s: {names}: {self._waiting_text()}"
            ).see("trainer away")
        return []

    def _waiting_text(self) -> str:
        return "; ".join([f"listening on {self._where()}", *self.listener.refusals])
