"""Generalised advantage estimation as a learner piece (Schulman et al. 2016, arXiv:1506.02438)."""

from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from rollflow.nodes.connectors.by_module import module_by_module
from rollflow.nodes.connectors.checked import checked_gamma
from rollflow.nodes.connectors.connector_v2 import Batch, ConnectorV2, Episodes
from rollflow.nodes.connectors.learner.discount import discounted_sums
from rollflow.nodes.connectors.learner.train_steps import TrainSteps
from rollflow.nodes.connectors.learner.values import last_observations, refuse_added_steps, values_of
from rollflow.nodes.connectors.stateful import is_stateful
from rollflow.stream.columns import Columns
from rollflow.stream.errors import ModuleError

Floats = NDArray[np.float32]


class GeneralAdvantageEstimation(ConnectorV2):
    """Adds `advantages` and `value_targets`, f32[B] each, to the train batch.

        gamma                   discount of rewards, 0 … 1
        lambda_                 weight of longer returns, 0 … 1
        normalize_advantages    shift and scale `advantages` over the batch to mean 0 and deviation 1

    Rewards are the batch's where a piece before has put them there, else the episodes'. Values are the recorded
    `vf_preds` where the module gave them, else `rl_module.compute_values(batch)` over the observations, those of the
    batch if it has them.

    The value of the observation after a chunk's last step, which is always computed anew, stands in for what comes
    after it, unless the episode terminated there: truncation and the fragment's end are no ends of the task. A piece
    before this one that makes `obs` itself, such as a stack, leaves in `shared_data["last_observations"]` what it makes
    of each chunk's last one. Of a stateful module the values must be recorded, and that last one is computed with the
    chunk's last `state_out`.

    Raises ConnectorError behind AddOneTsToEpisodesAndTruncate, ModuleError when values are needed and the module can't
    compute them, ValueError for a `gamma` or `lambda_` outside 0 … 1.
    """

    columnar = True
    changes_episodes = False

    def __init__(
        self,
        input_observation_space: gym.Space[Any] | None = None,
        input_action_space: gym.Space[Any] | None = None,
        *,
        gamma: float = 0.99,
        lambda_: float = 0.95,
        normalize_advantages: bool = True,
    ) -> None:
        super().__init__(input_observation_space, input_action_space)
        if not 0.0 <= lambda_ <= 1.0:
            raise ValueError(f"lambda_ is {lambda_}, expected 0 … 1")
        self.gamma = checked_gamma(gamma)
        self.lambda_ = lambda_
        self.normalize_advantages = normalize_advantages

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
        refuse_added_steps(self.name, shared_data)
        steps = TrainSteps(episodes)
        if not len(steps):
            return batch
        values = self._values(rl_module, batch, steps)
        lasting = ~steps.terminated & (steps.lengths > 0)
        after = np.zeros(len(lasting), np.float32)
        if lasting.any():
            last = last_observations(steps, batch, shared_data, lasting)
            states = steps.last_output(Columns.STATE_OUT, lasting) if is_stateful(rl_module) else None
            after[lasting] = values_of(self.name, rl_module, last, states)
        deltas = steps.finite_rewards(batch) + np.float32(self.gamma) * steps.following(values, after) - values
        carry = np.full(len(deltas), self.gamma * self.lambda_, np.float32)
        advantages = discounted_sums(deltas, carry, steps.lengths)
        targets = advantages + values
        if self.normalize_advantages:
            # In float64, so that the order of the rows makes no difference.
            mean, deviation = advantages.mean(dtype=np.float64), advantages.std(dtype=np.float64)
            advantages = ((advantages - mean) / max(deviation, 1e-4)).astype(np.float32)
        steps.put(batch, Columns.ADVANTAGES, advantages)
        steps.put(batch, Columns.VALUE_TARGETS, targets)
        return batch

    def _values(self, rl_module: Any, batch: Batch, steps: TrainSteps) -> Floats:
        """f32[B]: the value of the observation before every step."""
        if Columns.VF_PREDS in steps.extra_columns:
            recorded: Floats = np.asarray(steps.extra_output(Columns.VF_PREDS), np.float32)
            if recorded.ndim > 1:
                raise ModuleError(
                    f"'{Columns.VF_PREDS}' has shape {list(recorded.shape)}, expected {list(recorded.shape[:1])}: one "
                    "number for each step; squeeze(-1) what a layer with one output gives"
                )
            return recorded
        if is_stateful(rl_module):
            raise ModuleError(
                f"{self.name} needs the values that a stateful module saw: let '{type(rl_module).__name__}' give "
                f"'{Columns.VF_PREDS}' in its forward passes"
            )
        observations = steps.batched(batch, Columns.OBS) if Columns.OBS in batch else steps.observations()
        return values_of(self.name, rl_module, observations)
