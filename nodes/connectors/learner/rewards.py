"""Pieces that rewrite rewards, or sum them up: clipped ones, returns to go, sums over n steps."""

from typing import Any

import numpy as np

from rollflow.nodes.argument_checks import checked_count, checked_fraction
from rollflow.nodes.connectors.connector_v2 import Space
from rollflow.nodes.connectors.learner.advantages import discounted_sums
from rollflow.nodes.connectors.learner.train_steps import StepsConnector, TrainSteps
from rollflow.nodes.connectors.stateful import is_stateful
from rollflow.stream.data.columns import Columns
from rollflow.stream.data.errors import ModuleError
from rollflow.stream.data.tree import Tree, map_tree


class ClipRewards(StepsConnector):
    """Makes the batch's `rewards`, f32[B], those of the episodes clipped; the episodes keep theirs.

        low, high    bounds; None: no bound on this side
        sign         True: each reward's sign instead, -1, 0 or 1

    Rewards that the batch has already are clipped in place. Pieces behind this one that take rewards from the batch see
    the clipped ones. Raises ValueError where the arguments clip nothing, or contradict each other.
    """

    def __init__(
        self,
        input_observation_space: Space | None = None,
        input_action_space: Space | None = None,
        *,
        low: float | None = None,
        high: float | None = None,
        sign: bool = False,
    ) -> None:
        if sign and (low is not None or high is not None):
            raise ValueError(f"sign=True leaves nothing to clip, but low is {low} and high is {high}; expected either")
        if not sign and low is None and high is None:
            raise ValueError("neither low nor high nor sign is given, expected one: nothing would be clipped")
        if not (-np.inf if low is None else low) < (np.inf if high is None else high):
            raise ValueError(f"low is {low} and high is {high}, expected low < high")
        super().__init__(input_observation_space, input_action_space)
        self.low = low
        self.high = high
        self.sign = sign

    def columns(self, steps: TrainSteps, rl_module: Any) -> dict[str, Tree]:
        rewards = steps.rewards()
        return {Columns.REWARDS: np.sign(rewards) if self.sign else np.clip(rewards, self.low, self.high)}


class ComputeReturnsToGo(StepsConnector):
    """Adds `returns_to_go`, f32[B]: the discounted sum of rewards from each step to the end of its chunk.

        gamma    discount of rewards, 0 … 1

    The sum ends with the chunk, also where that was cut or truncated. The rewards are the batch's where it has them,
    else the episodes'. A batch that has `returns_to_go` already stays as it is.
    """

    keeps = (Columns.RETURNS_TO_GO,)

    def __init__(
        self,
        input_observation_space: Space | None = None,
        input_action_space: Space | None = None,
        *,
        gamma: float = 0.99,
    ) -> None:
        super().__init__(input_observation_space, input_action_space)
        self.gamma = checked_fraction("gamma", gamma)

    def columns(self, steps: TrainSteps, rl_module: Any) -> dict[str, Tree]:
        discounts = np.full(len(steps), self.gamma, np.float32)
        return {Columns.RETURNS_TO_GO: discounted_sums(steps.finite_rewards(), discounts, steps.lengths)}


class NStepReturns(StepsConnector):
    """Makes of every step t a transition over m = min(`n_step`, steps left in the chunk) steps.

        n_step    largest number of steps, from 1 on
        gamma     discount of rewards, 0 … 1

        rewards                    f32[B]         sum of gamma**k * r[t + k] over k < m
        new_obs                    any[B, ...]    observation t + m
        terminateds, truncateds    bool[B]        True where step t + m - 1 ended the episode so
        n_step                     i64[B]         m: the value of `new_obs` counts gamma**m

    The single rewards are the batch's where it has them, else the episodes'. The columns above are replaced, since one
    of them is wrong without the others. Where a piece before has made the batch's `obs`, `new_obs` are made of those. A
    batch that has `n_step` already stays as it is.

    Raises ConnectorError behind AddOneTsToEpisodesAndTruncate. Raises ModuleError for a stateful module and more than
    one step: `next_state_in` is the state one step on.
    """

    keeps = (Columns.N_STEP,)
    looks_ahead = True

    def __init__(
        self,
        input_observation_space: Space | None = None,
        input_action_space: Space | None = None,
        *,
        n_step: int,
        gamma: float = 0.99,
    ) -> None:
        super().__init__(input_observation_space, input_action_space)
        self.n_step = checked_count("n_step", n_step, 1)
        self.gamma = checked_fraction("gamma", gamma)

    def columns(self, steps: TrainSteps, rl_module: Any) -> dict[str, Tree]:
        if self.n_step > 1 and is_stateful(rl_module):
            raise ModuleError(
                f"NStepReturns over {self.n_step} steps can't be used with a stateful module, and "
                f"'{type(rl_module).__name__}' is one; expected n_step=1"
            )
        rewards = steps.finite_rewards()
        spans = np.minimum(steps.steps_left, self.n_step)
        sums = rewards.copy()
        for k in range(1, int(spans.max())):
            far = np.flatnonzero(spans > k)
            sums[far] += np.float32(self.gamma**k) * rewards[far + k]
        following = steps.next_observations()
        latest = np.arange(len(steps)) + spans - 1
        return {
            Columns.REWARDS: sums,
            Columns.NEXT_OBS: map_tree(lambda leaf: leaf[latest], following),
            Columns.TERMINATEDS: steps.at_lasts(steps.terminated)[latest],
            Columns.TRUNCATEDS: steps.at_lasts(steps.truncated)[latest],
            Columns.N_STEP: spans,
        }
