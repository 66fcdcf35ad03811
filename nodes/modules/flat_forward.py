"""Flat forward pass: a module's pass recorded once as a list of torch operations, and replayed from then on.

A module of a few layers spends as long on `torch.nn.Module`'s calls as on its operations. The replay does the same
operations on the same weights, some of them in a faster form:

- A linear layer multiplies by weights kept transposed. For a few rows and many weights that takes a third to two thirds
  of the time.
- A convolution over channels-last images reads weights kept channels-last.
- An elementwise function works in place where nothing else reads its argument.

Sums are the same in another order, so results are equal up to rounding. Other Python code of the pass runs only while
it is recorded, so the module has to do the same at every call.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import optree
import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from rollflow.stream.data.tree import Tree, leaves_of

Batch = dict[str, Any]

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

# Methods and properties of a tensor that do not depend on its elements.
_METHODS = frozenset(
    "__len__ dim ndimension nelement numel size stride storage_offset element_size is_contiguous is_floating_point "
    "is_complex is_inference get_device type is_same_size".split()
)
_PROPERTIES = frozenset("shape dtype device layout ndim requires_grad is_cuda is_sparse is_leaf grad_fn".split())


class ValueDependent(Exception):
    """Raised when a pass reads elements of tensors in Python, so that another one might take another path."""


class FlatForward:
    """A module's forward pass, recorded for each structure, shape and dtype of batches that comes.

        forward    dict of tensors any[B, ...] to another one; does the same at every call
        reason     why a pass could not be recorded, so that `forward` is called instead; None: all could

    Called where torch records no gradients. Weights may be changed in place at any time. A pass can't be recorded if it
    reads elements of a tensor in Python, or returns anything but tensors.
    """

    def __init__(self, forward: Callable[[Batch], Batch]) -> None:
        self.reason: str | None = None
        self._forward = forward
        self._weights = _ArrangedWeights()
        self._flat: dict[Any, Callable[..., Any] | None] = {}
        self._single: dict[str, tuple[Any, Any, Callable[..., Any]]] = {}  # by column: shape, dtype, replay

    def __call__(self, batch: Batch) -> Batch:
        """The module's output for a batch."""
        if len(batch) == 1:  # observations alone: nearly every module's
            [(name, leaf)] = batch.items()
            single = self._single.get(name)
            if single is not None and type(leaf) is Tensor and leaf.shape == single[0] and leaf.dtype is single[1]:
                return single[2](leaf)  # type: ignore[no-any-return]
        tree: Tree = batch
        leaves: list[Any] = [*batch.values()]
        structure: Any = tuple(batch)
        try:
            kind = (structure, *[(leaf.shape, leaf.dtype) for leaf in leaves])
        except AttributeError:  # nested
            leaves, structure = optree.tree_flatten(tree, none_is_leaf=True)
            kind = (structure, *[(getattr(leaf, "shape", None), getattr(leaf, "dtype", None)) for leaf in leaves])
        try:
            flat = self._flat[kind]
        except KeyError:
            return self._record(kind, batch, leaves)
        return self._forward(batch) if flat is None else flat(*leaves)

    def _record(self, kind: Any, batch: Batch, leaves: list[Any]) -> Batch:
        recorder = _Recorder(leaves, self._weights)
        try:
            with recorder:
                output = self._forward(batch)
            self._flat[kind] = flat = recorder.compile(output)
            if len(batch) == 1 and len(leaves) == 1:
                [name] = batch
                self._single[name] = leaves[0].shape, leaves[0].dtype, flat
        except ValueDependent as refused:
            self.reason = str(refused)
            self._flat[kind] = None
            return self._forward(batch)
        # Replayed at once, so that the first pass rounds as all others do: lanes take turns in any order.
        return flat(*leaves) if recorder.changes_rounding else output


