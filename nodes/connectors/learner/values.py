"""Values and discounted sums, for pieces that work out advantages and value targets."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rollflow.nodes.connectors.learner.train_steps import Floats, TrainSteps, tensors_of
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
