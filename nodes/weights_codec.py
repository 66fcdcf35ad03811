"""A module's weights for another process or host: named tensors, never pickled."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from rollflow.stream.errors import ModuleError
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


class Arrays(NamedTuple):
    """Weights without torch.

    tensors    name -> any[...]
    dtypes     name -> torch's name of the dtype, where numpy has none: the array has the tensor's bits
    others     what is no tensor
    """

    tensors: dict[str, NDArray[Any]]
    dtypes: dict[str, str]
    others: dict[str, Any]


def to_arrays(weights: Mapping[str, Any], *, copies: bool = True) -> Arrays:
    """A `state_dict()` as arrays.

    copies    False: they are where the tensors are, as far as these are on the CPU, one element behind the other
    """
    arrays = Arrays({}, {}, {})
    for name, value in weights.items():
        if not torch.is_tensor(value):
            arrays.others[name] = value
            continue
        there = value.detach().cpu()
        copied = there.clone(memory_format=torch.contiguous_format) if copies else there.contiguous()
        try:
            arrays.tensors[name] = copied.numpy()
        except TypeError:
            arrays.dtypes[name] = str(value.dtype).removeprefix("torch.")
            bits = torch.uint8 if value.element_size() == 1 else torch.int16
            arrays.tensors[name] = copied.view(bits).numpy().view(f"<u{value.element_size()}")
    return arrays


def from_arrays(arrays: Arrays) -> dict[str, Any]:
    """The `state_dict()` again: tensors on the CPU, over the arrays' memory. Raises ModuleError for no such dtype."""
    weights: dict[str, Any] = dict(arrays.others)
    for name, array in arrays.tensors.items():
        told = arrays.dtypes.get(name)
        if told is None:
            weights[name] = torch.from_numpy(array)
            continue
        dtype = getattr(torch, told, None)
        if not isinstance(dtype, torch.dtype) or dtype.itemsize != array.itemsize:
            raise ModuleError(f"weights '{name}': dtype {told!r} of {array.itemsize} bytes, expected one of torch's")
        bits = torch.from_numpy(array.view(np.uint8 if array.itemsize == 1 else np.int16))
        weights[name] = bits.view(dtype)
    return weights
