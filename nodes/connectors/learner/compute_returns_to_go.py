"""Returns to go: what is still to come of an episode's rewards."""

from typing import Any

import gymnasium as gym
import numpy as np

from rollflow.nodes.connectors.by_module import module_by_module
from rollflow.nodes.connectors.checked import checked_gamma
from rollflow.nodes.connectors.connector_v2 import Batch, ConnectorV2, Episodes
from rollflow.nodes.connectors.learner.discount import discounted_sums
from rollflow.nodes.connectors.learner.train_steps import TrainSteps
from rollflow.stream.columns import Columns


class ComputeReturnsToGo(ConnectorV2):
    """Adds `returns_to_go`, f32[B]: the discounted sum of rewards from each step to the end of its chunk.

        gamma    discount of rewards, 0 … 1

    Nothing stands in for what comes after a chunk that was cut or truncated. The rewards are the batch's where it has
    them, else the episodes'. A batch that has `returns_to_go` already stays as it is.
    """

    columnar = True
    changes_episodes = False

    def __init__(
        self,
        input_observation_space: gym.Space[Any] | None = None,
        input_action_space: gym.Space[Any] | None = None,
        *,
        gamma: float = 0.99,
    ) -> None:
        super().__init__(input_observation_space, input_action_space)
        self.gamma = checked_gamma(gamma)

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
        if Columns.RETURNS_TO_GO in batch or not len(episodes):
            return batch
        steps = TrainSteps(episodes)
        rewards = steps.finite_rewards(batch)
        returns = discounted_sums(rewards, np.full(len(steps), self.gamma, np.float32), steps.lengths)
        steps.put(batch, Columns.RETURNS_TO_GO, returns)
        return batch
