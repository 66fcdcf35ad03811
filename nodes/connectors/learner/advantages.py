"""Pieces that estimate advantages and value targets, by GAE (arXiv:1506.02438) and V-trace (arXiv:1802.01561)."""

from math import inf
from typing import Any

import numpy as np
import torch

from rollflow.nodes.argument_checks import checked_fraction, checked_number
from rollflow.nodes.connectors.connector_v2 import Space
from rollflow.nodes.connectors.learner.train_steps import Floats, StepsConnector, TrainSteps, tensors_of
from rollflow.nodes.connectors.learner.values import (
    device_of,
    discounted_sums,
    numbers_of,
    values_after,
    values_of,
)
from rollflow.nodes.connectors.stateful import is_stateful
from rollflow.stream.data.columns import Columns
from rollflow.stream.data.errors import ModuleError
from rollflow.stream.data.tree import Tree


class GeneralAdvantageEstimation(StepsConnector):
    """Adds `advantages` and `value_targets`, f32[B] each, to the train batch.

        gamma                   discount of rewards, 0 … 1
        lambda_                 weight of longer returns, 0 … 1
        normalize_advantages    True: shift and scale `advantages` over the batch to mean 0 and deviation 1

    Rewards and observations are the batch's where it has them, else the episodes'. Values are the recorded `vf_preds`
    where the module gave them, else `rl_module.compute_values(batch)`.

    The value of the observation after a chunk's last step is always computed anew. It stands in for all that comes
    after, unless the episode terminated there: truncation and the fragment's end are no ends of the task. A piece
    before this one that makes `obs` itself, such as a stack, sets `shared_data["last_observations"]` to each chunk's
    last one.

    The values of a stateful module must be recorded; the one after the chunk is computed with the last `state_out`.

    Raises ConnectorError behind AddOneTsToEpisodesAndTruncate, ModuleError when values are needed and the module can't
    compute them, ValueError for a `gamma` or `lambda_` outside 0 … 1.
    """

    looks_ahead = True

    def __init__(
        self,
        input_observation_space: Space | None = None,
        input_action_space: Space | None = None,
        *,
        gamma: float = 0.99,
        lambda_: float = 0.95,
        normalize_advantages: bool = True,
    ) -> None:
        super().__init__(input_observation_space, input_action_space)
        self.gamma = checked_fraction("gamma", gamma)
        self.lambda_ = checked_fraction("lambda_", lambda_)
        self.normalize_advantages = normalize_advantages

    def columns(self, steps: TrainSteps, rl_module: Any) -> dict[str, Tree]:
        values = self._values(rl_module, steps)
        after = values_after(self.name, rl_module, steps)
        deltas = steps.finite_rewards() + np.float32(self.gamma) * steps.following(values, after) - values
        carry = np.full(len(deltas), self.gamma * self.lambda_, np.float32)
        advantages = discounted_sums(deltas, carry, steps.lengths)
        targets = advantages + values
        if self.normalize_advantages:
            # In float64, so that the order of the rows makes no difference.
            mean, deviation = advantages.mean(dtype=np.float64), advantages.std(dtype=np.float64)
            advantages = ((advantages - mean) / max(deviation, 1e-4)).astype(np.float32)
        return {Columns.ADVANTAGES: advantages, Columns.VALUE_TARGETS: targets}

    def _values(self, rl_module: Any, steps: TrainSteps) -> Floats:
        """f32[B]: the value of the observation before every step."""
        if Columns.VF_PREDS in steps.extra_columns:
            recorded: Floats = np.asarray(steps.recorded(Columns.VF_PREDS), np.float32)
            if recorded.ndim > 1:
                raise ModuleError(
                    f"'{Columns.VF_PREDS}' has shape {list(recorded.shape)}, expected {list(recorded.shape[:1])}: one "
                    "number for each step; squeeze(-1) what a layer with one output gives"
                ).see("module")
            steps.check_finite(recorded, f"the module's '{Columns.VF_PREDS}'", ModuleError)
            return recorded
        if is_stateful(rl_module):
            raise ModuleError(
                f"{self.name} needs the values that a stateful module saw: let '{type(rl_module).__name__}' give "
                f"'{Columns.VF_PREDS}' in its forward passes"
            )
        return values_of(self.name, rl_module, steps.observations())


