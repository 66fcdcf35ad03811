"""Rounds of a trainer: which items make a batch, how old they may be, and how far rollouts may run ahead."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import torch

from rollflow.nodes.argument_checks import checked_count
from rollflow.nodes.stages.rounds import one_of_each
from rollflow.sinks.trainer.item_maker import Batches
from rollflow.sinks.trainer.messages import Batch, batches_in
from rollflow.sinks.trainer.newest_weights import NewestWeights
from rollflow.sinks.trainer.rollout_peer import ArrivedItem, RolloutPeer
from rollflow.stream.data.columns import Columns
from rollflow.stream.data.errors import LagError, RunError, WireError

OnExcess = Literal["drop", "pace", "mask", "raise"]
Present = Callable[[], Iterable[RolloutPeer]]  # gives the rollouts of which more may come


class Rounds:
    """Items that have come and wait, of which rounds are made: so many that came first, or, under "pace", one of every
    lane, each lane's next. Items that are more than `max_lag` policy versions old are dropped, masked or refused.

    max_lag, on_excess    as in `TrainerStream`
    batches               that are handed over; None: fragments are, one by one
    prefetch              batches that may be sent ahead
    stays                 whether rollouts stay until all is acknowledged

    waiting     items that have come, oldest first
    taken       items of the round at hand that were not handed over
    left_out    items before the next batch, or among it: done with together with that
    lost        number of transitions that were left out, by cause
    ahead       fragments that a lane may have begun beyond the last one that is done with; None: any number

    The rollouts of a round of every lane are settled when it begins. One that comes meanwhile is in the next one; a
    lane that is gone is in those for which it has given fragments.
    """

    def __init__(
        self,
        max_lag: int | None,
        on_excess: OnExcess,
        *,
        batches: Batches | None,
        prefetch: int = 1,
        stays: bool = False,
    ) -> None:
        self.max_lag, self.on_excess = max_lag, on_excess
        self.lost: Counter[str] = Counter()
        self.waiting: list[ArrivedItem] = []
        self.taken: list[ArrivedItem] = []
        self.left_out: list[ArrivedItem] = []
        self._count, self._gives_batches = 1 if batches is None else batches.fragments, batches is not None
        self._stays, self._has_begun = stays, False
        self._prefetch = checked_count("prefetch", prefetch, 0)
        self.ahead = max_lag + 1 if on_excess == "pace" and max_lag is not None else None

    # Which items

    def begin(self, present: Present, version: int) -> bool:
        """Let the next round be of all rollouts that there are now, unless one has begun; True if there are others.

        version    newest policy version, when the trainer has no batch that it may publish for
        """
        if self.ahead is None or (self._has_begun and any(source.awaited for source in present())):
            return False
        others = [source for source in present() if not source.is_awaited]
        for source in others:  # which begin nothing before: what they give is as fresh as what others give
            source.is_awaited, source.joined_at = True, version
        return bool(others)

    def joined(self, arrived: Iterable[ArrivedItem]) -> list[ArrivedItem]:
        """Waiting items, with `arrived` added; by lane, but for those that were handed over before a restart."""
        if self.ahead is not None:
            arrived = [each for each in arrived if each.number not in each.source.beyond]
        return [*self.waiting, *arrived]

    def take(self, present: Present) -> None:
        """Take the next round; none unless it is whole, or no rollout is present any more."""
        if self.ahead is not None:
            first, later = one_of_each(self.waiting, lambda each: (each.source, each.lane))
            given = {(each.source, each.lane) for each in first}
            self._has_begun = not given.issuperset((source, lane) for source in present() for lane in source.awaited)
            is_whole = not self._has_begun
            if is_whole:  # by rollout and lane, in whichever order they came
                order = {source: place for place, source in enumerate(present())}
                first.sort(key=lambda each: (each.source.called, order.get(each.source, -1), each.lane))
        else:
            size = self._size(present)
            first, later = self.waiting[:size], self.waiting[size:]
            is_whole = len(first) == size or not any(present())
        if is_whole:
            self.taken, self.waiting = first, later  # at once: an interrupt loses none

    def _size(self, present: Present) -> int:
        """Number of items in a round that is not of every lane: one for every lane of the rollouts that are there, and
        what is left of others, unless the trainer wants so many.
        """
        if self._count is not None:
            return self._count
        size = sum(source.streams for source in present())
        if len(self.waiting) >= size and (left := {each.source for each in self.waiting}.difference(present())):
            counts = Counter(arrived.source for arrived in self.waiting)
            size += sum(min(source.streams, counts[source]) for source in left)
        return max(1, size)

    # How old

    def admitted(self, weights: NewestWeights) -> list[ArrivedItem]:
        """The items of the round, or the first of them, but for those that are too old or left out."""
        most, admitted = len(self.taken) if self._gives_batches else 1, list[ArrivedItem]()
        while len(admitted) < min(most, len(self.taken)):
            arrived = self.taken[len(admitted)]
            if not arrived.is_left_out and self._admits(arrived, weights):
                admitted.append(arrived)
                continue
            del self.taken[len(admitted)]
            self.left_out.append(arrived)
        return admitted

    def _admits(self, arrived: ArrivedItem, weights: NewestWeights) -> bool:
        """True if an item may be handed over; otherwise its transitions are counted as `lost`.

        Raises LagError for an item that is too old if none may be, RunError if no younger one would ever come.
        """
        if self.max_lag is None:
            return True
        lag, source = arrived.lag(weights.version), arrived.source
        if lag is not None and self._is_paced_and_masked(source):
            newest = arrived.newest_version
            lag = None if newest is None else weights.version - newest
        if lag is None or lag <= self.max_lag or self.on_excess == "mask":
            return True
        if weights.published is None:
            raise RunError(
                f"{arrived.told} is {lag} policy versions old, and no "
                "weights have been published here: publish those that training goes on with before the loop"
            ).see("checkpoint")
        is_left_over = arrived.policy_version is not None and arrived.policy_version < source.joined_at
        if self.on_excess == "drop" or (self.on_excess == "pace" and is_left_over):  # from a trainer before this one
            self.lost["max_lag"] += arrived.num_steps
            return False
        advice = ": publish at most once per batch, before the next is asked for" if self.on_excess == "pace" else ""
        raise LagError(
            f"{arrived.told} is {lag} policy versions old, expected at most max_lag={self.max_lag}{advice}"
        ).see("lag")

    def mask(self, item: Batch, of: Sequence[ArrivedItem], version: int) -> None:
        """Set `loss_mask`, bool[B] or bool[B, T], False for steps that are too old.

        That is done under "mask", and under "pace" for train batches of several agents.

        item       train batch, changed in place
        of         arrived items that it was made of
        version    newest policy version

        Raises RunError for a batch without the column `policy_version`, i64[B] or i64[B, T].
        """
        source = of[0].source
        if self.max_lag is None or not (self.on_excess == "mask" or self._is_paced_and_masked(source)):
            return
        for batch in batches_in(item, is_by_module=source.rollout.is_by_module):
            versions, mask = batch.get(Columns.POLICY_VERSION), batch.get(Columns.LOSS_MASK)
            if versions is None:
                raise RunError(f"the batch has no column '{Columns.POLICY_VERSION}', expected it for on_excess='mask'")
            young = torch.as_tensor(versions) >= version - self.max_lag
            batch[Columns.LOSS_MASK] = young if mask is None else mask & young
            if masked := int((~young if mask is None else mask & ~young).sum()):
                self.lost["masked"] += masked

    def _is_paced_and_masked(self, source: RolloutPeer) -> bool:
        """True if steps may be older though the rollout is paced: agents may have acted, and waited, before."""
        return self.on_excess == "pace" and source.rollout.is_by_module

    # How far ahead

    def widen(self, source: RolloutPeer) -> None:
        """Widen the window of a rollout to what it may send now; it never shrinks.

        The window is a number of items beyond the last one that the trainer is done with. With it goes how many of them
        the trainer has to have at a time before it is done with any. Raises WireError if the trainer can't take what
        the rollout sends.
        """
        rollout, ahead, lanes = source.rollout, self.ahead, len(source.lanes)
        if rollout.sends_batches and not self._gives_batches:
            raise WireError(
                "this rollout sends train batches, and the trainer has yields='fragments': expected fragments", "role"
            )
        if ahead is None:
            window = (1 + self._prefetch) * max(source.streams, self._count or 1)
            source.needs = self._count or source.streams
        else:
            _check_paced(source)
            # Twice: every lane may have begun `ahead` before the slowest has given its first, and fragments of faster
            # lanes that the trainer is done with may lie behind one that it is not done with.
            window, source.needs = 2 * ahead * lanes, ahead * lanes
        source.session.window = max(window, source.session.window or 0)

    def order(self, source: RolloutPeer, version: int) -> dict[str, Any]:
        """Settings for a rollout, which is to act with weights of `version` or newer ones."""
        ahead = self.ahead if self.ahead is None or source.is_awaited else 0
        window, stays = source.session.window or 1, self._stays
        order = {"window": window, "ahead": ahead, "version": version, "needs": source.needs, "stays": stays}
        return {**order, "cut": source.asked}


def _check_paced(source: RolloutPeer) -> None:
    """Raise WireError for a rollout that can't be held back."""
    rollout = source.rollout
    if not rollout.has_fixed_lanes:
        why = (
            "lanes of this one come and go (RemoteEnvs, RemoteRollouts): expected on_excess='drop' or 'mask', or a "
            "rollout whose lanes are fixed, such as one on each host that feeds the trainer itself"
        )
    elif rollout.sends_batches:
        why = "this one sends train batches: expected sends='fragments', or on_excess='drop', 'mask' or 'raise'"
    elif not rollout.sends_all:
        why = "nobody knows which of this one's fragments come: expected no edge that drops, or another on_excess"
    else:
        return
    raise WireError(f"the trainer holds rollouts back by on_excess='pace', and {why}", "pace")
