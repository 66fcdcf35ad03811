"""Sampled steps: where the rows of a batch stand in a replay, what stands around them, and learner pieces on them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollflow.nodes.argument_checks import checked_count, checked_fraction
from rollflow.nodes.connectors.common.batches import as_array
from rollflow.nodes.connectors.connector_v2 import Batch, ConnectorV2
from rollflow.nodes.connectors.pipelines.connector_pipeline_v2 import pieces_within
from rollflow.sinks.replay.row_index import Ints, RowColumns, RowIndex
from rollflow.sinks.replay.samplers import Draw
from rollflow.stream.data.columns import Columns
from rollflow.stream.data.errors import ReplayError
from rollflow.stream.data.tree import Tree, leaves_of, map_tree

IDS, AGE, WEIGHTS = "ids", "age", "weights"
GOAL, ACHIEVED = "desired_goal", "achieved_goal"


class SampledSteps:
    """Steps of one batch, which a piece gets as `episodes`; it may read whatever the replay holds about them.

    rows          index of the replay
    columns       memory of the replay
    frames        newest observations in each item of `obs`; 1: the observation itself
    generator     for what a piece draws

    hindsight     the piece that gave rows of the batch other goals than the environment; None: none did
    chosen        i64[K]         these rows
    goals         any[K, ...]    their goals

    positions     i64[B] or i64[B, L] of the steps; for padding, the position of the row's first step
    is_padding    bool[B, L]; None: there is none
    """

    hindsight: "HindsightGoals | None" = None
    chosen: Ints
    goals: NDArray[Any]

    def __init__(
        self, rows: RowIndex, columns: RowColumns, draw: Draw, frames: int, generator: np.random.Generator
    ) -> None:
        self.rows, self.columns, self.generator = rows, columns, generator
        self.is_padding: NDArray[np.bool_] | None = None
        self.positions = draw.positions
        self.frames = frames
        self._draw = draw
        if draw.positions.ndim == 2:
            self.is_padding = draw.positions < 0
            self.positions = np.where(self.is_padding, draw.positions[:, :1], draw.positions)

    def __len__(self) -> int:
        return len(self.positions)

    def __iter__(self) -> Iterator[Any]:
        raise ReplayError(
            "a piece of a replay gets sampled steps in the place of episodes, and can't go through them; expected one "
            "for replays, such as SampledNStepReturns in the place of NStepReturns"
        )

    def read(self, name: str, positions: Ints) -> Tree:
        """A column at positions of any shape: a tree of new arrays any[*positions.shape, ...]."""
        return self.columns.read(name, self.rows.rows(positions))

    def observations(self, positions: Ints) -> Tree:
        """The observations before the steps at positions, with their frames."""
        if self.frames == 1:
            return self.read(Columns.OBS, positions)
        at, there = self._frames_before(positions)
        return _zeroed(self.read(Columns.OBS, at), ~there)

    def next_observations(self, positions: Ints) -> Tree:
        """The observations after the steps at positions, with their frames."""
        following = self.rows.following[self.rows.rows(positions)]
        if self.frames == 1:
            return self.columns.read(Columns.OBS, following)
        at, there = self._frames_before(positions)
        at = np.concatenate([self.rows.rows(at[..., 1:]), following[..., None]], axis=-1)
        there = np.concatenate([there[..., 1:], np.ones((*positions.shape, 1), np.bool_)], axis=-1)
        return _zeroed(self.columns.read(Columns.OBS, at), ~there)

    def goes_on(self, positions: Ints) -> tuple[Ints, NDArray[np.bool_]]:
        """One step on in each episode: (positions, whether the replay has that step); else the same position."""
        following = self.rows.following[self.rows.rows(positions)].astype(np.int64)
        is_step = self.rows.is_step[following]
        return np.where(is_step, self.rows.positions(following), positions), is_step

    def outcomes(self, positions: Ints) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
        """Rewards f32[B], and terminateds bool[B], of steps at i64[B]: one of each row of the batch, for its goal."""
        packed = self.columns.read_packed(self.rows.rows(positions))  # in which small columns are, all at once
        rewards, terminateds = packed[Columns.REWARDS].astype(np.float32), packed[Columns.TERMINATEDS]
        if self.hindsight is not None:
            self.judge(self.next_observations(positions), rewards, terminateds)
        return rewards, terminateds

    def put_goals(self, observations: Any) -> None:
        """Write the goals into observations any[B, ...], one for each row of the batch."""
        observations[GOAL][self.chosen] = self.goals

    def judge(self, observations: Any, rewards: NDArray[np.float32], terminateds: NDArray[np.bool_]) -> None:
        """Write rewards f32[B] and ends bool[B] of steps with the observations any[B, ...] after them, by the goals."""
        piece, rows, achieved = self.hindsight, self.chosen, observations[ACHIEVED]
        assert piece is not None
        rewards[rows] = piece.computed("compute_reward", achieved[rows], self.goals, np.float32)
        if piece.compute_terminated is not None:
            terminateds[rows] |= piece.computed("compute_terminated", achieved[rows], self.goals, np.bool_)

    def batch(self) -> dict[str, Any]:
        """Every column of the steps, as arrays, with `new_obs`, `ids`, `age` and what the sampler adds."""
        draw, at, rows = self._draw, self.positions, self.rows.rows(self.positions)
        if self.frames == 1:
            following = self.rows.following.take(rows)
            seen = self.columns.read(Columns.OBS, rows), self.columns.read(Columns.OBS, following)
        else:
            seen = self.observations(at), self.next_observations(at)
        batch = {Columns.OBS: seen[0], Columns.NEXT_OBS: seen[1]} | self.columns.read_packed(rows)
        for name in self.columns.apart:
            if name == Columns.STATE_IN and self.is_padding is not None:
                batch[name] = self.columns.read(name, rows[:, 0])
            elif name != Columns.OBS:
                batch[name] = self.columns.read(name, rows)
        batch[AGE] = self.rows.end - at
        if self.is_padding is not None:
            self._pad(batch)
        batch[IDS] = draw.ids.copy()
        if draw.weights is not None:
            batch[WEIGHTS] = draw.weights
        return batch

    def _pad(self, batch: dict[str, Any]) -> None:
        """Make padding zeros, and say where it is."""
        padding = self.is_padding
        assert padding is not None
        for name, tree in batch.items():
            if name != Columns.STATE_IN:
                _zeroed(tree, padding)
        batch[Columns.SEQ_LENS] = (~padding).sum(1)
        batch[Columns.LOSS_MASK] = ~padding if self._draw.trained is None else self._draw.trained

    def _frames_before(self, positions: Ints) -> tuple[Ints, NDArray[np.bool_]]:
        """Positions of the newest observations up to each step, oldest first, i64[..., frames], and which exist."""
        flat = positions.reshape(-1)
        found = [self.rows.back(flat, steps) for steps in range(self.frames - 1, 0, -1)]
        at = np.stack([*(each for each, _ in found), flat], axis=-1)
        wanted = np.arange(self.frames - 1, -1, -1)
        there = np.stack([*(gone for _, gone in found), np.zeros(len(flat), np.int64)], axis=-1) == wanted
        shape = (*positions.shape, self.frames)
        return at.reshape(shape), there.reshape(shape)


def _zeroed(tree: Tree, places: NDArray[np.bool_]) -> Tree:
    """A tree of arrays any[*places.shape, ...], in which the items at some places are made zeros."""
    map_tree(lambda leaf: leaf.__setitem__(places, 0), tree)
    return tree


def check_size(batch: Mapping[str, Tree], max_bytes: int | None) -> None:
    """Raise ReplayError for a batch of arrays or tensors that has more bytes; None: it may have any number."""
    if max_bytes is None:
        return
    size = sum(getattr(leaf, "nbytes", 0) for tree in batch.values() for leaf in leaves_of(tree))
    if size > max_bytes:
        raise ReplayError(f"the batch has {size:,} bytes, expected at most {max_bytes:,}: ask for fewer rows")


GoalFunction = Callable[[NDArray[Any], NDArray[Any], Any], Any]


class SampledNStepReturns(ConnectorV2):
    """Makes of every sampled step t a transition over m steps of its episode, at most `n_step`.

        n_step    largest number of steps, from 1 on
        gamma     discount of rewards, 0 … 1

        rewards                    f32[B]         sum of gamma**k * r[t + k] over k < m
        new_obs                    any[B, ...]    observation t + m
        terminateds, truncateds    bool[B]        those of step t + m - 1, as is any `bootstrap_from`
        n_step                     i64[B]         m: the value of `new_obs` counts gamma**m

    m is less than `n_step` if the episode ends, or has not gone on yet. Single rewards are those that were inserted,
    or those that `HindsightGoals` before this piece computed for the row's goal, which `new_obs` has too. All other
    pieces stand behind this one. Raises ReplayError outside a replay, and for sequences.
    """

    columnar = True
    changes_episodes = False

    def __init__(self, *, n_step: int, gamma: float = 0.99) -> None:
        super().__init__()
        self.n_step, self.gamma = checked_count("n_step", n_step, 1), checked_fraction("gamma", gamma)

    def __call__(self, *, batch: Batch, episodes: Any, **kwargs: Any) -> Batch:
        steps = sampled_steps(self.name, episodes)
        at = steps.positions
        rewards, terminateds = steps.outcomes(at)
        spans, goes_on = np.ones(len(at), np.int64), ~terminateds
        for k in range(1, self.n_step):
            following, is_step = steps.goes_on(at)
            goes_on &= is_step
            if not goes_on.any():
                break
            at = np.where(goes_on, following, at)
            more, ends = steps.outcomes(at)
            rewards += np.float32(self.gamma**k) * more * goes_on
            terminateds = np.where(goes_on, ends, terminateds)
            spans += goes_on
            goes_on &= ~ends
        new_obs = steps.next_observations(at)
        if steps.hindsight is not None:
            steps.put_goals(new_obs)
        batch[Columns.REWARDS] = rewards
        batch[Columns.NEXT_OBS] = new_obs
        batch[Columns.TERMINATEDS] = terminateds
        for column in {Columns.TRUNCATEDS, Columns.BOOTSTRAP_FROM} & batch.keys():
            batch[column] = steps.read(column, at)
        batch[Columns.N_STEP] = spans
        return batch


class HindsightGoals(ConnectorV2):
    """Gives sampled steps goals that their episode has reached later on, and the rewards for these.

        compute_reward        (achieved goals any[K, ...], desired goals any[K, ...], info) -> rewards, number[K], as
                              goal environments of gymnasium-robotics have it; `info` is an empty dict
        share                 of the steps that get such a goal, 0 … 1
        compute_terminated    the same for bool[K], whether the episode ends with a goal that is achieved; None: it goes
                              on, and ends stay as they were

    Observations are dicts with "achieved_goal" and "desired_goal", two arrays of one shape. A step's new goal is what
    the episode has achieved after one of the steps from this one on, drawn from those that are kept, each with the same
    probability. It stands in `obs` and `new_obs`, and `rewards` are computed for what was achieved after the step.

    Stands before all other pieces, `SampledNStepReturns` among them, which sums up rewards for the new goal. Raises
    ReplayError outside a replay, for other observations, for `Storage(frames=2)` or more, and if the functions give
    anything but one finite number, or bool, for each row.
    """

    columnar = True
    changes_episodes = False

    def __init__(
        self, compute_reward: GoalFunction, *, share: float = 0.8, compute_terminated: GoalFunction | None = None
    ) -> None:
        super().__init__()
        self.compute_reward, self.share = compute_reward, checked_fraction("share", share)
        self.compute_terminated = compute_terminated

    def __call__(self, *, batch: Batch, episodes: Any, **kwargs: Any) -> Batch:
        steps = sampled_steps(self.name, episodes)
        obs, new_obs = batch[Columns.OBS], batch[Columns.NEXT_OBS]
        self._check_observations(obs, steps.frames)
        draws = steps.generator
        chosen = np.flatnonzero(draws.random(len(steps)) < self.share)
        if not len(chosen):
            return batch
        at = steps.positions[chosen]
        _, left = steps.rows.ahead(at)
        later, _ = steps.rows.ahead(at, draws.integers(0, left + 1))
        steps.hindsight, steps.chosen, steps.goals = self, chosen, steps.next_observations(later)[ACHIEVED]
        steps.put_goals(obs)
        steps.put_goals(new_obs)
        steps.judge(new_obs, batch[Columns.REWARDS], batch[Columns.TERMINATEDS])
        return batch

    def computed(self, name: str, achieved: NDArray[Any], goals: NDArray[Any], dtype: Any) -> NDArray[Any]:
        """What a function gives for goals any[K, ...], `dtype` [K]. Raises ReplayError for anything else."""
        rows, values = len(goals), as_array(getattr(self, name)(achieved, goals.copy(), {}))
        if values.shape != (rows,) and not (rows == 1 and values.ndim == 0):
            raise ReplayError(
                f"{self.name}: {name} gave the shape {list(values.shape)} for {rows} rows of goals, of the shape "
                f"{list(goals.shape)}; expected [{rows}], one for each row"
            )
        is_number = np.can_cast(values.dtype, dtype, "same_kind")
        with np.errstate(over="ignore"):
            computed: NDArray[Any] | None = values.reshape(rows).astype(dtype) if is_number else None
        if computed is None or not np.isfinite(computed).all():
            gave = f"{values.dtype}{' that is not finite' if is_number else ''}"
            wanted = "bool" if dtype is np.bool_ else "finite float32"
            raise ReplayError(f"{self.name}: {name} gave {gave}, expected a {wanted} for each row")
        return computed

    def _check_observations(self, obs: Any, frames: int) -> None:
        """Raise ReplayError unless they are dicts with goals, one observation in each item."""
        if not isinstance(obs, dict) or not {GOAL, ACHIEVED} <= obs.keys():
            raise ReplayError(f"{self.name}: observations have no '{ACHIEVED}' and '{GOAL}', expected a Dict of them")
        if frames > 1:
            raise ReplayError(
                f"{self.name}: each item of obs has {frames} observations, by Storage(frames={frames}), but a goal is "
                "for one; expected Storage(frames=1)"
            )
        achieved, desired = obs[ACHIEVED], obs[GOAL]
        kinds = [
            f"{leaf.dtype}{list(leaf.shape[1:])}" if isinstance(leaf, np.ndarray) else f"a {type(leaf).__name__}"
            for leaf in (achieved, desired)
        ]
        if not (
            isinstance(achieved, np.ndarray)
            and isinstance(desired, np.ndarray)
            and achieved.shape == desired.shape
            and np.can_cast(achieved.dtype, desired.dtype, "safe")
        ):
            raise ReplayError(
                f"{self.name}: '{ACHIEVED}' is {kinds[0]} and '{GOAL}' {kinds[1]}, expected arrays of one shape and "
                "dtype: what was achieved becomes the goal"
            )


def check_order(pieces: Sequence[ConnectorV2]) -> None:
    """Raise ReplayError if a piece before one that takes rewards from the replay could have changed them."""
    for before, piece in pairwise(pieces_within(pieces)):
        is_summing = isinstance(piece, SampledNStepReturns) and not isinstance(before, HindsightGoals)
        if is_summing or isinstance(piece, HindsightGoals):
            raise ReplayError(
                f"{piece.name} takes what it changes from the replay, but {before.name} stands before it; expected "
                "pieces=[HindsightGoals(...), SampledNStepReturns(...), ...], as far as they are there, in this order"
            )


def sampled_steps(name: str, episodes: Any) -> SampledSteps:
    """The single steps that a piece works on. Raises ReplayError for anything else."""
    if not isinstance(episodes, SampledSteps):
        raise ReplayError(
            f"{name} got {type(episodes).__name__}, expected what a replay has sampled: Replay(pieces=[{name}(...)])"
        )
    if episodes.is_padding is not None:
        raise ReplayError(f"{name} works on single steps, but the sampler draws sequences; expected Uniform() or such")
    return episodes
