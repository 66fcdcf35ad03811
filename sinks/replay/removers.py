"""Removers: which steps leave a replay, and when."""

from typing import Any

import numpy as np

from rollflow.nodes.argument_checks import checked_count, checked_number
from rollflow.sinks.replay.row_index import Ints, RowIndex
from rollflow.sinks.replay.samplers import Draw, Sampler, Sequences
from rollflow.stream.data.errors import ReplayError

_NONE = np.empty(0, np.int64)


class Remover:
    """Base of removers. Whatever they do, the oldest rows make room once all rows are taken."""

    def num_rows(self, capacity: int) -> int:
        """Rows of memory for a capacity."""
        return capacity

    def begin(self, rows: RowIndex) -> None:
        """Called once, before the first insert."""

    def after_insert(self, rows: RowIndex, sampler: Sampler, inserted: Ints) -> Ints:
        """Positions of live steps to be removed after steps were inserted."""
        return _NONE

    def after_sample(self, rows: RowIndex, draw: Draw) -> Ints:
        """Positions of live steps to be removed after a draw."""
        return _NONE

    def get_state(self) -> dict[str, Any]:
        """What a checkpoint needs, as plain values and arrays."""
        return {}

    def set_state(self, state: dict[str, Any]) -> None:
        """Take the state of `get_state`."""


class Oldest(Remover):
    """Removes the oldest steps when all rows are taken."""


class LowestPriority(Remover):
    """Removes the steps of lowest priority once there are more than `capacity`.

        spare    further rows of memory, as a share of the capacity: rows of removed steps are free again only when
                 the ring comes round to them

    With the rows all taken, the oldest make room. Needs a sampler with priorities.
    """

    def __init__(self, spare: float = 1.0) -> None:
        self.spare = checked_number("spare", spare, above=0, why="the oldest steps would always go first")
        self._capacity = 0

    def num_rows(self, capacity: int) -> int:
        self._capacity = capacity
        return capacity + int(np.ceil(capacity * self.spare))

    def after_insert(self, rows: RowIndex, sampler: Sampler, inserted: Ints) -> Ints:
        excess = rows.num_live - self._capacity
        if excess <= 0:
            return _NONE
        kept = rows.positions(np.flatnonzero(rows.is_live))
        priorities = sampler.priorities(rows, kept)
        order = np.lexsort((kept, priorities))  # of equal priorities the oldest
        return kept[order[:excess]]


class AfterSamples(Remover):
    """Removes a step once it has been drawn so many times. Goes with samplers of single steps, and of episodes."""

    def __init__(self, times: int) -> None:
        self.times = checked_count("times", times, 1)
        self._counts = np.zeros(0, np.int32)

    def begin(self, rows: RowIndex) -> None:
        self._counts = np.zeros(rows.num_rows, np.int32)

    def after_insert(self, rows: RowIndex, sampler: Sampler, inserted: Ints) -> Ints:
        self._counts[inserted % rows.num_rows] = 0
        return _NONE

    def after_sample(self, rows: RowIndex, draw: Draw) -> Ints:
        trained = draw.positions if draw.trained is None else draw.positions[draw.trained]
        positions, counts = np.unique(trained, return_counts=True)
        at = positions % rows.num_rows
        self._counts[at] += counts.astype(np.int32)
        drawn_out: Ints = positions[(self._counts[at] >= self.times) & rows.is_live[at]]
        return drawn_out

    def get_state(self) -> dict[str, Any]:
        return {"counts": self._counts.copy()}

    def set_state(self, state: dict[str, Any]) -> None:
        self._counts = np.array(state["counts"], np.int32)


def check_goes_with(remover: Remover, sampler: Sampler, ratio: float | None) -> None:
    """Raise ReplayError for a remover that a sampler, or the ratio of a rate, can't do with."""
    if isinstance(remover, LowestPriority):
        if not sampler.has_priorities:
            raise ReplayError(
                f"LowestPriority needs priorities, and {type(sampler).__name__} has none; expected "
                "sampler=Prioritized(), or remover=Oldest()"
            ).see("replay")
    elif isinstance(remover, AfterSamples) and isinstance(sampler, Sequences):
        raise ReplayError(
            "AfterSamples removes single steps, which Sequences would draw again beside others; expected another "
            "sampler, or remover=Oldest()"
        ).see("replay")
    elif isinstance(remover, AfterSamples) and ratio is not None and remover.times < ratio:
        raise ReplayError(
            f"AfterSamples({remover.times}) removes steps before they have been sampled {ratio:g} times, as the rate "
            f"asks; expected AfterSamples({int(np.ceil(ratio))}) at least, or a lower ratio"
        ).see("replay")
