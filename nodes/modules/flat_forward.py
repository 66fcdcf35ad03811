"""Flat forward pass: a module's pass recorded once as a list of torch operations, and replayed from then on.

A module of a few layers spends as long on `torch.nn.Module`'s calls as on its operations. The replay does the same
operations on the same weights, some of them in a faster form:

- A linear layer multiplies by weights kept transposed. For a few rows and many weights that takes a third to two thirds
  of the time.
- A convolution over channels-last images reads weights kept channels-last.
- An elementwise function works in place where nothing else reads its argument.

Sums are the same in another order, so results are equal up to rounding. Other Python code of the pass runs only while
it is recorded, so the module has to do the same at every call.

A module that nobody vouches for is watched: it is replayed only if its Python code can do nothing else at another call,
and its first passes of each kind give the same bits both ways. Its weights are read as they are.
"""

import builtins
import dis
import gc
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, ModuleType
from typing import Any

import numpy as np
import optree
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules import module as torch_module
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

# Functions that return their argument where its shape and dtype are those that are asked for.
_MAY_PASS_ON = {torch.Tensor.float, torch.Tensor.flatten, torch.flatten}

# Methods and properties of a tensor that do not depend on its elements.
_METHODS = frozenset(
    "__len__ dim ndimension nelement numel size stride storage_offset element_size is_contiguous is_floating_point "
    "is_complex is_inference get_device type is_same_size".split()
)
_PROPERTIES = frozenset("shape dtype device layout ndim requires_grad is_cuda is_sparse is_leaf grad_fn".split())
# Those that depend on what batches of one kind have in common.
_METHODS_OF_SHAPE = frozenset(
    "__len__ dim ndimension nelement numel size element_size is_floating_point _set_grad_enabled".split()
)
_PROPERTIES_OF_SHAPE = frozenset("shape dtype device ndim".split())

COMPARED = 8  # passes of each kind of batch that a watched module does both ways
MOST_KINDS = 16


class ValueDependent(Exception):
    """Raised when a pass may take another path at another call, as one that reads elements of tensors in Python."""


