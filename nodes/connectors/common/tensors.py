"""Pieces that turn arrays into tensors, and tensors into arrays."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rollflow.nodes.connectors.common.batches import MEMORIZED, module_of
from rollflow.nodes.connectors.connector_v2 import Batch, ConnectorV2, SharedData
from rollflow.stream.data.columns import Columns
from rollflow.stream.data.errors import ConnectorError
from rollflow.stream.data.tree import map_tree
from rollflow.stream.fragments.live_episode import LaneEpisodes

_ALIGNED_BYTES = 16


@dataclass(kw_only=True, eq=False, repr=False)
class NumpyToTensor(ConnectorV2):
    """Turns every array of the batch into a torch tensor of the same dtype, without a copy where possible.

        pin_memory    True: through page-locked memory, from which copies to a GPU need not be waited for
        device        of the tensors; None leaves them in main memory

    Infos stay as they are. So does the whole batch, or a module's part of it, without an `rl_module` or with one whose
    `framework` is not "torch". Raises ConnectorError, naming the column, for an array that has no numbers in it.
    """

    columnar = True
    changes_episodes = False

    pin_memory: bool = False
    device: Any = None

    def __post_init__(self) -> None:
        self.device = None if self.device is None else torch.device(self.device)

    @property
    def is_elsewhere(self) -> bool:
        """True if the tensors are anywhere but in ordinary main memory."""
        return self.pin_memory or not (self.device is None or self.device.type == "cpu")

    def __call__(
        self, *, rl_module: Any, batch: Batch, episodes: Any = None, shared_data: SharedData = None, **kwargs: Any
    ) -> Batch:
        if rl_module is None:
            return batch
        are_live = isinstance(episodes, LaneEpisodes)
        memorized = shared_data.get(MEMORIZED) if shared_data else None
        if memorized is not None and batch.keys() <= memorized.keys():  # by module ids
            for module, columns in batch.items():
                self._convert(columns, module_of(rl_module, module), are_live=are_live)
            return batch
        return self._convert(batch, rl_module, are_live=are_live)

    def _convert(self, batch: Batch, rl_module: Any, *, are_live: bool) -> Batch:
        if getattr(rl_module, "framework", "torch") != "torch":
            return batch
        if are_live and Columns.OBS in batch:
            batch[Columns.OBS] = map_tree(_writable, batch[Columns.OBS])
        return self.converted(batch)

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
        tensor = tensor_of(array)
        if self.pin_memory:
            tensor = tensor.pin_memory()
        return tensor if self.device is None else tensor.to(self.device, non_blocking=self.pin_memory)


class TensorToNumpy(ConnectorV2):
    """Turns every tensor of the batch, however nested, into an array; those in main memory without a copy.

    numpy has no bfloat16: such tensors become f32, which holds the same numbers.
    """

    columnar = True
    changes_episodes = False

    def __call__(self, *, batch: Batch, **kwargs: Any) -> Batch:
        for column, data in batch.items():
            if type(data) is torch.Tensor:
                batch[column] = array_of(data)
            elif type(data) is not np.ndarray:
                batch[column] = map_tree(_leaf, data)
        return batch


def _writable(leaf: Any) -> Any:
    """A lane's row any[N, ...] that pieces are shown read-only as it is: torch shares no memory that is read-only."""
    memory = leaf.base if isinstance(leaf, np.ndarray) else None
    if memory is None or leaf.flags.writeable or not (isinstance(memory, np.ndarray) and memory.flags.writeable):
        return leaf
    view = leaf.view()
    view.flags.writeable = True
    return view


def _leaf(leaf: Any) -> Any:
    return array_of(leaf) if torch.is_tensor(leaf) else leaf


def tensor_of(array: np.ndarray[Any, Any]) -> torch.Tensor:
    """The array as a tensor, without a copy where possible; its memory is as `aligned` has it."""
    # torch can't share what is read-only, of which it warns, or what runs backwards.
    shared = array.flags.writeable and (array.flags.c_contiguous or min(array.strides) >= 0)
    return aligned(torch.from_numpy(array if shared else array.copy()))


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy of it where its memory does not begin at a multiple of 16 bytes.

    Matrix products may round differently there: the same observation, in another row of a fragment, would give other
    last bits.
    """
    return tensor.clone() if tensor.data_ptr() % _ALIGNED_BYTES else tensor


def as_array(leaf: Any) -> Any:
    """A tensor, an array or a number, `any[...]`, as an array."""
    return array_of(leaf) if torch.is_tensor(leaf) else np.asarray(leaf)


def array_of(tensor: torch.Tensor) -> Any:
    """The tensor as an array, without a copy where possible."""
    try:
        return tensor.numpy()
    except (RuntimeError, TypeError):  # requires grad, is not in main memory, or is of a dtype that numpy lacks
        here = tensor.detach().cpu()
        return (here.float() if here.dtype == torch.bfloat16 else here).numpy()
