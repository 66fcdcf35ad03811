"""What a module expects of observations, for pieces that work out value targets."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rollflow.nodes.connectors.common.add_observations_from_episodes_to_batch import LAST_OBSERVATIONS
from rollflow.nodes.connectors.connector_v2 import Batch
from rollflow.nodes.connectors.learner.add_one_ts_to_episodes_and_truncate import STEP_ADDED
from rollflow.nodes.connectors.learner.train_steps import TrainSteps, tensors_of
from rollflow.stream.columns import Columns
from rollflow.stream.errors import ConnectorError, ModuleError
from rollflow.stream.tree import Tree, leaves_of, map_tree

Floats = NDArray[np.float32]


def refuse_added_steps(piece: str, shared_data: dict[str, Any] | None) -> None:
    """Raise ConnectorError where AddOneTsToEpisodesAndTruncate has given the episodes a step that they did not take."""
    if (shared_data or {}).get(STEP_ADDED):
        raise ConnectorError(
            f"{piece} works out what comes after each chunk itself: take AddOneTsToEpisodesAndTruncate out of the "
            "pipeline, or put it behind"
        )


def device_of(rl_module: Any) -> torch.device:
    """Where the module's parameters are."""
    parameter = next(iter(rl_module.parameters()), None) if isinstance(rl_module, torch.nn.Module) else None
    return torch.device("cpu") if parameter is None else parameter.device


def values_of(piece: str, rl_module: Any, observations: Tree, states: Tree | None = None) -> Floats:
    """f32[B]: the module's `compute_values` of a batch of observations, a tree of arrays or tensors `any[B, ...]`.

        piece     who asks, for the error
        states    before those observations, of a stateful module: a tree of arrays any[B, ...]

    Raises ModuleError where the module has no `compute_values`, or does not give one number for each observation.
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
    return numbers_of(values, "what compute_values gave", name, shape).reshape(-1)


def numbers_of(tensor: torch.Tensor, what: str, module: str, shape: tuple[int, ...]) -> Floats:
    """A tensor of that shape as f32[...]. Raises ModuleError for another shape."""
    if tuple(tensor.shape) != shape:
        raise ModuleError(f"{what} of module '{module}' has shape {list(tensor.shape)}, expected {list(shape)}")
    numbers: Floats = tensor.detach().float().cpu().numpy()
    return numbers


def last_observations(
    steps: TrainSteps, batch: Batch, shared_data: dict[str, Any] | None, chosen: NDArray[np.bool_]
) -> Tree:
    """What stands for the observation after the last step of the chosen chunks: a tree of arrays `any[K, ...]`.

    Raises ConnectorError where that is of another kind than the batch's `obs`.
    """
    made = (shared_data or {}).get(LAST_OBSERVATIONS)
    last = steps.last_observations(chosen) if made is None else map_tree(lambda leaf: leaf[chosen], made)
    steps.check_kind(batch, last)
    return last
