"""Rewards clipped for the learner."""

from typing import Any

import gymnasium as gym
import numpy as np

from rollflow.nodes.connectors.by_module import module_by_module
from rollflow.nodes.connectors.connector_v2 import Batch, ConnectorV2, Episodes
from rollflow.nodes.connectors.learner.train_steps import TrainSteps
from rollflow.stream.columns import Columns


class ClipRewards(ConnectorV2):
    """Makes the batch's `rewards`, f32[B], those of the episodes clipped; the episodes keep theirs.

        low, high    what the rewards are clipped to; None: not on this side
        sign         each reward's sign instead: -1, 0 or 1

    Rewards that the batch has already are clipped where they stand. Pieces behind this one that take rewards from the
    batch see the clipped ones. Raises ValueError where the arguments clip nothing, or contradict each other.
    """

    columnar = True
    changes_episodes = False

    def __init__(
        self,
        input_observation_space: gym.Space[Any] | None = None,
        input_action_space: gym.Space[Any] | None = None,
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

    @module_by_module
    def __call__(
        self,
        *,
        rl_module: Any,
        batch: Batch,
        episodes: Episodes,
        explore: bool | None = None,
        shared_data: dict[str, Any] | None = None,
        metrics: Any = None,
        **kwargs: Any,
    ) -> Batch:
        if not len(episodes):
            return batch
        steps = TrainSteps(episodes)
        rewards = steps.rewards(batch)
        clipped = np.sign(rewards) if self.sign else np.clip(rewards, self.low, self.high)
        steps.put(batch, Columns.REWARDS, clipped)
        return batch
