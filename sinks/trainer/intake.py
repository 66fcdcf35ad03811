"""What has come to a trainer, gathered to what is handed over together."""

import logging
from collections import deque
from collections.abc import Callable, Sequence

from rollflow.sinks.trainer.age import AgeBound
from rollflow.sinks.trainer.door import Door
from rollflow.sinks.trainer.patience import Patience
from rollflow.sinks.trainer.source import Arrived, Source
from rollflow.sinks.trainer.supply import FirstCome, Rounds
from rollflow.stream.errors import RunError

logger = logging.getLogger(__name__)


class Intake:
    """Takes what has come through a door.

    door           where rollouts come in
    supply         which of it goes together
    age            how old it may be
    is_gathered    whether what goes together is handed over as one, and not one by one
    sources        how many rollouts are waited for
    acks           whether a rollout may forget what is done with
    where          says where they are waited for
    """

    def __init__(
        self,
        door: Door,
        supply: FirstCome | Rounds,
        age: AgeBound,
        *,
        is_gathered: bool,
        sources: int,
        acks: bool,
        where: Callable[[], str],
    ) -> None:
        self.door, self.age = door, age
        self._supply, self._is_gathered = supply, is_gathered
        self._sets: list[list[Arrived]] = []  # to be handed over after `_taken`
        self._taken: deque[Arrived] = deque()  # together, and not handed over yet
        self._left_out: list[Arrived] = []  # of them
        self._awaited, self._acks, self._where = sources, acks, where
        self._has_begun = self._expects_no_more = False

    @property
    def has_newcomers(self) -> bool:
        """Whether somebody waits to be let in when the trainer has nothing in its hands."""
        with self.door.lock:
            return self._supply.has_newcomers(self.door.present)

    def try_take(self, patience: Patience, *, may_begin: bool = True) -> list[Arrived] | None:
        """What is handed over next, until it is forgotten; nothing where it is waited for, None where none comes.

        may_begin    whether the trainer has nothing in its hands: then those who wait for that are let in

        Raises RunError where nobody comes.
        """
        while (error := self.door.error) is None:
            if not (self._taken or self._sets):
                self.door.bell.silence()
                with self.door.lock:
                    present = self.door.present
                    if not self._has_looked(present, patience, may_begin=may_begin):
                        return []
                    if not self._sets:
                        return self._none_or_not_yet(present, patience)
            if not self._taken:
                self._taken, self._sets = deque(self._sets[0]), self._sets[1:]
            if admitted := self._admitted():
                return admitted
        raise error

    def forget(self, items: Sequence[Arrived]) -> list[Arrived]:
        """Go on behind these, which were taken last; what was left out between them, and is done with when they are."""
        for _ in items:
            self._taken.popleft()
        left_out, self._left_out = self._left_out, []
        return left_out

    def be_done_with(self, items: Sequence[Arrived]) -> None:
        """Want no more of these."""
        sources = set()
        with self.door.lock:
            for arrived in items:
                sources.add(arrived.source)
                arrived.source.move_on(arrived.number)
                if self._acks:
                    arrived.source.keep()
        self.door.tell_done(sources)

    def hold(self, items: int) -> None:
        """Have rollouts send as much more: so many items may be on their way to loops in other processes."""
        self.door.widen(items)

    def expect_no_more(self) -> None:
        """Wait for no rollout any more that is not there. From any thread."""
        self._expects_no_more = True
        self.door.bell.ring()
        self.door.wake()  # whoever waits may be at the door

    def keep(self) -> None:
        """Never want again what is done with."""
        with self.door.lock:
            for source in self.door.sources.values():
                source.keep()
        self.door.wake()

    def _has_looked(self, present: Sequence[Source], patience: Patience, *, may_begin: bool) -> bool:
        """Gather what has come; False: not as many rollouts have come as are waited for."""
        if self.door.arrived:
            joined = self._supply.joined(self.door.arrived)
            self._supply.waiting, self.door.arrived = joined, []
            patience.restart()
        if may_begin and self._supply.begin(present, self.door.weights.version):
            self.door.wake()
        if not self._has_begun and not self._is_enough(present, patience):
            return False
        self._sets, self._supply.waiting = self._supply.take(present)
        return True

    def _admitted(self) -> list[Arrived]:
        """All of what was taken for a batch, or the first of it, but for what is too old or for nobody."""
        most, admitted = len(self._taken) if self._is_gathered else 1, list[Arrived]()
        has_published = self.door.weights.published is not None
        while len(admitted) < most and len(admitted) < len(self._taken):
            arrived = self._taken[len(admitted)]
            version = self.door.weights.version
            if not arrived.is_left_out and self.age.admits(arrived, version, has_published=has_published):
                admitted.append(arrived)
                continue
            del self._taken[len(admitted)]
            self._left_out.append(arrived)
        if not admitted:
            self.be_done_with(self._left_out)
            self._left_out = []
        return admitted

    def _is_enough(self, present: Sequence[Source], patience: Patience) -> bool:
        """Whether as many rollouts have come as are waited for. Raises RunError where they have not for too long."""
        self._has_begun = self._expects_no_more or len(self.door.come) >= self._awaited
        if self._has_begun:
            return True
        told = f"{len(present)} of {self._awaited} rollouts came"
        if patience.is_over:
            raise RunError(f"{told} within {patience.limit:g} s: {self._told_of_waiting()}")
        if patience.is_long:
            most = "any time" if patience.limit is None else f"{patience.limit:g} s"
            logger.warning("%s so far, others have %s (join_timeout): %s", told, most, self._told_of_waiting())
        return False

    def _none_or_not_yet(self, present: Sequence[Source], patience: Patience) -> list[Arrived] | None:
        """What it means that there is nothing. Raises RunError where all are lost, for too long."""
        if present:
            if patience.is_long:
                told = "; ".join(source.whereabouts(self.door.limits.grace_s) for source in present[:4])
                count = f"{len(present)} rollouts" if len(present) > 1 else "one rollout"
                logger.warning("nothing to hand over for a while, of %s: %s", count, told)
            patience.restart()
            return []
        lost = [source for source in self.door.sources.values() if source.is_lost]
        in_their_place = len(self.door.come) - len(lost)
        if not lost or self._expects_no_more or in_their_place >= self._awaited:
            logger.info("all rollouts have ended, and all that came of them was handed over: the loop ends")
            return None
        if patience.is_over:
            names = "; ".join(f"{source.name}: {source.reason}" for source in lost)
            raise RunError(
                f"every rollout is lost and none came within {patience.limit:g} s: {names}: {self._told_of_waiting()}"
            )
        return []

    def _told_of_waiting(self) -> str:
        return "; ".join([f"listening on {self._where()}", *self.door.refusals])
