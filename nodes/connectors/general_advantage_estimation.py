"""Generalised advantage estimation as a learner piece (Schulman et al. 2016, arXiv:1506.02438)."""

from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from numpy.typing import NDArray

from rollflow.nodes.connectors.add_observations_from_episodes_to_batch import LAST_OBSERVATIONS
from rollflow.nodes.connectors.add_one_ts_to_episodes_and_truncate import STEP_ADDED
from rollflow.nodes.connectors.add_time_dim_to_batch_and_zero_pad import is_stateful
from rollflow.nodes.connectors.batch_individual_items import BatchIndividualItems
from rollflow.nodes.connectors.connector_v2 import ConnectorV2
from rollflow.nodes.connectors.discount import checked_gamma, discounted_sums
from rollflow.nodes.connectors.train_steps import TrainSteps, tensors_of
from rollflow.stream.columns import Columns
from rollflow.stream.episode import SingleAgentEpisode
from rollflow.stream.errors import ConnectorError, ModuleError
from rollflow.stream.tree import Tree, map_tree

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

    def __call__(
        self,
        *,
        rl_module: Any,
        batch: dict[str, Any],
        episodes: Sequence[SingleAgentEpisode],
        explore: bool | None = None,
        shared_data: dict[str, Any] | None = None,
        metrics: Any = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        if not len(episodes):
            return batch
        if (shared_data or {}).get(STEP_ADDED):
            raise ConnectorError(
                f"{self.name} works out the value of each chunk's last observation itself: take "
                "AddOneTsToEpisodesAndTruncate out of the pipeline, or put it behind"
            )
        steps = TrainSteps(episodes)
        if not len(steps):
            return batch
        values = self._values(rl_module, batch, episodes, steps)
        lasting = ~steps.terminated
        after = np.zeros(len(lasting), np.float32)
        if lasting.any():
            last = (shared_data or {}).get(LAST_OBSERVATIONS)
            observations = (
                steps.last_observations(lasting) if last is None else map_tree(lambda leaf: leaf[lasting], last)
            )
            states = steps.last_output(Columns.STATE_OUT, lasting) if is_stateful(rl_module) else None
            after[lasting] = _computed(rl_module, observations, states)
        deltas = steps.rewards(batch) + np.float32(self.gamma) * steps.following(values, after) - values
        carry = np.full(len(deltas), self.gamma * self.lambda_, np.float32)
        advantages = discounted_sums(deltas, carry, steps.lengths)
        targets = advantages + values
        if self.normalize_advantages:
            advantages = (advantages - advantages.mean()) / np.maximum(advantages.std(), np.float32(1e-4))
        steps.put(batch, Columns.ADVANTAGES, advantages)
        steps.put(batch, Columns.VALUE_TARGETS, targets)
        return batch

    def _values(
        self, rl_module: Any, batch: dict[str, Any], episodes: Sequence[SingleAgentEpisode], steps: TrainSteps
    ) -> Floats:
        """f32[B]: the value of the observation before every step."""
        if Columns.VF_PREDS in steps.extra_columns:
            recorded: Floats = np.asarray(steps.extra_output(Columns.VF_PREDS), np.float32)
            if recorded.ndim > 1:
                raise ModuleError(
                    f"'{Columns.VF_PREDS}' has shape {list(recorded.shape)}, expected {list(recorded.shape[:1])}: one "
                    "number for each step; squeeze(-1) what a layer with one output gives"
                )
            return recorded
        observations = batch.get(Columns.OBS)
        if observations is None:
            return _computed(rl_module, steps.observations(), None)
        batched = BatchIndividualItems()(rl_module=None, batch={Columns.OBS: observations}, episodes=episodes)
        return _computed(rl_module, batched[Columns.OBS], None)


def _computed(rl_module: Any, observations: Tree, states: Tree | None) -> Floats:
    """f32[B]: the module's values of a batch of observations, a tree of arrays `any[B, ...]`.

    A stateful module needs the states before them, too, a tree of arrays `any[B, ...]`.
    """
    compute_values = getattr(rl_module, "compute_values", None)
    if compute_values is None:
        raise ModuleError(
            f"GeneralAdvantageEstimation needs values, but module '{type(rl_module).__name__}' has no "
            "compute_values(batch); expected f32[B] from it for a batch of observations"
        )
    if states is None and is_stateful(rl_module):
        raise ModuleError(
            f"GeneralAdvantageEstimation needs the values that a stateful module saw: let '{type(rl_module).__name__}' "
            f"give '{Columns.VF_PREDS}' in its forward passes"
        )
    parameter = next(iter(rl_module.parameters()), None) if isinstance(rl_module, torch.nn.Module) else None
    device = torch.device("cpu") if parameter is None else parameter.device
    batch = {Columns.OBS: tensors_of(observations, device)}
    if states is not None:
        batch = {
            Columns.OBS: map_tree(lambda leaf: leaf[:, None], batch[Columns.OBS]),
            Columns.STATE_IN: tensors_of(states, device),
        }
    with torch.no_grad():
        values: Floats = compute_values(batch).detach().cpu().numpy()
    return values.reshape(-1).astype(np.float32, copy=False)
