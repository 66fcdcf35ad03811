"""Weights on their way to another process."""

from typing import Any

import numpy as np
import pytest
import torch

from rollflow.nodes.modules.policy_weights import pack_weights, unpack_weights
from rollflow.stream import ColumnError

SHAPES: list[tuple[int, ...]] = [(), (1,), (3,), (2, 3), (0,), (0, 4), (3, 0), (2, 0, 5)]
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.int64, torch.uint8]


@pytest.mark.parametrize("dtype", [*DTYPES, torch.bool, torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_tensor_comes_back(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.arange(int(np.prod(shape, dtype=np.int64))).reshape(shape).to(dtype)
    version, weights, module_id = unpack_weights(pack_weights(3, {"layer.weight": tensor}, "a"))
    assert module_id == "a"
    assert version == 3
    assert (weights["layer.weight"].dtype, weights["layer.weight"].shape) == (dtype, tensor.shape)
    assert weights["layer.weight"].tolist() == tensor.tolist()


def test_a_tensor_that_is_a_view_comes_back_as_a_whole() -> None:
    tensor = torch.arange(12.0).reshape(3, 4).T
    assert torch.equal(unpack_weights(pack_weights(0, {"w": tensor}))[1]["w"], tensor)


def test_what_comes_back_can_be_loaded_and_trained() -> None:
    module = torch.nn.Linear(2, 3)
    state = unpack_weights(pack_weights(1, module.state_dict()))[1]
    state["weight"].add_(1.0)
    module.load_state_dict(state)
    assert torch.equal(module.weight, state["weight"])


def test_what_is_no_tensor_goes_with_it_and_what_can_not_is_named() -> None:
    extra: dict[str, Any] = {"_extra_state": {"count": 5, "seen": (1, 2)}}
    assert unpack_weights(pack_weights(1, extra))[1] == extra
    with pytest.raises(ColumnError, match=r"weights\['others'\]\['_extra_state'\]: <object"):
        pack_weights(1, {"_extra_state": object()})
