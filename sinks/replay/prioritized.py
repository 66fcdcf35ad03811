"""Prioritized: a sampler that draws steps in proportion to their priorities."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollflow.nodes.argument_checks import checked_fraction, checked_number
from rollflow.sinks.replay.row_index import Ints, RowIndex
from rollflow.sinks.replay.samplers import Draw, Sampler
from rollflow.stream.data.errors import ReplayError

_TOP = 1024  # most sums in the topmost level, which a draw goes through as a whole

Floats = NDArray[np.float64]
_MOST = 1e100  # magnitude of a value: sums of priorities stay finite


class SumTree:
    """Values f64[size], none below 0, with a binary tree of their sums up to a level of at most 1024.

    Sums are worked out from the two below each time, so that no error piles up.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        leaves = 1 << max(size - 1, 1).bit_length()
        self._levels = [np.zeros(leaves)]  # from the values up
        while len(self._levels[-1]) > _TOP:
            self._levels.append(np.zeros(len(self._levels[-1]) // 2))

    @property
    def values(self) -> Floats:
        """The values f64[size]; not to be written to."""
        return self._levels[0][: self.size]

    @property
    def total(self) -> float:
        """The sum of all values."""
        return float(self._levels[-1].sum())

    def set(self, places: Ints, values: Floats | float) -> None:
        """Set the values at places i64[B]; of a place that comes twice, the last counts."""
        self._levels[0][places] = values
        for lower, upper in zip(self._levels, self._levels[1:], strict=False):
            places = places >> 1
            pairs = lower.reshape(-1, 2).take(places, axis=0)
            upper[places] = pairs[:, 0] + pairs[:, 1]

    def set_range(self, begin: int, values: Floats) -> None:
        """Set the values f64[n] at the places from `begin` on."""
        stop = begin + len(values)
        self._levels[0][begin:stop] = values
        for lower, upper in zip(self._levels, self._levels[1:], strict=False):
            begin, stop = begin >> 1, (stop + 1) >> 1
            pairs = lower[2 * begin : 2 * stop]
            np.add(pairs[::2], pairs[1::2], out=upper[begin:stop])

    def draw(self, count: int, generator: np.random.Generator) -> Ints:
        """Places i64[count], drawn with replacement in proportion to the values, which are not all 0."""
        top = np.cumsum(self._levels[-1])
        rest = generator.random(count) * top[-1]
        places: Ints = np.searchsorted(top, rest, side="right")
        np.minimum(places, len(top) - 1, out=places)
        rest -= top[places] - self._levels[-1][places]
        for level in reversed(self._levels[:-1]):
            places += places
            left = level.take(places)
            goes_right = rest >= left
            left *= goes_right
            rest -= left
            places += goes_right
        is_missed = self._levels[0].take(places) <= 0  # by rounding, at the edge of a sum
        if is_missed.any():
            places[is_missed] = self.draw(int(is_missed.sum()), generator)
        return places


class Prioritized(Sampler):
    """Draws steps with probability (|value| + epsilon)**alpha over the sum of all, with replacement.

        alpha      0: uniform; 1: fully in proportion
        beta       exponent of the importance weights, which may be set at any time
        epsilon    keeps steps with the value 0 in play, above 0

    New steps get the largest priority so far. A batch's `weights`, f32[B], are (number of steps · probability)**-beta
    over the largest in the batch. Raises ValueError for numbers outside these bounds.
    """

    def __init__(self, alpha: float = 0.6, beta: float = 0.4, epsilon: float = 1e-6) -> None:
        self.alpha = checked_fraction("alpha", alpha)
        self.beta = checked_fraction("beta", beta)
        why = "steps with the value 0 would never be drawn"
        self.epsilon = checked_number("epsilon", epsilon, above=0, why=why)
        self._largest = 1.0
        self._tree: SumTree | None = None

    @property
    def has_priorities(self) -> bool:
        return True

    def begin(self, rows: RowIndex) -> None:
        """Make the tree. Raises ReplayError for a sampler that another replay has."""
        if self._tree is not None:
            raise ReplayError("this Prioritized sampler belongs to another replay: expected one for each replay")
        self._tree = SumTree(rows.num_rows)

    def draw(self, rows: RowIndex, count: int, generator: np.random.Generator) -> Draw:
        tree = self._sums
        places = tree.draw(count, generator)
        weights = (tree.values[places] * (rows.num_live / tree.total)) ** -self.beta
        weights /= float(weights.max())
        positions = rows.positions(places)
        return Draw(positions, positions, weights.astype(np.float32))

    def note_inserted(self, rows: RowIndex, positions: Ints) -> None:
        if len(positions):
            priorities = np.zeros(int(positions[-1] - positions[0]) + 1)
            priorities[positions - positions[0]] = self._largest
            self._set_range(rows, int(positions[0]), priorities)

    def note_removed(self, rows: RowIndex, positions: Ints) -> None:
        is_old = positions < rows.begin
        if is_old.any():  # with all that stood beside them
            first = int(positions[is_old].min())
            self._set_range(rows, first, np.zeros(rows.begin - first))
        if not is_old.all():
            self._sums.set(positions[~is_old] % rows.num_rows, 0.0)

    def _set_range(self, rows: RowIndex, begin: int, priorities: NDArray[np.float64]) -> None:
        """Set the priorities f64[n] of the positions from `begin` on, round the end of the ring."""
        row = begin % rows.num_rows
        before = rows.num_rows - row
        self._sums.set_range(row, priorities[:before])
        if len(priorities) > before:
            self._sums.set_range(0, priorities[before:])

    def update_priorities(self, rows: RowIndex, ids: Ints, values: NDArray[Any]) -> None:
        """Set the priorities of the steps `ids`, i64[B], from values f[B], such as TD errors.

        Steps that have gone are passed over. Raises ReplayError for values that are not finite, or above 1e100.
        """
        magnitudes = np.abs(np.asarray(values, np.float64)) + self.epsilon
        is_sound = magnitudes <= _MOST  # False for NaN
        if not is_sound.all():
            bad = int(np.argmin(is_sound))
            raise ReplayError(
                f"update_priorities: value {bad} is {np.asarray(values)[bad]}, expected finite numbers, up to {_MOST:g}"
                ": with it no step could be drawn any more"
            )
        priorities = magnitudes**self.alpha
        kept = rows.is_kept(ids)
        if kept.any():
            self._sums.set(ids[kept] % rows.num_rows, priorities[kept])
            self._largest = max(self._largest, float(priorities[kept].max()))

    @property
    def _sums(self) -> SumTree:
        assert self._tree is not None
        return self._tree

    def get_state(self) -> dict[str, Any]:
        values = None if self._tree is None else self._tree.values.copy()
        return {"largest": self._largest, "alpha": self.alpha, "beta": self.beta, "values": values}

    def set_state(self, state: dict[str, Any]) -> None:
        if (alpha := state["alpha"]) != self.alpha:
            raise ReplayError(f"the state is of a sampler with alpha={alpha}, expected {self.alpha}")
        self._largest, self.beta = state["largest"], state["beta"]
        if state["values"] is not None:
            self._sums.set(np.arange(len(state["values"])), state["values"])
