"""Single operations of a flat forward pass, done the fast way.

A linear layer multiplies by weights kept transposed: for a few rows and many weights that takes a third to two thirds
of the time. A convolution over channels-last images reads weights kept channels-last. A function of single numbers
works in place where nobody else sees what it works on. The sums are the same, in another order: the numbers are those
of the module up to rounding.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

_IN_PLACE: dict[Any, Callable[..., Tensor]] = {
    torch.tanh: torch.tanh_,
    torch.Tensor.tanh: torch.tanh_,
    torch.sigmoid: torch.sigmoid_,
    torch.Tensor.sigmoid: torch.sigmoid_,
    torch.relu: torch.relu_,
    torch.Tensor.relu: torch.relu_,
    functional.relu: torch.relu_,
    torch.Tensor.div: torch.Tensor.div_,
}


@dataclass(frozen=True, slots=True)
class Operation:
    """One call of a torch function while a pass was written down.

    told    the arguments as they are written, those with names at the end
    """

    func: Any
    args: Sequence[Any]
    kwargs: dict[str, Any]
    result: Any
    told: Sequence[str]

    @property
    def has_own_memory(self) -> bool:
        """Whether the result lies in memory that nothing else refers to."""
        if self.func is torch.Tensor.float:  # gives the tensor itself where it is of that type
            return bool(self.args[0].dtype != self.result.dtype)
        return "out" not in self.kwargs and (self.func in _IN_PLACE or self.func in (functional.linear, torch.conv2d))

    @property
    def in_place(self) -> Callable[..., Tensor] | None:
        """The function that writes the result over the first argument, where there is one that gives the same."""
        argument = self.args[0]
        others_are_numbers = all(type(other) in (int, float) for other in self.args[1:])
        if self.kwargs.get("inplace") or not others_are_numbers or argument.dtype != self.result.dtype:
            return None
        return _IN_PLACE.get(self.func)


@dataclass(slots=True)
class _Copy:
    """A weight as it was at a version of its own, in another order."""

    weight: Tensor
    tensor: Tensor
    arrange: Callable[[Tensor], Tensor]
    version: int


class ArrangedWeights:
    """Copies of a module's weights in the order in memory that passes read them in."""

    def __init__(self) -> None:
        self._copies: dict[int, _Copy] = {}  # by the weight's identity

    def transposed(self, weight: Tensor) -> Tensor:
        """A copy of a linear layer's weight, float[out, in], as float[in, out]."""
        return self._kept(weight, lambda weight: weight.t().contiguous())

    def channels_last(self, weight: Tensor) -> Tensor:
        """A copy of a convolution's weight, float[out, in, height, width], in the order out, height, width, in."""
        return self._kept(weight, lambda weight: weight.contiguous(memory_format=torch.channels_last))

    def renew(self) -> None:
        """Copy those weights again that have been written to."""
        with torch.no_grad():
            for copy in self._copies.values():
                if copy.version != copy.weight._version:
                    copy.version = copy.weight._version
                    copy.tensor.copy_(copy.arrange(copy.weight))

    def _kept(self, weight: Tensor, arrange: Callable[[Tensor], Tensor]) -> Tensor:
        copy = self._copies.get(id(weight))
        if copy is None:
            with torch.inference_mode(False), torch.no_grad():
                copy = _Copy(weight, arrange(weight).clone(), arrange, weight._version)
            self._copies[id(weight)] = copy
        return copy.tensor


def arranged(operation: Operation, weights: ArrangedWeights) -> tuple[Callable[..., Tensor], list[Any]] | None:
    """A layer as a function and its arguments with the weight arranged; None: it is best as it is.

    Arguments that were in the operation are given as they are written there.
    """
    if operation.func not in (functional.linear, torch.conv2d) or operation.kwargs:
        return None
    argument, weight = operation.args[:2]
    if type(weight) is not torch.nn.Parameter or weight.is_inference() or weight.device.type != "cpu":
        return None
    told = operation.told
    if operation.func is torch.conv2d:
        is_channels_last = argument.is_contiguous(memory_format=torch.channels_last) and not argument.is_contiguous()
        return (torch.conv2d, [told[0], weights.channels_last(weight), *told[2:]]) if is_channels_last else None
    bias = operation.args[2] if len(operation.args) > 2 else None
    if argument.dim() != 2:
        return None
    if bias is None:
        return torch.mm, [told[0], weights.transposed(weight)]
    return torch.addmm, [told[2], told[0], weights.transposed(weight)]
