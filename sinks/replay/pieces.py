"""Learner pieces that work on what a replay has sampled: n-step returns, and goals in hindsight."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollflow.nodes.argument_checks import checked_count, checked_fraction
from rollflow.nodes.connectors.connector_v2 import Batch, ConnectorV2
from rollflow.nodes.connectors.pipelines.connector_pipeline_v2 import pieces_within
from rollflow.sinks.replay.sampled_steps import ACHIEVED, GOAL, RowGoals, SampledSteps
from rollflow.stream.data.columns import Columns
from rollflow.stream.data.errors import ReplayError

GoalFunction = Callable[[NDArray[Any], NDArray[Any], Any], Any]


class SampledNStepReturns(ConnectorV2):
    """Makes of every sampled step t a transition over m steps of its episode, at most `n_step`.

        n_step    largest number of steps, from 1 on
        gamma     discount of rewards, 0 … 1

        rewards                    f32[B]         sum of gamma**k * r[t + k] over k < m
        new_obs                    any[B, ...]    observation t + m
        terminateds, truncateds    bool[B]        those of step t + m - 1, as is any `bootstrap_from`
        n_step                     i64[B]         m: the value of `new_obs` counts gamma**m

    m is less than `n_step` where the episode ends, or has not gone on yet. Single rewards are those that were inserted,
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
        if steps.goals is not None:
            steps.goals.put_in(new_obs)
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
        reached = steps.next_observations(later)[ACHIEVED]
        goals = steps.goals = RowGoals(self, chosen, reached)
        goals.put_in(obs)
        goals.put_in(new_obs)
        goals.judge(new_obs, batch[Columns.REWARDS], batch[Columns.TERMINATEDS])
        return batch

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
    """Raise ReplayError where a piece before one that takes rewards from the replay could have changed them."""
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
