"""A module's weights as named arrays, never pickled: for another process or host."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from rollflow.stream.data.errors import ModuleError
from rollflow.stream.data.packing import pack, unpack


class Arrays(NamedTuple):
    """A `state_dict()` without torch.

    tensors    name -> any[...]
    dtypes     name -> torch's name of a dtype that numpy lacks: the array has the tensor's bits
    others     name -> entry that is no tensor
    """

    tensors: dict[str, NDArray[Any]]
    dtypes: dict[str, str]
    others: dict[str, Any]


def to_arrays(weights: Mapping[str, Any], *, copies: bool = True) -> Arrays:
    """A `state_dict()` as contiguous arrays.

    copies    False: arrays share the memory of tensors that are contiguous and on the CPU
    """
    arrays = Arrays({}, {}, {})
    for name, value in weights.items():
        if not torch.is_tensor(value):
            arrays.others[name] = value
            continue
        on_cpu = value.detach().cpu()
        tensor = on_cpu.clone(memory_format=torch.contiguous_format) if copies else on_cpu.contiguous()
        try:
            arrays.tensors[name] = tensor.numpy()
        except TypeError:
            arrays.dtypes[name] = str(value.dtype).removeprefix("torch.")
            bits = torch.uint8 if value.element_size() == 1 else torch.int16
            arrays.tensors[name] = tensor.view(bits).numpy().view(f"<u{value.element_size()}")
    return arrays


def from_arrays(arrays: Arrays) -> dict[str, Any]:
    """The `state_dict()` of arrays: tensors on the CPU, over the arrays' memory. Raises ModuleError for a bad dtype."""
    weights: dict[str, Any] = dict(arrays.others)
    for name, array in arrays.tensors.items():
        dtype_name = arrays.dtypes.get(name)
        if dtype_name is None:
            weights[name] = torch.from_numpy(array)
            continue
        dtype = getattr(torch, dtype_name, None)
        if not isinstance(dtype, torch.dtype) or dtype.itemsize != array.itemsize:
            raise ModuleError(
                f"weights '{name}': dtype {dtype_name!r} of {array.itemsize} bytes, expected one of torch's"
            )
        bits = torch.from_numpy(array.view(np.uint8 if array.itemsize == 1 else np.int16))
        weights[name] = bits.view(dtype)
    return weights


def pack_weights(version: int, weights: Mapping[str, Any], module_id: Any = None) -> bytes:
    """Bytes of a `state_dict()`, its policy version, and the id of its module where there are several.

    Raises ColumnError for an entry that is no tensor and has no packed form.
    """
    return pack({"module_id": module_id, "version": version, **to_arrays(weights, copies=False)._asdict()}, "weights")


def unpack_weights(data: bytes) -> tuple[int, dict[str, Any], Any]:
    """Policy version, `state_dict()` and module id from `pack_weights`: new tensors, on the CPU."""
    fields = unpack(data)
    tensors = {name: np.array(array) for name, array in fields["tensors"].items()}
    weights = from_arrays(Arrays(tensors, fields["dtypes"], fields["others"]))
    return fields["version"], weights, fields["module_id"]