class FlatForward:
    """A module's forward pass, recorded for each structure, shape and dtype of batches that comes.

        forward    dict of tensors any[B, ...] to another one
        module     whose `forward` it is: it is watched, and compared with replays bit by bit before they take its
                   place. None: `forward` does the same at every call, and may be rounded otherwise
        reason     why a pass is not replayed, so that `forward` is called instead; None: all can be

    Called if torch records no gradients. Weights may be changed in place at any time. A pass can't be recorded if it
    reads elements of a tensor in Python, or returns anything but tensors. A watched module is replayed no more, for
    good, after one pass that can't be, or a change of what its passes read beside weights: of a layer, a setting, a
    function's code. Torch itself is taken to stay as it is.
    """

    def __init__(self, forward: Callable[[Batch], Batch], module: nn.Module | None = None) -> None:
        self.reason: str | None = None
        self.is_given_up = False  # True if the module's own passes are all that it does from now on
        self._forward = forward
        self._watch = None if module is None else _Watch(module)
        self._weights = _ArrangedWeights() if module is None else None
        self._flat: dict[Any, Callable[..., Any] | None] = {}
        self._single: dict[tuple[str, Any, Any], Callable[..., Any]] = {}  # by a column's name, shape and dtype
        self._nested: dict[str, tuple[list[tuple[Any, Any, Any]], Callable[..., Any]]] = {}  # see `_parts`; replay
        self._compared: dict[Any, tuple[Callable[..., Any], int]] = {}  # by kind: replay, passes that gave the same

    def __call__(self, batch: Batch) -> Batch:
        """The module's output for a batch."""
        if len(batch) == 1:  # observations alone: nearly every module's
            [(name, leaf)] = batch.items()
            single = self._single.get((name, leaf.shape, leaf.dtype)) if type(leaf) is Tensor else None
            if single is not None:
                try:
                    return single(leaf)  # type: ignore[no-any-return]
                except Exception as error:
                    return self._after(error, batch)
            nested = self._nested.get(name)
            if nested is not None and (parts := _parts(leaf, nested[0])) is not None:
                return self._replayed(batch, nested[1], parts)
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
            return (self._record if self._weights is not None else self._compare)(kind, batch, leaves)
        if flat is None:
            return self._forward(batch)
        return self._replayed(batch, flat, leaves)

    @property
    def is_on_trial(self) -> bool:
        """True if all passes were compared so far, and gave the same."""
        return self._watch is not None and not self._flat

    def _record(self, kind: Any, batch: Batch, leaves: list[Any]) -> Batch:
        recorder = _Recorder(leaves, self._weights)
        try:
            with recorder:
                output = self._forward(batch)
            flat = recorder.compile(output)
        except ValueDependent as refused:
            self.reason = str(refused)
            self._flat[kind] = None
            return self._forward(batch)
        self._keep(kind, batch, leaves, flat)
        # Replayed at once, so that the first pass rounds as all others do: lanes take turns in any order.
        return flat(*leaves) if recorder.changes_rounding else output

    def _compare(self, kind: Any, batch: Batch, leaves: list[Any]) -> Batch:
        """The module's own output, with which that of a replay is compared."""
        watch = self._watch
        if watch is None or (len(self._compared) == MOST_KINDS and kind not in self._compared):
            return self._forward(batch)
        try:
            watch.begin()
            recorder = _Recorder(leaves, known=watch.tensors)
            before = watch.states(leaves)
        except Exception as error:
            self._give_up(error)
            return self._forward(batch)
        output = watch.run(self._forward, batch)
        try:
            watch.check(before, batch, leaves)
            if kind not in self._compared:
                changes = watch.changes(recorder.name_of)
                with recorder:  # a pass more, which changes nothing
                    recorded = self._forward(batch)
                self._compared[kind] = recorder.compile(recorded, changes), 0
            flat, count = self._compared[kind]
            if not _is_same(flat(*leaves), output):
                raise ValueDependent("a replay gave other bits")
            self._compared[kind] = flat, count + 1
            if count + 1 == COMPARED:
                self._keep(kind, batch, leaves, flat)
        except Exception as error:
            self._give_up(error)
        return output

    def _keep(self, kind: Any, batch: Batch, leaves: list[Any], flat: Callable[..., Any]) -> None:
        self._flat[kind] = flat
        if len(batch) == 1 and len(leaves) == 1:
            [name] = batch
            self._single[name, leaves[0].shape, leaves[0].dtype] = flat
        elif len(batch) == 1:
            [(name, column)] = batch.items()
            keys = {id(part): key for key, part in column.items()} if type(column) is dict else {}
            if keys.keys() == set(map(id, leaves)):
                self._nested[name] = [(keys[id(leaf)], leaf.shape, leaf.dtype) for leaf in leaves], flat

    def _replayed(self, batch: Batch, flat: Callable[..., Any], leaves: Sequence[Any]) -> Batch:
        """What a replay gives; if it fails, the module's own output."""
        try:
            return flat(*leaves)  # type: ignore[no-any-return]
        except Exception as error:
            return self._after(error, batch)

    def _after(self, error: Exception, batch: Batch) -> Batch:
        """The module's own output, after a replay has failed."""
        if self._weights is not None:
            raise error
        self._give_up(error)
        return self._forward(batch)

    def _give_up(self, error: Exception) -> None:
        told = str(error) if isinstance(error, ValueDependent) else f"{type(error).__name__}: {error}"
        self.reason, self.is_given_up, self._watch = told.split("\n")[0], True, None
        self._flat.clear()
        self._single.clear()
        self._nested.clear()
        self._compared.clear()


def _parts(column: Any, kinds: list[tuple[Any, Any, Any]]) -> list[Tensor] | None:
    """The tensors of a column that is a dict of tensors of these keys, shapes and dtypes; None for another."""
    if type(column) is not dict or len(column) != len(kinds):
        return None
    parts = []
    for key, shape, dtype in kinds:
        part = column.get(key)
        if type(part) is not Tensor or part.shape != shape or part.dtype is not dtype:
            return None
        parts.append(part)
    return parts


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
        """Function that writes the same result over the first argument; None if there is none."""
        if self.func not in _IN_PLACE:
            return None
        argument = self.args[0]
        others_are_numbers = all(type(other) in (int, float) for other in self.args[1:])
        if self.kwargs.get("inplace") or not others_are_numbers or argument.dtype != self.result.dtype:
            return None
        return _IN_PLACE[self.func]


