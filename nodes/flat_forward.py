"""A forward pass as the flat list of torch operations that it comes down to.

A module of a few layers spends as long on `torch.nn.Module`'s calls as on its operations. Here the operations of one
pass are written down as they happen, with the inputs that they had, and from then on done one after the other: the same
operations on the same weights, some of them in a faster way (`rollflow.nodes.flat_operations`), so the same numbers up
to rounding. What else a pass does in Python is done when it is written down and not again, which is right for a module
that does the same at every call.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

import optree
from torch import Tensor
from torch.overrides import TorchFunctionMode

from rollflow.nodes.flat_operations import ArrangedWeights, Operation, arranged
from rollflow.stream.tree import Tree, leaves_of

Batch = dict[str, Any]

# What may be asked of a tensor without asking for the numbers in it.
_OF_THE_SHAPE = {
    *("__len__", "dim", "ndimension", "nelement", "numel", "size", "stride", "storage_offset", "element_size"),
    *("is_contiguous", "is_floating_point", "is_complex", "is_inference", "get_device", "type", "is_same_size"),
}
_PROPERTIES = {
    "shape",
    "dtype",
    "device",
    "layout",
    "ndim",
    "requires_grad",
    "is_cuda",
    "is_sparse",
    "is_leaf",
    "grad_fn",
}


class ValueDependent(Exception):
    """Raised when a pass asks for numbers in Python, so that another one might go another way."""


class FlatForward:
    """A module's forward pass, written down for each kind of batch that comes.

        forward    dict of tensors to dict of tensors; does the same at every call

    Called where torch records no gradients. Weights may be changed in place at any time. A pass that can't be written
    down, since it asks for a tensor's numbers or gives something else than tensors, is done as it is: `reason` says
    why, and is None as long as there is no such.
    """

    def __init__(self, forward: Callable[[Batch], Batch]) -> None:
        self.reason: str | None = None
        self._forward = forward
        self._weights = ArrangedWeights()
        self._flat: dict[Any, Callable[..., Any] | None] = {}
        self._of_one: dict[str, tuple[Any, Any, Callable[..., Any]]] = {}  # by column: shape and dtype, and how

    def __call__(self, batch: Batch) -> Batch:
        """The module's output for a batch."""
        if len(batch) == 1:  # observations alone: nearly every module's
            [(name, leaf)] = batch.items()
            known = self._of_one.get(name)
            if known is not None and type(leaf) is Tensor and leaf.shape == known[0] and leaf.dtype is known[1]:
                return known[2](leaf)  # type: ignore[no-any-return]
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
            return self._write_down(kind, batch, leaves)
        return self._forward(batch) if flat is None else flat(*leaves)

    def _write_down(self, kind: Any, batch: Batch, leaves: list[Any]) -> Batch:
        writer = _Writer(leaves, self._weights)
        try:
            with writer:
                output = self._forward(batch)
            self._flat[kind] = flat = writer.written(output)
            if len(batch) == 1 and len(leaves) == 1:
                [name] = batch
                self._of_one[name] = leaves[0].shape, leaves[0].dtype, flat
        except ValueDependent as refused:
            self.reason = str(refused)
            self._flat[kind] = None
            return self._forward(batch)
        # Rounded as in every pass to come: lanes take turns in any order.
        return flat(*leaves) if writer.rounds_otherwise else output


class _Writer(TorchFunctionMode):
    """Writes down every torch function that is called while it is entered."""

    def __init__(self, inputs: list[Any], weights: ArrangedWeights) -> None:
        super().__init__()
        if not all(type(leaf) is Tensor for leaf in inputs):
            raise ValueDependent("its batch has something else than tensors")
        self._names: dict[int, str] = {}  # of tensors, by identity
        self._kept: list[Any] = []  # so that no identity is used twice
        self._constants: dict[str, Any] = {}
        self._operations: dict[str, Operation] = {}
        self._uses: Counter[int] = Counter()  # of tensors, by identity
        self._weights = weights
        self._arranged: list[Tensor] = []  # weights that this pass has other copies of
        self._parameters = [self._named(leaf, f"x{i}") for i, leaf in enumerate(inputs)]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if any(isinstance(leaf, Tensor) for leaf in leaves_of(result)):
            told = [self._expression(each) for each in args]
            told += [f"{name}={self._expression(value)}" for name, value in kwargs.items()]
            name = f"v{len(self._operations)}"
            self._operations[name] = Operation(func, args, kwargs, result, told)
            self._uses.update(id(leaf) for leaf in leaves_of((args, kwargs)))
            self._name_leaves(result, name)
        elif not _is_of_the_shape(func):
            raise ValueDependent(f"it calls {getattr(func, '__name__', func)}, which asks for numbers in Python")
        return result

    def written(self, output: Tree) -> Callable[..., Any]:
        """The function that does what has been written down, and gives what `output` is."""
        if not isinstance(output, dict) or not all(id(leaf) in self._names for leaf in leaves_of(output)):
            raise ValueDependent("its output is not made of tensors that its inputs went into")
        self._uses.update(id(leaf) for leaf in leaves_of(output))
        lines = [f"{name} = {self._called(operation)}" for name, operation in self._operations.items()]
        lines.append(f"return {self._expression(output)}")
        if self._arranged:
            versions = " + ".join(f"{self._constant(weight)}._version" for weight in self._arranged)
            seen = self._constant([-1])
            renew = self._constant(self._weights.renew)
            lines.insert(0, f"if {versions} != {seen}[0]: {renew}(); {seen}[0] = {versions}")
        parameters = [*self._parameters, *(f"{name}={name}" for name in self._constants)]
        made: dict[str, Any] = {}
        exec("\n    ".join([f"def flat({', '.join(parameters)}):", *lines]), dict(self._constants), made)
        flat: Callable[..., Any] = made["flat"]
        return flat

    @property
    def rounds_otherwise(self) -> bool:
        """Whether the function's numbers may differ from the module's by rounding."""
        return bool(self._arranged)

    def _called(self, operation: Operation) -> str:
        """The call that gives what an operation gives."""
        faster = arranged(operation, self._weights)
        if faster is not None:
            func, arguments = faster
            self._arranged.append(operation.args[1])
            told = [each if type(each) is str else self._constant(each) for each in arguments]
        elif operation.args and self._is_alone(operation.args[0]) and operation.in_place is not None:
            func, told = operation.in_place, list(operation.told[: len(operation.args)])
        else:
            func, told = operation.func, list(operation.told)
        return f"{self._constant(func)}({', '.join(told)})"

    def _is_alone(self, argument: Any) -> bool:
        """Whether a tensor is seen by one operation alone, which may write over it."""
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
        self._kept.append(tensor)
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
        self._kept.append(value)
        return name


def _is_of_the_shape(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    if name == "__get__":
        return getattr(getattr(func, "__self__", None), "__name__", "") in _PROPERTIES
    return name in _OF_THE_SHAPE
