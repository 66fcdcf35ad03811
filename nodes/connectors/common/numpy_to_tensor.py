"""Arrays become tensors."""

from typing import Any

import gymnasium as gym
import numpy as np
import torch

from rollflow.nodes.connectors.by_module import module_of
from rollflow.nodes.connectors.common.agent_to_module_mapping import MEMORIZED
from rollflow.nodes.connectors.connector_v2 import Batch, ConnectorV2, Episodes
from rollflow.stream.columns import Columns
from rollflow.stream.errors import ConnectorError
from rollflow.stream.tree import map_tree


class NumpyToTensor(ConnectorV2):
    """Turns every array of the batch into a torch tensor of the same dtype, without a copy where that can be.

        pin_memory    move the arrays into page-locked memory first, from where copies to a GPU need not be waited for
        device        where the tensors are to be; None leaves them in main memory

    Infos stay as they are, and the whole batch does without an `rl_module` or when that has another `framework` than
    "torch"; and so it is for each module's part of a batch by module ids. Raises ConnectorError, naming the column, for
    an array that has no numbers in it.
    """

    columnar = True
    changes_episodes = False

    def __init__(
        self,
        input_observation_space: gym.Space[Any] | None = None,
        input_action_space: gym.Space[Any] | None = None,
        *,
        pin_memory: bool = False,
        device: Any = None,
    ) -> None:
        super().__init__(input_observation_space, input_action_space)
        self.pin_memory = pin_memory
        self.device = None if device is None else torch.device(device)

    @property
    def is_elsewhere(self) -> bool:
        """Whether the tensors are anywhere but in ordinary main memory."""
        return self.pin_memory or not (self.device is None or self.device.type == "cpu")

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
        if rl_module is None:
            return batch
        memorized = shared_data.get(MEMORIZED) if shared_data else None
        if memorized is not None and batch.keys() <= memorized.keys():  # by module ids
            for module, columns in batch.items():
                self._convert(columns, module_of(rl_module, module))
            return batch
        return self._convert(batch, rl_module)

    def _convert(self, batch: Batch, rl_module: Any) -> Batch:
        return self.converted(batch) if getattr(rl_module, "framework", "torch") == "torch" else batch

    def converted(self, batch: Batch) -> Batch:
        """The batch itself, whose arrays have become tensors, whatever its module is."""
        for column, data in batch.items():
            try:
                if type(data) is np.ndarray:
                    batch[column] = self._tensor(data)
                elif column != Columns.INFOS:
                    batch[column] = map_tree(self._leaf, data)
            except TypeError as error:
                raise ConnectorError(f"column '{column}' can't become a tensor: {error}") from None
        return batch

    def _leaf(self, leaf: Any) -> Any:
        return self._tensor(leaf) if isinstance(leaf, np.ndarray) else leaf

    def _tensor(self, array: np.ndarray[Any, Any]) -> torch.Tensor:
        # torch can't share what is read-only, of which it warns, or what runs backwards.
        shared = array.flags.writeable and (array.flags.c_contiguous or min(array.strides) >= 0)
        tensor = torch.from_numpy(array if shared else array.copy())
        if self.pin_memory:
            tensor = tensor.pin_memory()
        return tensor if self.device is None else tensor.to(self.device, non_blocking=self.pin_memory)