class _ArrangedWeights:
    """Copies of a module's weights in the memory order that passes read them in."""

    def __init__(self) -> None:
        # By the weight's identity: the weight, its copy, what makes one, and the weight's `_version` when it was made.
        self._copies: dict[int, tuple[Tensor, Tensor, Callable[[Tensor], Tensor], int]] = {}

    def transposed(self, weight: Tensor) -> Tensor:
        """Copy of a linear layer's weight, float[out, in], as float[in, out]."""
        return self._copy_of(weight, lambda weight: weight.t().contiguous())

    def channels_last(self, weight: Tensor) -> Tensor:
        """Copy of a convolution's weight, float[out, in, height, width], in the order out, height, width, in."""
        return self._copy_of(weight, lambda weight: weight.contiguous(memory_format=torch.channels_last))

    def renew(self) -> None:
        """Copy again the weights that have been written to."""
        with torch.no_grad():
            for key, (weight, copy, arrange, version) in self._copies.items():
                if version != weight._version:
                    self._copies[key] = weight, copy.copy_(arrange(weight)), arrange, weight._version

    def _copy_of(self, weight: Tensor, arrange: Callable[[Tensor], Tensor]) -> Tensor:
        if id(weight) not in self._copies:
            with torch.inference_mode(False), torch.no_grad():
                self._copies[id(weight)] = weight, arrange(weight).clone(), arrange, weight._version
        return self._copies[id(weight)][1]


