"""Tensors become arrays."""

from typing import Any

import numpy as np
import torch

from rollflow.nodes.connectors.connector_v2 import Batch, ConnectorV2, Episodes
from rollflow.stream.tree import map_tree


class TensorToNumpy(ConnectorV2):
    """Turns every tensor of the batch, however nested, into an array; those in main memory without a copy.

    numpy has no bfloat16: such tensors become f32, which holds the same numbers.
    """

    columnar = True
    changes_episodes = False

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
        for column, data in batch.items():
            if type(data) is torch.Tensor:
                batch[column] = array_of(data)
            elif type(data) is not np.ndarray:
                batch[column] = map_tree(_leaf, data)
        return batch


def _leaf(leaf: Any) -> Any:
    return array_of(leaf) if torch.is_tensor(leaf) else leaf


def array_of(tensor: torch.Tensor) -> Any:
    """The tensor as an array, without a copy where that can be."""
    try:
        return tensor.numpy()
    except (RuntimeError, TypeError):  # to be differentiated, not in main memory, or of a type that numpy lacks
        here = tensor.detach().cpu()
        return (here.float() if here.dtype == torch.bfloat16 else here).numpy()
