"""Samplers: which of a replay's steps go into a batch."""

import abc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollflow.nodes.argument_checks import checked_count, checked_fraction, checked_number
from rollflow.sinks.replay.row_index import Bools, Ints, RowIndex, read_ring
from rollflow.stream.data.errors import ReplayError, shown


@dataclass(frozen=True, slots=True, eq=False)
class Draw:
    """Steps that were drawn.

    positions    i64[B], or i64[B, L] for rows of L steps in time order, -1 behind the last of a row
    ids          i64[B]  the step that each row was drawn for, whose priority may be updated
    weights      f32[B]  importance weights; None: all rows count alike
    trained      bool[B, L]  the steps to be trained on; None: all of them
    """

    positions: Ints
    ids: Ints
    weights: NDArray[np.float32] | None = None
    trained: Bools | None = None

    @property
    def num_steps(self) -> int:
        """Number of steps to be trained on."""
        return int(self.positions.size if self.trained is None else np.count_nonzero(self.trained))


class Sampler(abc.ABC):
    """Base of samplers; a subclass overrides `draw`, and whatever else it needs.

    parts    samplers that it draws by, which get what it is told

    A draw of a sampler of one's own is refused, by ReplayError, if a position holds no step that may be sampled.
    """

    parts: Sequence["Sampler"] = ()

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "draw" in vars(cls) and not cls.__module__.startswith("rollflow."):
            cls.draw = _checked(cls.draw)  # type: ignore[method-assign]

    @property
    def steps(self) -> int:
        """Steps to be trained on in one row of a batch, at most; 1 if that is not known before."""
        return 1

    @property
    def has_priorities(self) -> bool:
        """True if steps have priorities, which may be updated."""
        return any(part.has_priorities for part in self.parts)

    def waits_for(self, rows: RowIndex) -> str:
        """What has to come, beside steps, before there is anything to draw, as a noun; "": nothing.

        Until it has come samples wait, and inserts don't.
        """
        return next((text for part in self.parts if (text := part.waits_for(rows))), "")

    @abc.abstractmethod
    def draw(self, rows: RowIndex, count: int, generator: np.random.Generator) -> Draw:
        """Draw `count` rows of a batch from a replay that has steps. Called in one thread at a time."""

    def begin(self, rows: RowIndex) -> None:
        """Called once, before the first insert."""
        for part in self.parts:
            part.begin(rows)

    def note_inserted(self, rows: RowIndex, positions: Ints) -> None:
        """Called with the positions of new steps, in ascending order, without gaps but for ends of episodes."""
        for part in self.parts:
            part.note_inserted(rows, positions)

    def note_removed(self, rows: RowIndex, positions: Ints) -> None:
        """Called with the positions of steps that may no longer be sampled, after these have gone."""
        for part in self.parts:
            part.note_removed(rows, positions)

    def update_priorities(self, rows: RowIndex, ids: Ints, values: NDArray[Any]) -> None:
        """Set the priorities of steps that are still there. Raises ReplayError for a sampler without priorities."""
        able = [part for part in self.parts if part.has_priorities]
        if not able:
            raise ReplayError(
                f"{type(self).__name__} has no priorities to be updated; expected Replay(sampler=Prioritized())"
            )
        for part in able:
            part.update_priorities(rows, ids, values)

    def get_state(self) -> dict[str, Any]:
        """What a checkpoint needs, as plain values and arrays."""
        return {"parts": [part.get_state() for part in self.parts]} if self.parts else {}

    def set_state(self, state: dict[str, Any]) -> None:
        """Take the state of `get_state`."""
        for part, each in zip(self.parts, state.get("parts", ()), strict=True):
            part.set_state(each)


class Uniform(Sampler):
    """Draws each step with the same probability, with replacement."""

    def draw(self, rows: RowIndex, count: int, generator: np.random.Generator) -> Draw:
        positions = _uniform(rows, count, generator)
        return Draw(positions, positions)


class Sequences(Sampler):
    """Draws rows of consecutive steps of one episode.

        length     steps to be trained on, from 1 on; fewer if the episode ends, or has not gone on yet
        burn_in    steps before those, for a recurrent module's state; fewer if the episode begins, or its older
                   steps are gone
        of         sampler of the step with which the steps to be trained on begin

    A row has the steps one after the other, padded behind to burn_in + length. `loss_mask` is True at the steps to be
    trained on. A stateful module's `state_in` is the state stored for the row's first step.

    Raises ValueError for numbers out of bounds, and for what is no sampler.
    """

    def __init__(self, length: int, burn_in: int = 0, *, of: Sampler | None = None) -> None:
        self.length, self.burn_in = checked_count("length", length, 1), checked_count("burn_in", burn_in, 0)
        self.of = Uniform() if of is None else of
        _check_sampler("of", self.of)
        self.parts = [self.of]

    @property
    def steps(self) -> int:
        return self.length

    def draw(self, rows: RowIndex, count: int, generator: np.random.Generator) -> Draw:
        drawn = self.of.draw(rows, count, generator)
        if drawn.positions.ndim != 1:
            raise ReplayError(f"Sequences(of={type(self.of).__name__}(...)): expected a sampler of single steps")
        starts, before = rows.back(drawn.positions, self.burn_in)
        positions = rows.forward(starts, self.burn_in + self.length)
        place = np.arange(self.burn_in + self.length)
        there = (positions >= 0) & (place < before[:, None] + self.length)
        positions = np.where(there, positions, -1)
        return replace(drawn, positions=positions, trained=there & (place >= before[:, None]))


