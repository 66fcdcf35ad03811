"""Transitions over several steps at once, for value targets of the kind that DQN learns from."""

from typing import Any

import gymnasium as gym
import numpy as np

from rollflow.nodes.connectors.by_module import module_by_module
from rollflow.nodes.connectors.checked import checked_count, checked_gamma
from rollflow.nodes.connectors.common.add_observations_from_episodes_to_batch import LAST_OBSERVATIONS
from rollflow.nodes.connectors.connector_v2 import Batch, ConnectorV2, Episodes
from rollflow.nodes.connectors.learner.train_steps import TrainSteps
from rollflow.nodes.connectors.learner.values import refuse_added_steps
from rollflow.nodes.connectors.stateful import is_stateful
from rollflow.stream.columns import Columns
from rollflow.stream.errors import ModuleError
from rollflow.stream.tree import map_tree


class NStepReturns(ConnectorV2):
    """Makes of every step t a transition over m = min(`n_step`, steps left in the chunk) steps.

        n_step    how many steps at most, from 1 on
        gamma     discount of rewards, 0 … 1

        rewards                    f32[B]         sum of gamma**k * r[t + k] over k < m
        new_obs                    any[B, ...]    observation t + m
        terminateds, truncateds    bool[B]        whether step t + m - 1 ended the episode so
        n_step                     i64[B]         m: what `new_obs` is worth counts gamma**m

    The single rewards are the batch's where it has them, else the episodes'; the columns above are replaced, since one
    of them is wrong without the others. Where a piece before has made the batch's `obs`, `new_obs` are made of those. A
    batch that has `n_step` already stays as it is. Raises ConnectorError behind AddOneTsToEpisodesAndTruncate, and
    ModuleError for a stateful module and more than one step: `next_state_in` is the state one step on.
    """

    columnar = True
    changes_episodes = False

    def __init__(
        self,
        input_observation_space: gym.Space[Any] | None = None,
        input_action_space: gym.Space[Any] | None = None,
        *,
        n_step: int,
        gamma: float = 0.99,
    ) -> None:
        super().__init__(input_observation_space, input_action_space)
        self.n_step = checked_count("n_step", n_step, 1)
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
        if Columns.N_STEP in batch or not len(episodes):
            return batch
        if self.n_step > 1 and is_stateful(rl_module):
            raise ModuleError(
                f"NStepReturns over {self.n_step} steps can't be used with a stateful module, and "
                f"'{type(rl_module).__name__}' is one; expected n_step=1"
            )
        refuse_added_steps(self.name, shared_data)
        steps = TrainSteps(episodes)
        if not len(steps):
            return batch
        rewards, left = steps.finite_rewards(batch), steps.steps_left
        spans = np.minimum(left, self.n_step)
        sums = rewards.copy()
        for k in range(1, int(spans.max())):
            far = np.flatnonzero(spans > k)
            sums[far] += np.float32(self.gamma**k) * rewards[far + k]
        following = steps.next_observations(batch, (shared_data or {}).get(LAST_OBSERVATIONS))
        latest = np.arange(len(steps)) + spans - 1
        steps.put(batch, Columns.REWARDS, sums)
        steps.put(batch, Columns.NEXT_OBS, map_tree(lambda leaf: leaf[latest], following))
        steps.put(batch, Columns.TERMINATEDS, steps.at_lasts(steps.terminated)[latest])
        steps.put(batch, Columns.TRUNCATEDS, steps.at_lasts(steps.truncated)[latest])
        steps.put(batch, Columns.N_STEP, spans)
        return batch