def _arranged(operation: _Operation, weights: _ArrangedWeights) -> tuple[Callable[..., Tensor], list[Any]] | None:
    """Function and arguments of a layer with its weight arranged; None if the operation is best as it is.

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
    """Records every torch function that is called while it is entered.

    inputs     tensors of the batch
    weights    where copies of weights in another memory order are; None: operations read them as they are
    known      tensors that a watched module has, by identity: it may read no others. None: it is not watched
    """

    def __init__(
        self, inputs: list[Any], weights: _ArrangedWeights | None = None, known: dict[int, Tensor] | None = None
    ) -> None:
        super().__init__()
        if not all(type(leaf) is Tensor for leaf in inputs):
            raise ValueDependent("its batch has something else than tensors")
        if len(set(map(id, inputs))) < len(inputs):
            raise ValueDependent("its batch has one tensor twice")
        self._names: dict[int, str] = {}  # of tensors, by identity
        self._alive: list[Any] = []  # so that no identity is used twice
        self._constants: dict[str, Any] = {}
        self._constant_names: dict[int, str] = {}  # by identity
        self._refusal: str | None = None  # which the module may have caught
        self._raise = f"raise {self.name_of(ValueDependent)}('what its passes read has changed')"
        self._operations: dict[str, _Operation] = {}  # by their result's name; "shape…" for what Python asked of one
        self._uses: Counter[int] = Counter()  # of tensors, by identity
        self._weights, self._known = weights, known
        self._arranged_weights: list[Tensor] = []  # weights of which this pass reads an arranged copy
        self._inputs = set(map(id, inputs))
        self._parameters = [self._named(leaf, f"x{i}") for i, leaf in enumerate(inputs)]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        try:
            result = func(*args, **kwargs)
            self._note(func, args, kwargs, result)
        except Exception as error:
            self._refusal = str(error)
            raise
        return result

    def _note(self, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        if func in _MAY_PASS_ON and args and result is args[0]:
            return  # as for all tensors of its shape and dtype
        if any(isinstance(leaf, Tensor) for leaf in leaves_of(result)):
            source = [self._expression(each) for each in args]
            source += [f"{name}={self._expression(value)}" for name, value in kwargs.items()]
            name = f"v{len(self._operations)}"
            self._operations[name] = _Operation(func, args, kwargs, result, source)
            self._uses.update(id(leaf) for leaf in leaves_of((args, kwargs)))
            self._name_leaves(result, name)
        elif not _ignores_elements(func, is_watched=self._known is not None):
            raise ValueDependent(f"it calls {getattr(func, '__name__', func)}, which asks for numbers in Python")
        elif self._known is not None and args and id(args[0]) not in self._inputs:  # elements may decide on shapes, too
            source = [self._expression(each) for each in args]
            self._operations[f"shape{len(self._operations)}"] = _Operation(func, args, kwargs, result, source)

    def compile(self, output: Tree, changes: Sequence[str] = ()) -> Callable[..., Any]:
        """Function of the inputs that replays what has been recorded, and returns what `output` is.

        changes    expressions; the function raises ValueDependent if one of them is true

        Raises ValueDependent if an operation can't be replayed, or failed, whatever the pass made of that.
        """
        if self._refusal is not None:
            raise ValueDependent(self._refusal)
        if not isinstance(output, dict) or not all(id(leaf) in self._names for leaf in leaves_of(output)):
            raise ValueDependent("its output is not made of tensors that its inputs went into")
        self._uses.update(id(leaf) for leaf in leaves_of(output))
        lines = [line for name, operation in self._operations.items() for line in self._lines(name, operation)]
        lines.append(f"return {self._expression(output)}")
        if self._arranged_weights:
            assert self._weights is not None
            versions = " + ".join(f"{self._constant(weight)}._version" for weight in self._arranged_weights)
            last = self._constant([-1])
            renew = self._constant(self._weights.renew)
            lines.insert(0, f"if {versions} != {last}[0]: {renew}(); {last}[0] = {versions}")
        if changes:
            lines.insert(0, f"if {' or '.join(changes)}: {self._raise}")
        parameters = [*self._parameters, *(f"{name}={name}" for name in self._constants)]
        namespace: dict[str, Any] = {}
        exec("\n    ".join([f"def flat({', '.join(parameters)}):", *lines]), dict(self._constants), namespace)
        flat: Callable[..., Any] = namespace["flat"]
        return flat

    @property
    def changes_rounding(self) -> bool:
        """True if the function's numbers may differ from the module's by rounding."""
        return bool(self._arranged_weights)

    def _lines(self, name: str, operation: _Operation) -> Iterator[str]:
        """Lines that do an operation, and raise if its result is not of the shape that code in Python went by."""
        call, result = self._call(operation), operation.result
        if name.startswith("shape"):
            yield f"if {call} != {self._constant(result)}: {self._raise}"
            return
        yield f"{name} = {call}"
        if self._known is not None and isinstance(result, tuple | list):
            yield f"if len({name}) != {len(result)}: {self._raise}"

    def _call(self, operation: _Operation) -> str:
        """Source of a call that gives what an operation gives, in its fastest form."""
        faster = None if self._weights is None else _arranged(operation, self._weights)
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
        made_in_pass = [leaf for leaf in leaves_of(value) if id(leaf) in self._names]
        is_known = self._known is None or _is_plain(value) or id(value) in self._known
        if made_in_pass or not is_known:
            raise ValueDependent(f"an operation takes, or it returns, a {type(value).__name__} that may be another one")
        return self._constant(value)

    def _constant(self, value: Any) -> str:
        return repr(value) if value is None or type(value) in (bool, int, str) else self.name_of(value)

    def name_of(self, value: Any) -> str:
        """Name in the source of this very object."""
        name = self._constant_names.setdefault(id(value), f"c{len(self._constants)}")
        self._constants[name] = value
        return name


def _ignores_elements(func: Any, *, is_watched: bool) -> bool:
    name = getattr(func, "__name__", "")
    methods, properties = (_METHODS_OF_SHAPE, _PROPERTIES_OF_SHAPE) if is_watched else (_METHODS, _PROPERTIES)
    if name == "__get__":
        return getattr(getattr(func, "__self__", None), "__name__", "") in properties
    return name in methods


def _is_same(ours: Tree, theirs: Tree) -> bool:
    """True if trees of tensors have the same structure, shapes, dtypes and bits."""
    (our_leaves, our_structure), (leaves, structure) = optree.tree_flatten(ours), optree.tree_flatten(theirs)
    return our_structure == structure and all(map(_has_same_bits, our_leaves, leaves))


def _has_same_bits(ours: Tensor, theirs: Tensor) -> bool:
    kinds = [(each.shape, each.dtype, each.is_inference(), each.requires_grad) for each in (ours, theirs)]
    return kinds[0] == kinds[1] and torch.equal(_bits(ours), _bits(theirs))


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


_HERE, _TORCH = __file__, f"{Path(torch.__file__).parent}/"
# Functions of tensors in Python, all of which a recorder sees, and switches of gradients, which a pass has none of.
_TORCH_FILES = tuple(
    f"{_TORCH}{name}.py"
    for name in ("nn/functional", "functional", "_tensor", "_jit_internal", "autograd/grad_mode", "utils/_contextlib")
)
_TORCH_METHODS = frozenset(
    "_wrapped_call_impl _call_impl forward __getattr__ __getitem__ __iter__ __len__ items keys values".split()
)
_FUNCTIONS = {len, isinstance, min, max, sum, abs, round, any, all, iter, next, sorted, divmod, pow, callable}
_TYPES = {bool, int, float, str, tuple, list, dict, set, zip, range, enumerate, map, reversed, slice, super}
_PLAIN = {bool, int, float, complex, str, bytes, type(None), type(...), torch.dtype, torch.device, torch.memory_format}
_DUNDERS = {"__getattr__", "__getitem__", "__len__"}
_CALLED = {"forward", "__call__", "__getattr__", "__getattribute__"}  # of each module
_NOTHING = object()
_SMALL = 65_536  # elements of a tensor that is cheap to copy
_States = tuple[Tensor, list[tuple[Tensor, int, Tensor | None]]]  # the generator's; tensors, their versions and bits


class _Watch:
    """Looks at the Python code that a module's passes run: whether it can do anything else at another call.

    It can't if all that it reads is constant, a tensor, or named by `changes`: then it changes only what it makes.

    tensors    that the module has, by identity
    """

    def __init__(self, module: nn.Module) -> None:
        self.tensors: dict[int, Tensor] = {}
        self._module = module
        self._modules: dict[int, nn.Module] = {}
        self._codes: dict[tuple[CodeType, int], dict[str, Any]] = {}  # what ran, and its globals
        self._names: dict[tuple[CodeType, int], list[tuple[str, str]]] = {}  # that it reads, as of `_names_read`
        self._names_in_torch = set[str]()  # all that occur in torch's code that ran
        self._told: list[str] = []  # calls that may do something else another time

    def begin(self) -> None:
        """Note what the module has before a pass. Raises ValueDependent for one that can't be watched."""
        self._modules = {id(module): module for module in self._module.modules()}
        if sys.getprofile() is not None:
            raise ValueDependent("a profiler runs, beside which it can't be watched")
        if any(hooks for module in (torch_module, *self._modules.values()) for hooks in _hooks(module)):
            raise ValueDependent("it has forward hooks")
        held = [value for module in self._modules.values() for value in vars(module).values()]
        tensors = [*self._module.parameters(), *self._module.buffers(), *held]
        self.tensors = {id(tensor): tensor for tensor in tensors if isinstance(tensor, Tensor)}

    def states(self, leaves: list[Any]) -> _States:
        """What tells whether a pass draws random numbers, or changes a tensor in place.

        That is a tensor's `_version` and, as some operations leave it, its bits: a large one's in the first pass alone.
        """
        found = []
        for tensor in [*self.tensors.values(), *leaves]:
            is_copied = tensor.is_inference() or tensor.numel() <= _SMALL or not self._codes
            version = -1 if tensor.is_inference() else tensor._version
            found.append((tensor, version, _bits(tensor).clone() if is_copied else None))
        return torch.get_rng_state(), found

    def run(self, forward: Callable[[Batch], Batch], batch: Batch) -> Batch:
        """Do a pass as the module does it."""
        collects = gc.isenabled()
        gc.disable()  # what is called at a collection is none of the module's
        sys.setprofile(self._see)
        try:
            return forward(batch)
        finally:
            sys.setprofile(None)
            if collects:
                gc.enable()

    def check(self, before: _States, batch: Batch, leaves: list[Any]) -> None:
        """Raise ValueDependent unless the pass has changed nothing."""
        self._names |= {key: list(_names_read(key[0])) for key in self._codes if key not in self._names}
        if self._told:
            raise ValueDependent(self._told[0])
        if list(map(id, leaves_of(batch))) != list(map(id, leaves)):
            raise ValueDependent("it changes its batch")
        generator, tensors = before
        if not torch.equal(torch.get_rng_state(), generator):
            raise ValueDependent("it draws random numbers")
        for tensor, version, bits in tensors:
            is_written = not tensor.is_inference() and tensor._version != version
            if is_written or (bits is not None and not torch.equal(_bits(tensor), bits)):
                raise ValueDependent("it changes a tensor in place")

    def changes(self, name_of: Callable[[Any], str]) -> list[str]:
        """Expressions, one of which is true after a change of anything that passes read beside tensors' elements.

        name_of    gives an object's name in expressions

        Raises ValueDependent for what is read that may change otherwise.
        """
        changes = [name_of(hooks) for hooks in _hooks(torch_module)]
        for module in self._modules.values():
            changes += map(name_of, _hooks(module))
            changes.append(f"type({name_of(module)}) is not {name_of(type(module))}")
            for parts in (module._parameters, module._buffers, module._modules):
                changes += [f"{name_of(parts)}[{name!r}] is not {name_of(part)}" for name, part in parts.items()]
            changes.append(f"len({name_of(vars(module))}) != {len(vars(module))}")
            if isinstance(module, nn.Sequential | nn.ModuleList | nn.ModuleDict):  # others' passes do not iterate
                changes.append(f"[*{name_of(module._modules)}] != {name_of([*module._modules])}")
        own_classes = {base: None for module in self._modules.values() for base in _own_classes(module)}
        changes += [f"len({name_of(vars(base))}) != {len(vars(base))}" for base in own_classes]
        methods = [part for base in own_classes for part in map(_function, vars(base).values())]
        read, holders = {*_CALLED}, [*self._modules.values(), *self.tensors.values()]
        holders += [part for part in methods if isinstance(part, FunctionType)]
        for (code, _), names in self._codes.items():
            for name, use in self._names[code, id(names)]:
                value = names.get(name, getattr(builtins, name, _NOTHING))
                if use == "attribute":
                    read.add(name)
                elif not _is_usable(value) and not (type(value) is type and use == "holder"):
                    raise ValueDependent(f"{code.co_qualname} reads {name!r}, which may change")
                elif name in names and not _is_of_torch(value):
                    holders += [] if isinstance(value, ModuleType) else [value]
                    changes.append(f"{name_of(names)}[{name!r}] is not {name_of(value)}")
        ran = {code for code, _ in self._codes}
        known = {code for each in ran for code in each.co_consts}
        names_read, seen = read | self._names_in_torch, set[int]()
        for holder in holders:
            if id(holder) in seen:
                continue
            seen.add(id(holder))
            if isinstance(holder, FunctionType) and (holder.__code__ in ran or _is_in_torch(holder.__code__)):
                known.add(holder.__code__)
                kept = _kept(holder, name_of(holder))
                changes += [f"{place} is not {name_of(value)}" for place, value in kept.items()]
                holders += [value for value in kept.values() if isinstance(value, FunctionType)]
            own = vars(holder) if hasattr(holder, "__dict__") else {}
            kind = holder if isinstance(holder, type) else type(holder)
            places = [own, *map(vars, _own_classes(kind))]
            for name in names_read & set().union(*places):
                value = _function(next(place[name] for place in places if name in place))
                if isinstance(value, FunctionType):
                    holders.append(value)
                elif not (id(value) in self.tensors or _is_plain(value) or _is_of_torch(value)):
                    if name not in read and not callable(value):
                        continue
                    raise ValueDependent(f"it reads {name!r}, a {type(value).__name__} that may change")
                is_method = isinstance(value, FunctionType) and name not in own
                place, value = (kind, getattr(kind, name)) if is_method else (holder, value)
                changes.append(f"{name_of(place)}.{name} is not {name_of(value)}")
        if others := ran - known:
            raise ValueDependent(f"it calls {others.pop().co_qualname} in a way that can't be followed")
        return list(dict.fromkeys(changes))

    def _see(self, frame: FrameType, event: str, called: Any) -> None:
        """Note a function that is called, while the pass runs."""
        code, caller = frame.f_code, frame.f_back
        is_torch = _is_in_torch(code)
        if code.co_filename == _HERE or event not in ("call", "c_call"):
            return
        if is_torch:
            self._names_in_torch.update(code.co_names, (value for value in code.co_consts if type(value) is str))
        if not is_torch and event == "call":
            self._codes[code, id(frame.f_globals)] = frame.f_globals
        elif not is_torch and not _is_pure(called):
            self._told.append(f"{code.co_qualname} calls {getattr(called, '__qualname__', called)}")
        elif event == "call" and caller is not None and not caller.f_code.co_filename.startswith((_TORCH, _HERE)):
            owner = frame.f_locals.get(code.co_varnames[0]) if code.co_varnames else None
            is_read = code.co_name in _TORCH_METHODS and not isinstance(owner, nn.ParameterList | nn.ParameterDict)
            if not (is_read and id(owner) in self._modules) and code.co_filename not in _TORCH_FILES:
                self._told.append(f"{caller.f_code.co_qualname} calls {code.co_qualname} of torch")


