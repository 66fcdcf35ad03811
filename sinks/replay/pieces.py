"""Learner pieces that work on what a replay has sampled: n-step returns, and goals in hindsight."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollflow.nodes.argument_checks import checked_count, checked_fraction
from rollflow.nodes.connectors.connector_v2 import Batch, ConnectorV2
from rollflow.sinks.replay.sampled_steps import SampledSteps
from rollflow.stream.data.columns import Columns
from rollflow.stream.data.errors import ReplayError

Rewards = Callable[[NDArray[Any], NDArray[Any], Any], Any]
_GOAL, _ACHIEVED = "desired_goal", "achieved_goal"


class SampledNStepReturns(ConnectorV2):
    """Makes of every sampled step t a transition over m steps of its episode, at most `n_step`.

        n_step    largest number of steps, from 1 on
        gamma     discount of rewards, 0 … 1

        rewards                    f32[B]         sum of gamma**k * r[t + k] over k < m
        new_obs                    any[B, ...]    observation t + m
        terminateds, truncateds    bool[B]        those of step t + m - 1
        n_step                     i64[B]         m: the value of `new_obs` counts gamma**m

    m is less than `n_step` where the episode ends, or has not gone on yet. Single rewards are those that were inserted,
    so a piece that changes rewards stands behind this one. Raises ReplayError outside a replay, and for sequences.
    """

    columnar = True
    changes_episodes = False

    def __init__(self, *, n_step: int, gamma: float = 0.99) -> None:
        super().__init__()
        self.n_step, self.gamma = checked_count("n_step", n_step, 1), checked_fraction("gamma", gamma)

    def __call__(self, *, batch: Batch, episodes: Any, **kwargs: Any) -> Batch:
        steps = sampled_steps(self.name, episodes)
        at = steps.positions
        rewards = steps.read(Columns.REWARDS, at).astype(np.float32)
        spans = np.ones(len(at), np.int64)
        goes_on = np.ones(len(at), np.bool_)
        for k in range(1, self.n_step):
            following, is_step = steps.goes_on(at)
            goes_on &= is_step
            if not goes_on.any():
                break
            at = np.where(goes_on, following, at)
            rewards += np.float32(self.gamma**k) * steps.read(Columns.REWARDS, at) * goes_on
            spans += goes_on
        batch[Columns.REWARDS] = rewards
        batch[Columns.NEXT_OBS] = steps.next_observations(at)
        batch[Columns.TERMINATEDS] = steps.read(Columns.TERMINATEDS, at)
        batch[Columns.TRUNCATEDS] = steps.read(Columns.TRUNCATEDS, at)
        batch[Columns.N_STEP] = spans
        return batch


class HindsightGoals(ConnectorV2):
    """Gives sampled steps goals that their episode has reached later on, and the rewards for these.

        compute_reward    (achieved goals any[B, ...], desired goals any[B, ...], info) -> rewards, as goal environments
                          of gymnasium-robotics have it; `info` is an empty dict
        share             of the steps that get such a goal, 0 … 1

    Observations are dicts with "achieved_goal" and "desired_goal". A step's new goal is what the episode has achieved
    after one of the steps from this one on, drawn from those that are kept, each with the same probability. It stands
    in `obs` and `new_obs`, and `rewards` are computed for what was achieved after the step. Ends stay as they were.

    Stands before pieces that change rewards. Raises ReplayError outside a replay, and for other observations.
    """

    columnar = True
    changes_episodes = False

    def __init__(self, compute_reward: Rewards, *, share: float = 0.8) -> None:
        super().__init__()
        self.compute_reward, self.share = compute_reward, checked_fraction("share", share)

    def __call__(self, *, batch: Batch, episodes: Any, **kwargs: Any) -> Batch:
        steps = sampled_steps(self.name, episodes)
        obs, new_obs = batch[Columns.OBS], batch[Columns.NEXT_OBS]
        if not isinstance(obs, dict) or not {_GOAL, _ACHIEVED} <= obs.keys():
            raise ReplayError(f"{self.name}: observations have no '{_ACHIEVED}' and '{_GOAL}', expected a Dict of them")
        draws = steps.generator
        chosen = np.flatnonzero(draws.random(len(steps)) < self.share)
        if not len(chosen):
            return batch
        at = steps.positions[chosen]
        _, left = steps.rows.ahead(at)
        later, _ = steps.rows.ahead(at, draws.integers(0, left + 1))
        goals = steps.next_observations(later)[_ACHIEVED]
        obs[_GOAL][chosen] = goals
        new_obs[_GOAL][chosen] = goals
        batch[Columns.REWARDS][chosen] = self.compute_reward(new_obs[_ACHIEVED][chosen], goals, {})
        return batch


def sampled_steps(name: str, episodes: Any) -> SampledSteps:
    """The single steps that a piece works on. Raises ReplayError for anything else."""
    if not isinstance(episodes, SampledSteps):
        raise ReplayError(
            f"{name} got {type(episodes).__name__}, expected what a replay has sampled: Replay(pieces=[{name}(...)])"
        ).see("replay")
    if episodes.is_padding is not None:
        raise ReplayError(f"{name} works on single steps, but the sampler draws sequences; expected Uniform() or such")
    return episodes
