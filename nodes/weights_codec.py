"""A module's weights as bytes for another process: named tensors, never pickled."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from rollflow.stream.packing import pack, unpack


def pack_weights(version: int, weights: Mapping[str, Any]) -> bytes:
    """The bytes of a `state_dict()` and its policy version.

    Raises ColumnError for an entry that is no tensor and has no packed form.
    """
    tensors, others = {}, {}
    for name, value in weights.items():
        if torch.is_tensor(value):
            flat = value.detach().cpu().contiguous().reshape(-1)
            tensors[name] = [str(value.dtype).removeprefix("torch."), list(value.shape), flat.view(torch.uint8).numpy()]
        else:
            others[name] = value
    return pack({"version": version, "tensors": tensors, "others": others}, "weights")


def unpack_weights(data: bytes) -> tuple[int, dict[str, Any]]:
    """The policy version and the `state_dict()` again: new tensors, on the CPU."""
    told = unpack(data)
    weights: dict[str, Any] = dict(told["others"])
    for name, (dtype, shape, raw) in told["tensors"].items():
        weights[name] = tensor = torch.empty(shape, dtype=getattr(torch, dtype))
        if len(raw):  # torch can't take the bytes of none for those of another dtype
            tensor.copy_(torch.from_numpy(np.array(raw)).view(tensor.dtype).reshape(shape))
    return told["version"], weights