@dataclass(frozen=True, slots=True)
class _Operation:
    """Call of a torch function that was recorded.

    source    the arguments as Python source, keyword arguments at the end
    """

    func: Any
    args: Sequence[Any]
    kwargs: dict[str, Any]
    result: Any
    source: Sequence[str]

    @property
    def has_own_memory(self) -> bool:
        """True if the result lies in memory that nothing else refers to."""
        if self.func is torch.Tensor.float:  # returns its argument where that has the dtype already
            return bool(self.args[0].dtype != self.result.dtype)
        return "out" not in self.kwargs and (self.func in _IN_PLACE or self.func in (functional.linear, torch.conv2d))

    @property
    def in_place(self) -> Callable[..., Tensor] | None:
        """Function that writes the same result over the first argument; None where there is none."""
        argument = self.args[0]
        others_are_numbers = all(type(other) in (int, float) for other in self.args[1:])
        if self.kwargs.get("inplace") or not others_are_numbers or argument.dtype != self.result.dtype:
            return None
        return _IN_PLACE.get(self.func)


@dataclass(slots=True)
class _Copy:
    """Copy of a weight in another memory order, made when the weight's `_version` was `version`."""

    weight: Tensor
    tensor: Tensor
    arrange: Callable[[Tensor], Tensor]
    version: int


class _ArrangedWeights:
    """Copies of a module's weights in the memory order that passes read them in."""

    def __init__(self) -> None:
        self._copies: dict[int, _Copy] = {}  # by the weight's identity

    def transposed(self, weight: Tensor) -> Tensor:
        """Copy of a linear layer's weight, float[out, in], as float[in, out]."""
        return self._copy_of(weight, lambda weight: weight.t().contiguous())

    def channels_last(self, weight: Tensor) -> Tensor:
        """Copy of a convolution's weight, float[out, in, height, width], in the order out, height, width, in."""
        return self._copy_of(weight, lambda weight: weight.contiguous(memory_format=torch.channels_last))

    def renew(self) -> None:
        """Copy again the weights that have been written to."""
        with torch.no_grad():
            for copy in self._copies.values():
                if copy.version != copy.weight._version:
                    copy.version = copy.weight._version
                    copy.tensor.copy_(copy.arrange(copy.weight))

    def _copy_of(self, weight: Tensor, arrange: Callable[[Tensor], Tensor]) -> Tensor:
        copy = self._copies.get(id(weight))
        if copy is None:
            with torch.inference_mode(False), torch.no_grad():
                copy = _Copy(weight, arrange(weight).clone(), arrange, weight._version)
            self._copies[id(weight)] = copy
        return copy.tensor


def _arranged(operation: _Operation, weights: _ArrangedWeights) -> tuple[Callable[..., Tensor], list[Any]] | None:
    """Function and arguments of a layer with its weight arranged; None where the operation is best as it is.

    The operation's own arguments come as source, the arranged weight as a tensor.
    """
    if operation.func not in (functional.linear, torch.conv2d) or operation.kwargs:
        return None
    argument, weight = operation.args[:2]
    if type(weight) is not torch.nn.Parameter or weight.is_inference() or weight.device.type != "cpu":
        return None
    source = operation.source
    if operation.func is torch.conv2d:
        is_channels_last = argument.is_contiguous(memory_format=torch.channels_last) and not argument.is_contiguous()
        return (torch.conv2d, [source[0], weights.channels_last(weight), *source[2:]]) if is_channels_last else None
    bias = operation.args[2] if len(operation.args) > 2 else None
    if argument.dim() != 2:
        return None
    if bias is None:
        return torch.mm, [source[0], weights.transposed(weight)]
    return torch.addmm, [source[2], source[0], weights.transposed(weight)]


