"""Pieces that work out advantages and value targets, by GAE (arXiv:1506.02438) and V-trace (arXiv:1802.01561), and
returns: to the end, over n steps, of clipped rewards.
"""

from dataclasses import dataclass
from math import inf
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rollflow.nodes.argument_checks import checked_count, checked_fraction, checked_number, checking_constructor
from rollflow.nodes.connectors.learner.train_columns import Floats, StepsConnector, TrainSteps, tensors_of
from rollflow.nodes.connectors.stateful import is_stateful
from rollflow.stream.data.columns import Columns
from rollflow.stream.data.errors import ModuleError
from rollflow.stream.data.tree import Tree, leaves_of, map_tree


def discounted_sums(values: Floats, discounts: Floats, lengths: NDArray[np.int64]) -> Floats:
    """Each step's value and the discounted sum from the next one on; a chunk's last step has its value alone.

        values       f32[B]  of all chunks' steps, end to end
        discounts    f32[B]  weight at step t of the sum from step t + 1 on
        lengths      i64[C]  steps of each chunk, B in all
    Returns f32[B].
    """
    sums = np.empty_like(values)
    by_length = np.argsort(-lengths, kind="stable")
    last = (np.cumsum(lengths) - 1)[by_length]
    carry = np.zeros(len(lengths), np.float32)
    # All chunks at once, from their last steps backwards: the longest ones come first, and stay when others are done.
    there = np.searchsorted(-lengths[by_length], -np.arange(lengths.max(initial=0)), side="left")
    for back, count in enumerate(there.tolist()):
        at = last[:count] - back
        carry[:count] = sums[at] = values[at] + discounts[at] * carry[:count]
    return sums


def device_of(rl_module: Any) -> torch.device:
    """The device of the module's parameters."""
    parameter = next(iter(rl_module.parameters()), None) if isinstance(rl_module, torch.nn.Module) else None
    return torch.device("cpu") if parameter is None else parameter.device


def values_of(piece: str, rl_module: Any, observations: Tree, states: Tree | None = None) -> Floats:
    """f32[B]: the module's `compute_values` of a batch of observations, a tree of arrays or tensors `any[B, ...]`.

        piece     name of the asking piece, for the error
        states    before those observations, of a stateful module: a tree of arrays any[B, ...]

    Raises ModuleError where the module has no `compute_values`, or does not give one finite number for each
    observation.
    """
    name, compute_values = type(rl_module).__name__, getattr(rl_module, "compute_values", None)
    if rl_module is None:
        raise ModuleError(f"{piece} needs values, and there is no module: expected module=… where the pipeline is made")
    if compute_values is None:
        raise ModuleError(
            f"{piece} needs values, but module '{name}' has no compute_values(batch); expected f32[B] from it for a "
            "batch of observations"
        )
    device = device_of(rl_module)
    batch = {Columns.OBS: tensors_of(observations, device)}
    count = len(leaves_of(batch[Columns.OBS])[0])
    if states is not None:
        batch = {
            Columns.OBS: map_tree(lambda leaf: leaf[:, None], batch[Columns.OBS]),
            Columns.STATE_IN: tensors_of(states, device),
        }
    with torch.no_grad():
        values = compute_values(batch)
    shape = (count,) if states is None else (count, 1)
    numbers = numbers_of(values, "what compute_values gave", name, shape).reshape(-1)
    if not np.isfinite(np.add.reduce(numbers, dtype=np.float64)):
        bad = np.flatnonzero(~np.isfinite(numbers))
        raise ModuleError(
            f"compute_values of module '{name}' gave {numbers[bad[0]]} in row {bad[0]} of {count} ({len(bad)} such "
            f"rows), expected finite values; {piece} can't work with it"
        )
    return numbers


def numbers_of(tensor: torch.Tensor, what: str, module: str, shape: tuple[int, ...]) -> Floats:
    """A tensor of the expected shape as f32[...]. Raises ModuleError for another shape."""
    if tuple(tensor.shape) != shape:
        raise ModuleError(f"{what} of module '{module}' has shape {list(tensor.shape)}, expected {list(shape)}").see(
            "module"
        )
    numbers: Floats = tensor.detach().float().cpu().numpy()
    return numbers


