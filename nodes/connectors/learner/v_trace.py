"""V-trace as a learner piece (Espeholt et al. 2018, arXiv:1802.01561)."""

from typing import Any

import gymnasium as gym
import numpy as np
import torch
from numpy.typing import NDArray

from rollflow.nodes.connectors.by_module import module_by_module
from rollflow.nodes.connectors.checked import checked_gamma
from rollflow.nodes.connectors.connector_v2 import Batch, ConnectorV2, Episodes
from rollflow.nodes.connectors.learner.discount import discounted_sums
from rollflow.nodes.connectors.learner.train_steps import TrainSteps, tensors_of
from rollflow.nodes.connectors.learner.values import (
    device_of,
    last_observations,
    numbers_of,
    refuse_added_steps,
    values_of,
)
from rollflow.nodes.connectors.stateful import is_stateful
from rollflow.stream.columns import Columns
from rollflow.stream.errors import ModuleError
from rollflow.stream.tree import Tree

Floats = NDArray[np.float32]


class VTrace(ConnectorV2):
    """Adds `value_targets` and `advantages`, f32[B] each and not normalised, corrected for actions of older weights.

        gamma         discount of rewards, 0 … 1
        rho_clip      most that a step's importance ratio counts for in its own correction; inf: any
        c_clip        most that it counts for in passing on the corrections after it
        pg_rho_clip   most that it counts for in `advantages`

    With ratios rho_t of the module's probability of each action to the recorded `action_logp`, and V its values:

        vs_t          = V_t + min(rho_clip, rho_t) (r_t + gamma V_t+1 - V_t) + gamma min(c_clip, rho_t) (vs_t+1 - V_t+1)
        advantage_t   = min(pg_rho_clip, rho_t) (r_t + gamma vs_t+1 - V_t)

    After a chunk's last step, V and vs are the value of its last observation, or 0 where the episode terminated.
    Observations and rewards are the batch's where it has them, else the episodes'; a piece that makes `obs` itself
    leaves what it makes of each chunk's last one in `shared_data["last_observations"]`. A column that the batch has
    already stays as it is.

    Raises ConnectorError behind AddOneTsToEpisodesAndTruncate, ModuleError for a stateful module, and where the module
    or the episodes lack what is needed.
    """

    columnar = True
    changes_episodes = False

    def __init__(
        self,
        input_observation_space: gym.Space[Any] | None = None,
        input_action_space: gym.Space[Any] | None = None,
        *,
        gamma: float = 0.99,
        rho_clip: float = 1.0,
        c_clip: float = 1.0,
        pg_rho_clip: float = 1.0,
    ) -> None:
        for name, clip in (("rho_clip", rho_clip), ("c_clip", c_clip), ("pg_rho_clip", pg_rho_clip)):
            if not clip >= 0.0:
                raise ValueError(f"{name} is {clip}, expected 0 or more")
        super().__init__(input_observation_space, input_action_space)
        self.gamma = checked_gamma(gamma)
        self.rho_clip = rho_clip
        self.c_clip = c_clip
        self.pg_rho_clip = pg_rho_clip

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
        refuse_added_steps(self.name, shared_data)
        wanted = [column for column in (Columns.VALUE_TARGETS, Columns.ADVANTAGES) if column not in batch]
        if not wanted or not len(episodes):
            return batch
        if is_stateful(rl_module):
            raise ModuleError(
                f"VTrace can't be used with a stateful module yet, and '{type(rl_module).__name__}' is one: "
                "is_stateful() is True"
            )
        steps = TrainSteps(episodes)
        if not len(steps):
            return batch
        rewards = steps.finite_rewards(batch)
        observations = steps.batched(batch, Columns.OBS) if Columns.OBS in batch else steps.observations()
        with torch.no_grad():
            ratios, values = _ratios_and_values(rl_module, steps, observations)
            after = self._values_after(rl_module, steps, batch, shared_data)
        targets, advantages = self._targets_and_advantages(steps, rewards, ratios, values, after)
        for column, made in ((Columns.VALUE_TARGETS, targets), (Columns.ADVANTAGES, advantages)):
            if column in wanted:
                steps.put(batch, column, made)
        return batch

    def _targets_and_advantages(
        self, steps: TrainSteps, rewards: Floats, ratios: Floats, values: Floats, after: Floats
    ) -> tuple[Floats, Floats]:
        """f32[B] each, from f32[B] each and the values `after` each chunk, f32[C]."""
        gamma = np.float32(self.gamma)
        deltas: Floats = _clipped(ratios, self.rho_clip) * (rewards + gamma * steps.following(values, after) - values)
        discounts: Floats = gamma * _clipped(ratios, self.c_clip)
        targets: Floats = values + discounted_sums(deltas, discounts, steps.lengths)
        errors: Floats = rewards + gamma * steps.following(targets, after) - values
        return targets, _clipped(ratios, self.pg_rho_clip) * errors

    def _values_after(
        self, rl_module: Any, steps: TrainSteps, batch: Batch, shared_data: dict[str, Any] | None
    ) -> Floats:
        """f32[C]: the value of each chunk's last observation, 0 where the episode terminated."""
        after = np.zeros(len(steps.lengths), np.float32)
        lasting = ~steps.terminated & (steps.lengths > 0)
        if lasting.any():
            last = last_observations(steps, batch, shared_data, lasting)
            after[lasting] = values_of(self.name, rl_module, last)
        return after


def _clipped(ratios: Floats, most: float) -> Floats:
    clipped: Floats = np.minimum(ratios, np.float32(most))
    return clipped


def _ratios_and_values(rl_module: Any, steps: TrainSteps, observations: Tree) -> tuple[Floats, Floats]:
    """f32[B] each: how much likelier the module makes each action now than it was, and its values."""
    if Columns.ACTION_LOGP not in steps.extra_columns:
        raise ModuleError(
            f"VTrace needs '{Columns.ACTION_LOGP}', the log-probabilities that actions were chosen with, but the "
            f"episodes have none; extra outputs: {', '.join(steps.extra_columns) or 'none'}"
        )
    name, device = type(rl_module).__name__, device_of(rl_module)
    for method in ("forward_train", "get_train_action_dist_cls"):
        if not hasattr(rl_module, method):
            raise ModuleError(f"VTrace needs the module's probabilities of actions, but '{name}' has no {method}()")
    tensors = {Columns.OBS: tensors_of(observations, device)}
    output = rl_module.forward_train(tensors)
    if Columns.ACTION_DIST_INPUTS not in output:
        raise ModuleError(
            f"VTrace needs the module's probabilities of actions, but {name}.forward_train gave {sorted(output)}, "
            f"expected '{Columns.ACTION_DIST_INPUTS}' among them"
        )
    distribution = rl_module.get_train_action_dist_cls().from_logits(output[Columns.ACTION_DIST_INPUTS])
    logp = numbers_of(distribution.logp(tensors_of(steps.actions(), device)), "logp of actions", name, (len(steps),))
    acted = steps.extra_output(Columns.ACTION_LOGP).astype(np.float32, copy=False)
    if Columns.VF_PREDS in output:
        values = numbers_of(output[Columns.VF_PREDS], f"'{Columns.VF_PREDS}'", name, (len(steps),))
    else:
        values = values_of("VTrace", rl_module, observations)
    with np.errstate(over="ignore"):  # an infinite ratio is clipped like any other
        ratios: Floats = np.exp(logp - acted)
    return ratios, values