def _names_read(code: CodeType) -> Iterator[tuple[str, str]]:
    """Names that code reads: of an "attribute"; of a "global" variable, or one that is a "holder" of attributes.

    Raises ValueDependent for what the code does beside.
    """
    for instruction, following in pairwise(dis.get_instructions(code)):
        operation, name = instruction.opname, instruction.argval
        if operation == "PUSH_EXC_INFO" and following.opname != "WITH_EXCEPT_START":
            raise ValueDependent(f"{code.co_qualname} handles exceptions")
        if operation == "LOAD_GLOBAL":
            yield name, "holder" if following.opname in ("LOAD_ATTR", "LOAD_METHOD") else "global"
        elif operation.startswith(("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER")) and (
            (name[:2] != "__" and name != "data") or name in _DUNDERS
        ):
            yield name, "attribute"
        elif (
            instruction.opcode in dis.hasname
            or operation in ("LOAD_BUILD_CLASS", "MATCH_CLASS")
            or (operation in ("STORE_DEREF", "DELETE_DEREF") and name in code.co_freevars)
        ):
            raise ValueDependent(f"{code.co_qualname} {operation.split('_')[0].lower()}s {name!r}")


def _kept(function: FunctionType, source: str) -> dict[str, Any]:
    """What one calls a function with, by its place in Python source. Raises ValueDependent for what may change."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    kept = {
        f"{source}.__closure__[{i}].cell_contents": cell.cell_contents
        for i, (name, cell) in enumerate(cells)
        if name != "__class__"
    }
    if _is_in_torch(function.__code__):
        return {place: value for place, value in kept.items() if isinstance(value, FunctionType)}
    defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    if not all(isinstance(value, FunctionType) for value in kept.values()) or not all(map(_is_plain, defaults)):
        raise ValueDependent(f"{function.__qualname__} keeps what may change, around it or as a default value")
    kept[f"{source}.__code__"] = function.__code__
    if function.__defaults__:
        kept[f"{source}.__defaults__"] = function.__defaults__
    return kept | {
        f"{source}.__kwdefaults__[{name!r}]": value for name, value in (function.__kwdefaults__ or {}).items()
    }


def _is_in_torch(code: CodeType) -> bool:
    return code.co_filename.startswith(_TORCH)


def _own_classes(holder: Any) -> list[type]:
    """The classes that a class or an object is of, without torch's."""
    bases = (holder if isinstance(holder, type) else type(holder)).__mro__
    return [base for base in bases if base is not object and base is not FunctionType and not _is_of_torch(base)]