class _Recorder(TorchFunctionMode):
    """Records every torch function that is called while it is entered."""

    def __init__(self, inputs: list[Any], weights: _ArrangedWeights) -> None:
        super().__init__()
        if not all(type(leaf) is Tensor for leaf in inputs):
            raise ValueDependent("its batch has something else than tensors")
        self._names: dict[int, str] = {}  # of tensors, by identity
        self._alive: list[Any] = []  # so that no identity is used twice
        self._constants: dict[str, Any] = {}
        self._operations: dict[str, _Operation] = {}
        self._uses: Counter[int] = Counter()  # of tensors, by identity
        self._weights = weights
        self._arranged_weights: list[Tensor] = []  # weights of which this pass reads an arranged copy
        self._parameters = [self._named(leaf, f"x{i}") for i, leaf in enumerate(inputs)]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if any(isinstance(leaf, Tensor) for leaf in leaves_of(result)):
            source = [self._expression(each) for each in args]
            source += [f"{name}={self._expression(value)}" for name, value in kwargs.items()]
            name = f"v{len(self._operations)}"
            self._operations[name] = _Operation(func, args, kwargs, result, source)
            self._uses.update(id(leaf) for leaf in leaves_of((args, kwargs)))
            self._name_leaves(result, name)
        elif not _ignores_elements(func):
            raise ValueDependent(f"it calls {getattr(func, '__name__', func)}, which asks for numbers in Python")
        return result

    def compile(self, output: Tree) -> Callable[..., Any]:
        """Function of the inputs that replays what has been recorded, and returns what `output` is."""
        if not isinstance(output, dict) or not all(id(leaf) in self._names for leaf in leaves_of(output)):
            raise ValueDependent("its output is not made of tensors that its inputs went into")
        self._uses.update(id(leaf) for leaf in leaves_of(output))
        lines = [f"{name} = {self._call(operation)}" for name, operation in self._operations.items()]
        lines.append(f"return {self._expression(output)}")
        if self._arranged_weights:
            versions = " + ".join(f"{self._constant(weight)}._version" for weight in self._arranged_weights)
            last = self._constant([-1])
            renew = self._constant(self._weights.renew)
            lines.insert(0, f"if {versions} != {last}[0]: {renew}(); {last}[0] = {versions}")
        parameters = [*self._parameters, *(f"{name}={name}" for name in self._constants)]
        namespace: dict[str, Any] = {}
        exec("\n    ".join([f"def flat({', '.join(parameters)}):", *lines]), dict(self._constants), namespace)
        flat: Callable[..., Any] = namespace["flat"]
        return flat

    @property
    def changes_rounding(self) -> bool:
        """True if the function's numbers may differ from the module's by rounding."""
        return bool(self._arranged_weights)

    def _call(self, operation: _Operation) -> str:
        """Source of a call that gives what an operation gives, in its fastest form."""
        faster = _arranged(operation, self._weights)
        if faster is not None:
            func, arguments = faster
            self._arranged_weights.append(operation.args[1])
            source = [each if type(each) is str else self._constant(each) for each in arguments]
        elif operation.args and self._is_overwritable(operation.args[0]) and operation.in_place is not None:
            func, source = operation.in_place, list(operation.source[: len(operation.args)])
        else:
            func, source = operation.func, list(operation.source)
        return f"{self._constant(func)}({', '.join(source)})"

    def _is_overwritable(self, argument: Any) -> bool:
        """True if one operation alone reads a tensor, and may write over it."""
        operation = self._operations.get(self._names.get(id(argument), ""))
        return operation is not None and operation.has_own_memory and self._uses[id(argument)] == 1

    def _name_leaves(self, result: Any, name: str) -> None:
        if isinstance(result, Tensor):
            self._named(result, name)
        elif isinstance(result, tuple | list):
            for i, part in enumerate(result):
                self._name_leaves(part, f"{name}[{i}]")

    def _named(self, tensor: Any, name: str) -> str:
        self._names[id(tensor)] = name
        self._alive.append(tensor)
        return name

    def _expression(self, value: Any) -> str:
        if isinstance(value, Tensor) and id(value) in self._names:
            return self._names[id(value)]
        if type(value) is tuple or type(value) is list:
            parts = [self._expression(part) for part in value]
            return f"({', '.join(parts)},)" if type(value) is tuple and parts else f"[{', '.join(parts)}]"
        if type(value) is dict:
            return f"{{{', '.join(f'{self._constant(key)}: {self._expression(part)}' for key, part in value.items())}}}"
        return self._constant(value)

    def _constant(self, value: Any) -> str:
        if value is None or type(value) in (bool, int, str):
            return repr(value)
        name = f"c{len(self._constants)}"
        self._constants[name] = value
        self._alive.append(value)
        return name


def _ignores_elements(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    if name == "__get__":
        return getattr(getattr(func, "__self__", None), "__name__", "") in _PROPERTIES
    return name in _METHODS