class VTrace(StepsConnector):
    """Adds `value_targets` and `advantages`, f32[B] each and not normalised, corrected for actions of older weights.

        gamma         discount of rewards, 0 … 1
        rho_clip      largest importance ratio of a step in its own correction; inf: any
        c_clip        largest ratio in passing on the corrections after it
        pg_rho_clip   largest ratio in `advantages`

    With ratios rho_t of the module's probability of each action to the recorded `action_logp`, and V its values:

        vs_t          = V_t + min(rho_clip, rho_t) (r_t + gamma V_t+1 - V_t) + gamma min(c_clip, rho_t) (vs_t+1 - V_t+1)
        advantage_t   = min(pg_rho_clip, rho_t) (r_t + gamma vs_t+1 - V_t)

    After a chunk's last step, V and vs are the value of its last observation, or 0 where the episode terminated.
    Observations and rewards are the batch's where it has them, else the episodes'. A piece that makes `obs` itself sets
    `shared_data["last_observations"]` to each chunk's last one. A column that the batch has already stays as it is.

    Raises ConnectorError behind AddOneTsToEpisodesAndTruncate. Raises ModuleError for a stateful module, and where the
    module or the episodes lack a column or a method.
    """

    keeps = (Columns.VALUE_TARGETS, Columns.ADVANTAGES)
    looks_ahead = True

    def __init__(
        self,
        input_observation_space: Space | None = None,
        input_action_space: Space | None = None,
        *,
        gamma: float = 0.99,
        rho_clip: float = 1.0,
        c_clip: float = 1.0,
        pg_rho_clip: float = 1.0,
    ) -> None:
        super().__init__(input_observation_space, input_action_space)
        self.gamma = checked_fraction("gamma", gamma)
        self.rho_clip = checked_number("rho_clip", rho_clip, least=0, most=inf)
        self.c_clip = checked_number("c_clip", c_clip, least=0, most=inf)
        self.pg_rho_clip = checked_number("pg_rho_clip", pg_rho_clip, least=0, most=inf)

    def columns(self, steps: TrainSteps, rl_module: Any) -> dict[str, Tree]:
        if is_stateful(rl_module):
            raise ModuleError(
                f"VTrace can't be used with a stateful module yet, and '{type(rl_module).__name__}' is one: "
                "is_stateful() is True"
            )
        rewards, gamma = steps.finite_rewards(), np.float32(self.gamma)
        with torch.no_grad():
            ratios, values = _ratios_and_values(rl_module, steps, steps.observations())
            after = values_after(self.name, rl_module, steps)
        deltas: Floats = _clipped(ratios, self.rho_clip) * (rewards + gamma * steps.following(values, after) - values)
        discounts: Floats = gamma * _clipped(ratios, self.c_clip)
        targets: Floats = values + discounted_sums(deltas, discounts, steps.lengths)
        errors: Floats = rewards + gamma * steps.following(targets, after) - values
        return {Columns.VALUE_TARGETS: targets, Columns.ADVANTAGES: _clipped(ratios, self.pg_rho_clip) * errors}


def _clipped(ratios: Floats, most: float) -> Floats:
    clipped: Floats = np.minimum(ratios, np.float32(most))
    return clipped


def _ratios_and_values(rl_module: Any, steps: TrainSteps, observations: Tree) -> tuple[Floats, Floats]:
    """f32[B] each: ratios of each action's probability now to that when it was chosen, and the module's values."""
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
    logp = numbers_of(
        distribution.logp(tensors_of(steps.recorded(Columns.ACTIONS), device)), "logp of actions", name, (len(steps),)
    )
    acted = steps.recorded(Columns.ACTION_LOGP).astype(np.float32, copy=False)
    if Columns.VF_PREDS in output:
        values = numbers_of(output[Columns.VF_PREDS], f"'{Columns.VF_PREDS}'", name, (len(steps),))
        steps.check_finite(values, f"the module's '{Columns.VF_PREDS}'", ModuleError)
    else:
        values = values_of("VTrace", rl_module, observations)
    with np.errstate(over="ignore"):  # an infinite ratio is clipped like any other
        ratios: Floats = np.exp(logp - acted)
    return ratios, values
