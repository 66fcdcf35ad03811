"""How old a fragment may be when a trainer gets it."""

from collections import Counter
from collections.abc import Sequence
from typing import Literal

import torch

from rollflow.sinks.trainer.by_module import batches_in, newest_version
from rollflow.sinks.trainer.item_message import Batch
from rollflow.sinks.trainer.source import Arrived, Source
from rollflow.stream.columns import Columns
from rollflow.stream.errors import LagError, RunError

OnExcess = Literal["drop", "pace", "mask", "raise"]


class AgeBound:
    """Does what is to be done with items that are more than `max_lag` policy versions old: see `TrainerStream`.

    lost         transitions that were left out, by cause
    world_size   how many batches are handed over between two versions, at most
    """

    def __init__(self, max_lag: int | None, on_excess: OnExcess) -> None:
        self.max_lag, self.on_excess = max_lag, on_excess
        self.lost: Counter[str] = Counter()
        self.world_size = 1

    @property
    def ahead(self) -> int | None:
        """How many of its fragments a lane may have begun that are not done with; None: any number."""
        if self.on_excess != "pace" or self.max_lag is None:
            return None
        return (self.max_lag + 1) * self.world_size

    def admits(self, arrived: Arrived, version: int, *, has_published: bool) -> bool:
        """Whether an item may be handed over; one that may not is counted.

        has_published    whether the newest version was published by this trainer

        Raises LagError where none may be older, RunError where nothing younger would ever come.
        """
        if self.max_lag is None:
            return True
        lag = lag_of(arrived, version)
        if lag is not None and self._is_paced_and_masked(arrived.source):
            newest = newest_version(batches_in(arrived.batch, is_by_module=True))
            lag = None if newest is None else version - newest
        if lag is None or lag <= self.max_lag or self.on_excess == "mask":
            return True
        if not has_published:
            raise RunError(
                f"{arrived.told} is {lag} policy versions old, and no "
                "weights have been published here: publish those that training goes on with before the loop"
            )
        is_left_over = arrived.policy_version is not None and arrived.policy_version < arrived.source.joined_at
        if self.on_excess == "drop" or (self.on_excess == "pace" and is_left_over):  # from a trainer before this one
            self.lost["max_lag"] += arrived.num_steps
            return False
        told = ": publish at most once per batch, before the next is asked for" if self.on_excess == "pace" else ""
        raise LagError(f"{arrived.told} is {lag} policy versions old, expected at most max_lag={self.max_lag}{told}")

    def mask(self, item: Batch, of: Sequence[Arrived], version: int) -> None:
        """Have older steps of a train batch left out of the loss, under "mask", and of several agents under "pace".

        of    what it was made of

        Raises RunError where it has no versions.
        """
        source = of[0].source
        if self.max_lag is not None and (self.on_excess == "mask" or self._is_paced_and_masked(source)):
            for batch in batches_in(item, is_by_module=source.is_by_module):
                self._mask(batch, version - self.max_lag)

    def _is_paced_and_masked(self, source: Source) -> bool:
        """Whether steps may be older, though the rollout waits: those of agents that had acted, and waited as well."""
        return self.on_excess == "pace" and source.is_by_module

    def _mask(self, batch: Batch, oldest: int) -> None:
        versions = batch.get(Columns.POLICY_VERSION)
        if versions is None:
            raise RunError(f"the batch has no column '{Columns.POLICY_VERSION}', expected it for on_excess='mask'")
        young = torch.as_tensor(versions) >= oldest
        there = batch.get(Columns.LOSS_MASK)
        batch[Columns.LOSS_MASK] = young if there is None else there & young
        if masked := int((~young if there is None else there & ~young).sum()):
            self.lost["masked"] += masked


def lag_of(arrived: Arrived, version: int) -> int | None:
    """Versions published since the oldest that an action was computed with; None: nobody knows."""
    return None if arrived.policy_version is None else max(0, version - arrived.policy_version)