def _function(value: Any) -> Any:
    """The function that a property or a static method calls."""
    return value.fget if isinstance(value, property) else value.__func__ if isinstance(value, staticmethod) else value


def _is_plain(value: Any) -> bool:
    """True for what can't change, and holds no tensor."""
    if type(value) in (tuple, torch.Size):
        return all(map(_is_plain, value))
    if type(value) is slice:
        return all(map(_is_plain, (value.start, value.stop, value.step)))
    is_number = isinstance(value, np.number | np.bool_) and type(value).__module__ == "numpy"
    return type(value) in _PLAIN or is_number


def _is_of_torch(value: Any) -> bool:
    """True for torch's modules, classes and functions."""
    name = getattr(value, "__name__" if isinstance(value, ModuleType) else "__module__", None)
    is_torch = isinstance(name, str) and f"{name}.".startswith("torch.")
    return is_torch and isinstance(value, ModuleType | type | FunctionType | BuiltinFunctionType)


def _is_usable(value: Any) -> bool:
    """True for the value of a global variable that does the same whenever it is used, as long as it is the same."""
    if isinstance(value, type) and (value in _TYPES or issubclass(value, BaseException)):
        return True
    is_function = isinstance(value, FunctionType) or (
        isinstance(value, BuiltinFunctionType) and isinstance(value.__self__, ModuleType | None) and _is_pure(value)
    )
    return is_function or value is math or _is_plain(value) or _is_of_torch(value)


def _is_pure(function: Any) -> bool:
    """True for a function in C of which each call does the same, or is seen by a recorder."""
    owner, module = getattr(function, "__self__", None), getattr(function, "__module__", None) or ""
    if isinstance(owner, Tensor | list | tuple | dict | set) or owner is math:
        return True
    return function in _FUNCTIONS or (module == "torch" and owner is None) or module.startswith("torch._C._")


def _hooks(module: Any) -> list[dict[Any, Any]]:
    """The forward hooks of a module; those of all modules, given torch's own module of Python."""
    prefix = "_global" if module is torch_module else ""
    return [getattr(module, f"{prefix}_forward{kind}_hooks") for kind in ("", "_pre")]
