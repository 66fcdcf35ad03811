"""Staleness: the age of fragments in policy versions, its bound, and how far rollouts may run ahead."""

from collections import Counter
from collections.abc import Sequence
from typing import Literal

import torch

from rollflow.nodes.argument_checks import checked_count
from rollflow.sinks.trainer.item_maker import Batches
from rollflow.sinks.trainer.messages import Batch, batches_in
from rollflow.sinks.trainer.pace_gate import StreamOrder
from rollflow.sinks.trainer.rollout_peer import ArrivedItem, RolloutPeer
from rollflow.stream.data.columns import Columns
from rollflow.stream.data.errors import LagError, RunError, WireError

OnExcess = Literal["drop", "pace", "mask", "raise"]


class StalenessBound:
    """Bound on the age of items, and on how far rollouts may run ahead.

    It drops, masks or refuses what is more than `max_lag` policy versions old.

    max_lag, on_excess    as in `TrainerStream`
    batches               that are handed over; None: fragments are, one by one
    prefetch              batches that may be sent ahead
    stays                 whether rollouts stay until all is acknowledged

    lost     number of transitions that were left out, by cause
    ahead    fragments that a lane may have begun beyond the last one that is done with; None: any number
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
        self._batches, self._stays = batches, stays
        self._prefetch = checked_count("prefetch", prefetch, 0)
        self.ahead = max_lag + 1 if on_excess == "pace" and max_lag is not None else None

    def admits(self, arrived: ArrivedItem, version: int, *, has_published: bool) -> bool:
        """True if an item may be handed over; otherwise its transitions are counted as `lost`.

        version          newest policy version
        has_published    True if this trainer has published it

        Raises LagError for an item that is too old if none may be, RunError if no younger one would ever come.
        """
        if self.max_lag is None:
            return True
        lag = arrived.lag(version)
        if lag is not None and self._is_paced_and_masked(arrived.source):
            newest = arrived.newest_version
            lag = None if newest is None else version - newest
        if lag is None or lag <= self.max_lag or self.on_excess == "mask":
            return True
        if not has_published:
            raise RunError(
                f"{arrived.told} is {lag} policy versions old, and no "
                "weights have been published here: publish those that training goes on with before the loop"
            ).see("checkpoint")
        is_left_over = arrived.policy_version is not None and arrived.policy_version < arrived.source.joined_at
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
        if self.max_lag is not None and (self.on_excess == "mask" or self._is_paced_and_masked(source)):
            for batch in batches_in(item, is_by_module=source.rollout.is_by_module):
                self._mask(batch, version - self.max_lag)

    def _is_paced_and_masked(self, source: RolloutPeer) -> bool:
        """True if steps may be older though the rollout is paced: agents may have acted, and waited, before."""
        return self.on_excess == "pace" and source.rollout.is_by_module

    def _mask(self, batch: Batch, oldest: int) -> None:
        versions = batch.get(Columns.POLICY_VERSION)
        if versions is None:
            raise RunError(f"the batch has no column '{Columns.POLICY_VERSION}', expected it for on_excess='mask'")
        young = torch.as_tensor(versions) >= oldest
        mask = batch.get(Columns.LOSS_MASK)
        batch[Columns.LOSS_MASK] = young if mask is None else mask & young
        if masked := int((~young if mask is None else mask & ~young).sum()):
            self.lost["masked"] += masked

    def window_of(self, source: RolloutPeer) -> tuple[int, int]:
        """Window of a rollout, and the items of it that the trainer has to have at a time before it is done with any.

        The window is a number of items beyond the last one that the trainer is done with. Raises WireError if the
        trainer can't take what the rollout sends.
        """
        ahead = self.ahead
        if source.rollout.sends_batches and self._batches is None:
            raise WireError(
                "this rollout sends train batches, and the trainer has yields='fragments': expected fragments", "role"
            )
        if ahead is None:
            count = 1 if self._batches is None else self._batches.fragments
            return (1 + self._prefetch) * max(source.streams, count or 1), count or source.streams
        if not source.rollout.has_fixed_lanes:
            raise WireError(
                "the trainer holds rollouts back by on_excess='pace', and lanes of this one come and go (RemoteEnvs, "
                "RemoteRollouts): expected on_excess='drop' or 'mask', or a rollout whose lanes are fixed, such as one "
                "on each host that feeds the trainer itself",
                "pace",
            )
        if source.rollout.sends_batches:
            raise WireError(
                "the trainer holds rollouts back by on_excess='pace', and this one sends train batches: expected "
                "sends='fragments', or on_excess='drop', 'mask' or 'raise'",
                "pace",
            )
        if not source.rollout.sends_all:
            raise WireError(
                "the trainer holds rollouts back by on_excess='pace', and nobody knows which of this one's fragments "
                "come: expected no edge that drops, or another on_excess",
                "pace",
            )
        # Twice: every lane may have begun `ahead` before the slowest has given its first, and fragments of faster lanes
        # that the trainer is done with may lie behind one that it is not done with.
        return 2 * ahead * len(source.lanes), ahead * len(source.lanes)

    def order(self, source: RolloutPeer, version: int) -> StreamOrder:
        """Settings for a rollout, which is to act with weights of `version` or newer ones."""
        ahead = self.ahead if self.ahead is None or source.is_awaited else 0
        return StreamOrder(source.session.window or 1, ahead, version, needs=source.needs, stays=self._stays)

    def widen(self, source: RolloutPeer) -> None:
        """Widen the window of a rollout that is there to what it may send now; it never shrinks."""
        window, source.needs = self.window_of(source)
        source.session.window = max(window, source.session.window or 0)