class Episodes(Sampler):
    """Draws whole episodes that have ended, each with the same probability, padded behind to the longest drawn."""

    def __init__(self) -> None:
        self._whole: tuple[Ints, Ints] = np.empty(0, np.int64), np.empty(0, np.int64)
        self._counts = (0, 0)  # of the steps that had come and gone when they were found

    def waits_for(self, rows: RowIndex) -> str:
        # Where steps have gone already, more of them would not help: `draw` raises.
        return "" if rows.removed or len(self._found(rows)[0]) else "episode that has ended"

    def draw(self, rows: RowIndex, count: int, generator: np.random.Generator) -> Draw:
        firsts, lengths = self._found(rows)
        if not len(firsts):
            raise ReplayError(
                "no episode that has ended is there as a whole: expected a larger min_size, or a larger capacity"
            )
        chosen = generator.integers(len(firsts), size=count)
        positions = rows.forward(firsts[chosen], int(lengths[chosen].max()))
        return Draw(positions, positions[:, 0], None, positions >= 0)

    def set_state(self, state: dict[str, Any]) -> None:
        self._counts = (0, 0)  # the counts of another state may be the same

    def _found(self, rows: RowIndex) -> tuple[Ints, Ints]:
        """The first steps of the episodes that may be drawn, i64[E], and their lengths."""
        if (counts := (rows.inserted, rows.removed)) != self._counts:
            chunks, last = rows.chunks, rows.chunks.numbers()
            is_there = chunks.read("stop", last) > rows.begin  # else only the last observation is left
            last = last[chunks.read("has_ended", last) & chunks.read("is_whole", last) & is_there]
            lengths = chunks.read("t_started", last) + chunks.read("stop", last) - chunks.read("first", last)
            firsts, _ = rows.back(chunks.read("stop", last) - 1, int(lengths.max(initial=1)) - 1)
            kept = (rows.episode_step(firsts) == 0) & rows.is_kept(firsts)
            self._whole, self._counts = (firsts[kept], lengths[kept]), counts
        return self._whole


def _checked(draw: Callable[..., Any]) -> Callable[..., Draw]:
    """A sampler's `draw` that raises ReplayError for what is no draw, or has positions without a step."""

    @wraps(draw)
    def checked(self: Sampler, rows: RowIndex, count: int, generator: np.random.Generator) -> Draw:
        drawn = draw(self, rows, count, generator)
        name = f"{type(self).__name__}.draw"
        if not isinstance(drawn, Draw):
            raise ReplayError(f"{name} has returned {shown(drawn)}, expected a Draw(positions, ids)")
        for field in ("positions", "ids"):
            if not isinstance(each := getattr(drawn, field), np.ndarray) or each.dtype != np.int64 or not len(each):
                raise ReplayError(f"{name} has {field} {shown(each)}, expected an array i64[B, ...], not empty")
        if len(drawn.positions) != len(drawn.ids):
            raise ReplayError(f"{name} has {len(drawn.positions)} rows and {len(drawn.ids)} ids, expected one for each")
        inside = drawn.positions if drawn.positions.ndim == 1 else drawn.positions[drawn.positions >= 0]
        if len(wrong := inside[~rows.is_kept(inside)]):
            raise ReplayError(
                f"{name} has drawn position {wrong[0]}, which holds no step that may be sampled; expected those that "
                "rows.is_kept(positions) is True for"
            )
        return drawn

    return checked


def _check_sampler(name: str, sampler: Any) -> None:
    if not isinstance(sampler, Sampler):
        raise ValueError(f"{name}: got {shown(sampler)}, expected a sampler such as Uniform()")


def _uniform(rows: RowIndex, count: int, generator: np.random.Generator) -> Ints:
    """Positions of live steps, i64[count], each with the same probability."""
    span, live = rows.end - rows.begin, rows.num_live
    if live < span // 4:
        kept = rows.begin + np.flatnonzero(read_ring(rows.is_live, rows.num_rows, rows.begin, rows.end))
        return kept[generator.integers(len(kept), size=count)]
    # Positions with no live step are passed over: a few more are drawn, so that enough are left.
    drawn = _drawn(rows, count + (count * (span - live) * 5) // (4 * live) + 8, generator)
    while len(drawn) < count:
        drawn = np.concatenate([drawn, _drawn(rows, count, generator)])
    return drawn[:count]


def _drawn(rows: RowIndex, count: int, generator: np.random.Generator) -> Ints:
    """Those of `count` positions, drawn alike from all, that have a live step."""
    span = rows.end - rows.begin
    drawn = (generator.random(count) * span).astype(np.int64)  # faster than whole numbers, and as good below 2**53
    drawn += rows.begin
    if rows.num_live == span:
        return drawn
    return drawn[rows.is_live.take(rows.rows(drawn))]


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