def values_after(piece: str, rl_module: Any, steps: TrainSteps) -> Floats:
    """f32[C]: the value of the observation after each chunk's last step, 0 where the episode terminated.

    Raises ConnectorError where that observation is of another kind than the batch's `obs`.
    """
    after: Floats = np.zeros(len(steps.lengths), np.float32)
    lasting = ~steps.terminated & (steps.lengths > 0)
    if lasting.any():
        made = steps.last_made
        last = steps.last_recorded(Columns.OBS, lasting) if made is None else map_tree(lambda leaf: leaf[lasting], made)
        steps.check_kind(last)
        states = steps.last_recorded(Columns.STATE_OUT, lasting) if is_stateful(rl_module) else None
        after[lasting] = values_of(piece, rl_module, last, states)
    return after


@checking_constructor(lam="lambda_=…", gae_lambda="lambda_=…")
@dataclass(kw_only=True, eq=False, repr=False)
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

    gamma: float = 0.99
    lambda_: float = 0.95
    normalize_advantages: bool = True

    def __post_init__(self) -> None:
        self.gamma = checked_fraction("gamma", self.gamma)
        self.lambda_ = checked_fraction("lambda_", self.lambda_)

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


@checking_constructor()
@dataclass(kw_only=True, eq=False, repr=False)
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

    gamma: float = 0.99
    rho_clip: float = 1.0
    c_clip: float = 1.0
    pg_rho_clip: float = 1.0

    def __post_init__(self) -> None:
        self.gamma = checked_fraction("gamma", self.gamma)
        for name in ("rho_clip", "c_clip", "pg_rho_clip"):
            setattr(self, name, checked_number(name, getattr(self, name), least=0, most=inf))

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


@dataclass(kw_only=True, eq=False, repr=False)
class ClipRewards(StepsConnector):
    """Makes the batch's `rewards`, f32[B], those of the episodes clipped; the episodes keep theirs.

        low, high    bounds; None: no bound on this side
        sign         True: each reward's sign instead, -1, 0 or 1

    Rewards that the batch has already are clipped in place. Pieces behind this one that take rewards from the batch see
    the clipped ones. Raises ValueError where the arguments clip nothing, or contradict each other.
    """

    low: float | None = None
    high: float | None = None
    sign: bool = False

    def __post_init__(self) -> None:
        low, high, sign = self.low, self.high, self.sign
        if sign and (low is not None or high is not None):
            raise ValueError(f"sign=True leaves nothing to clip, but low is {low} and high is {high}; expected either")
        if not sign and low is None and high is None:
            raise ValueError("neither low nor high nor sign is given, expected one: nothing would be clipped")
        if not (-np.inf if low is None else low) < (np.inf if high is None else high):
            raise ValueError(f"low is {low} and high is {high}, expected low < high")

    def columns(self, steps: TrainSteps, rl_module: Any) -> dict[str, Tree]:
        rewards = steps.rewards()
        return {Columns.REWARDS: np.sign(rewards) if self.sign else np.clip(rewards, self.low, self.high)}


@dataclass(kw_only=True, eq=False, repr=False)
class ComputeReturnsToGo(StepsConnector):
    """Adds `returns_to_go`, f32[B]: the discounted sum of rewards from each step to the end of its chunk.

        gamma    discount of rewards, 0 … 1

    The sum ends with the chunk, also where that was cut or truncated. The rewards are the batch's where it has them,
    else the episodes'. A batch that has `returns_to_go` already stays as it is.
    """

    keeps = (Columns.RETURNS_TO_GO,)

    gamma: float = 0.99

    def __post_init__(self) -> None:
        self.gamma = checked_fraction("gamma", self.gamma)

    def columns(self, steps: TrainSteps, rl_module: Any) -> dict[str, Tree]:
        discounts = np.full(len(steps), self.gamma, np.float32)
        return {Columns.RETURNS_TO_GO: discounted_sums(steps.finite_rewards(), discounts, steps.lengths)}


@dataclass(kw_only=True, eq=False, repr=False)
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

    n_step: int
    gamma: float = 0.99

    def __post_init__(self) -> None:
        self.n_step = checked_count("n_step", self.n_step, 1)
        self.gamma = checked_fraction("gamma", self.gamma)

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
