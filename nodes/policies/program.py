"""Programs: a module's forward passes as torch operations in a row, made by `torch.export`, without code of its class.

A program is plain JSON. Nothing of torch's own file format is used: reading that evaluates expressions, and unpickles.
Only operations that `operation_named` knows are ever called.

    inputs        the batch's tree, with a number for each leaf
    weights       names in `state_dict()`, and of constants, `$constant/…`, in the order in which they follow the inputs
    operations    [name, arguments, keyword arguments] of each; its result is the next value
    output        the output's tree, with the number of a value for each leaf

Among arguments, {"value": n} is the n-th value, {"dtype": …}, {"memory_format": …}, {"layout": …} and {"float": …} are
what they say, and {"device": null} is where the weights are.
"""

import math
import operator
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import optree
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollflow.nodes.modules.distribution import DistributionType
from rollflow.nodes.modules.rl_module import Batch, RLModule
from rollflow.nodes.policies.part_records import from_plain, to_plain
from rollflow.stream.data.errors import ModuleError, PolicyError, refused, shown
from rollflow.stream.data.tree import Tree, leaves_of, map_tree, part_at

PASSES = ("forward_exploration", "forward_inference")
CONSTANT = "$constant/"

Constants = dict[str, NDArray[Any]]

_PLAIN = {"getitem", "add", "sub", "mul", "floordiv", "mod", "neg", "eq", "ne", "lt", "le", "gt", "ge"}  # of `operator`
_PRIVATE = {"_softmax", "_log_softmax", "_to_copy", "_unsafe_view", "_native_batch_norm_legit_no_training"} | {
    "_adaptive_avg_pool2d",
    "_scaled_dot_product_flash_attention_for_cpu",
}
_REFUSED = {"from_file", "set_data", "record_stream", "resize", "set"}
_CHECKS = ("_assert", "sym_constrain_range")
MOST_OPERATIONS = 1 << 16
MOST_BYTES = 1 << 30  # of one value, while the saved examples are computed
_FIELDS = {"inputs", "weights", "operations", "output"}
_FLOATS = ("nan", "inf", "-inf")

Values = list[Any]
Reader = Callable[[Values], Any]


def programs_of(module: Any, batch: Mapping[str, Any]) -> tuple[dict[str, Any], Constants]:
    """The programs of a module's forward passes, by the pass's name, and the constants that they have.

    batch    of any number of rows, as the module gets it; programs take batches of any other number

    Raises PolicyError for a module whose passes can't be exported.
    """
    _check(module)
    constants: Constants = {}
    return {name: _program(module, name, batch, constants) for name in PASSES}, constants


def operation_named(name: Any) -> Callable[..., Any]:
    """The function of an operation's name: one of torch's that changes nothing and reads no file.

    Raises PolicyError for any other name.
    """
    if isinstance(name, str) and name in _PLAIN:
        return getattr(operator, name)  # type: ignore[no-any-return]
    parts = name.split(".") if isinstance(name, str) else []
    if len(parts) == 3 and parts[0] == "aten" and all(part.isidentifier() for part in parts):
        public = not parts[1].startswith("_") or parts[1] in _PRIVATE
        packet = getattr(torch.ops.aten, parts[1], None) if public and parts[1] not in _REFUSED else None
        found = getattr(packet, parts[2], None)
        if isinstance(found, torch._ops.OpOverload) and not found._schema.is_mutable:
            return found
    raise PolicyError(f"programs: there is no operation {str(name)[:80]!r}; expected one of torch's aten operations")


def _check(module: Any) -> None:
    cls = type(module).__name__
    others = [name for name, value in module.state_dict().items() if not torch.is_tensor(value)]
    if others:
        raise PolicyError(f"module: {cls} has {others} in its state_dict(), expected tensors alone, for a program")
    for name in ("get_exploration_action_dist_cls", "get_inference_action_dist_cls"):
        made = getattr(module, name, lambda: None)()
        own = isinstance(made, DistributionType) and made.space == module.action_space
        if made is not None and not own:
            raise PolicyError(
                f"module: {cls}.{name}() gives {shown(made)}, which a program can't have; expected that of its "
                "action space"
            )


class _Pass(torch.nn.Module):
    """A module's pass as a function of the batch's leaves."""

    def __init__(self, module: Any, name: str, batch: Mapping[str, Any]) -> None:
        super().__init__()
        self.module, self.name, self.batch = module, name, batch

    def forward(self, *leaves: torch.Tensor) -> tuple[torch.Tensor, ...]:
        given = iter(leaves)
        return tuple(leaves_of(getattr(self.module, self.name)(map_tree(lambda _: next(given), dict(self.batch)))))


def exported(module: torch.nn.Module, leaves: Iterable[torch.Tensor]) -> torch.export.ExportedProgram:
    """A module's `forward(*leaves)` by `torch.export`, with a first axis of any length, the same for all."""
    leaves = tuple(leaves)
    batch = torch.export.Dim("batch")
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # torch's, about itself
        program = torch.export.export(
            module, leaves, dynamic_shapes={"leaves": tuple({0: batch} for _ in leaves)}, strict=False
        )
        decomposed: torch.export.ExportedProgram = program.run_decompositions({})
        return decomposed


def _program(module: Any, name: str, batch: Mapping[str, Any], constants: Constants) -> dict[str, Any]:
    wrapped = _Pass(module, name, batch)
    expected = "; expected torch operations alone, that do not depend on elements of tensors or on the number of rows"
    with refused(f"module: {type(module).__name__}.{name} has no program", expected):
        with torch.no_grad():
            output = getattr(module, name)(dict(batch))
        program = _recorded(exported(wrapped, leaves_of(dict(batch))), batch, output, constants)
    return program


def _recorded(
    program: torch.export.ExportedProgram, batch: Mapping[str, Any], output: Tree, constants: Constants
) -> dict[str, Any]:
    numbers: dict[str, int] = {}  # node -> value
    names = {spec.arg.name: spec for spec in program.graph_signature.input_specs}
    weights: list[str] = []
    placeholders = [node for node in program.graph.nodes if node.op == "placeholder"]
    is_input = {
        node.name: names[node.name].kind is torch.export.graph_signature.InputKind.USER_INPUT for node in placeholders
    }
    for node in sorted(placeholders, key=lambda node: not is_input[node.name]):  # a stable sort: inputs first
        numbers[node.name] = len(numbers)
        if not is_input[node.name]:
            weights.append(_weight(program, str(names[node.name].target), constants))
    operations: list[list[Any]] = []
    results: list[Any] = []
    for node in program.graph.nodes:
        if node.op == "call_function":
            operation = _name_of(node.target)
            if operation is None:
                continue
            kwargs = {key: _argument(value, numbers) for key, value in node.kwargs.items()}
            operations.append([operation, _argument(list(node.args), numbers), kwargs])
            numbers[node.name] = len(numbers)
        elif node.op == "output":
            results = list(node.args[0])
        elif node.op != "placeholder":
            raise PolicyError(f"module: its pass has a {node.op} ({node.target}), which a program can't have")
    values = iter(results)
    inputs = iter(range(len(numbers)))
    return {
        "inputs": to_plain(map_tree(lambda _: next(inputs), dict(batch)), "inputs", {}),
        "weights": weights,
        "operations": operations,
        "output": to_plain(map_tree(lambda _: numbers[next(values).name], output), "output", {}),
    }


def _weight(program: torch.export.ExportedProgram, target: str, constants: Constants) -> str:
    name = target.removeprefix("module.")
    if target in program.state_dict and target not in program.graph_signature.non_persistent_buffers:
        return name
    tensor = program.constants[target] if target in program.constants else program.state_dict[target]
    array = tensor.detach().cpu().numpy()
    for key, known in constants.items():
        if known.dtype == array.dtype and np.array_equal(known, array):
            return f"{CONSTANT}{key}"
    key = str(len(constants))
    constants[key] = np.array(array)
    return f"{CONSTANT}{key}"


def _name_of(target: Any) -> str | None:
    """The name of an operation; None for one that checks alone. Raises PolicyError if programs can't have it."""
    name = target.__name__ if getattr(target, "__module__", "") == "_operator" else str(target)
    if name.startswith(tuple(f"aten.{check}" for check in _CHECKS)):
        return None
    operation_named(name)
    return name


def _argument(value: Any, numbers: Mapping[str, int]) -> Any:
    if isinstance(value, torch.fx.Node):
        return {"value": numbers[value.name]}
    if isinstance(value, list | tuple):
        return [_argument(each, numbers) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, torch.device):
        return {"device": None}
    for kind in ("dtype", "memory_format", "layout"):
        if isinstance(value, getattr(torch, kind)):
            return {kind: str(value).removeprefix("torch.")}
    raise PolicyError(f"module: its pass has an argument {shown(value)}, which a program can't have")


# An operation: its function, and what gives its arguments and keyword arguments.
_Step = tuple[Callable[..., Any], tuple[Reader, ...], tuple[tuple[str, Reader], ...]]


class _Program(NamedTuple):
    paths: tuple[tuple[Any, ...], ...]  # of the inputs in the batch
    weights: tuple[tuple[dict[str, Any], str], ...]  # the dict of a module's tensors, and the name in it
    steps: tuple[_Step, ...]
    output: Tree  # with a number of a value for each leaf


class ModuleFiles(NamedTuple):
    """What a saved policy says of a module's class, and the files of its programs, to be saved again."""

    record: dict[str, Any]
    arrays: Constants
    files: Mapping[str, bytes]


class ProgramModule(RLModule):
    """The forward passes of a module whose class is not there.

        programs      by the pass's name, as `programs_of` gives them
        weights       the module's `state_dict()`
        constants     that the programs have
        origin        where it comes from
        spaces        `observation_space` and `action_space`
        initial       initial state; {} for a stateless module

    Raises PolicyError, with the place, for what are no programs. Its weights may be published anew, and it goes to any
    device, as the module itself.
    """

    def __init__(
        self,
        programs: Any,
        weights: Mapping[str, Tensor],
        constants: Constants,
        origin: ModuleFiles,
        *,
        spaces: Mapping[str, gym.Space[Any]],
        initial: Tree,
    ) -> None:
        super().__init__(spaces["observation_space"], spaces["action_space"])
        self.origin, self._initial = origin, initial
        for key, tensor in weights.items():
            *path, last = key.split(".")
            _module_at(self, path).register_parameter(last, torch.nn.Parameter(tensor, requires_grad=False))
        for key, array in constants.items():
            self.register_buffer(f"constant {key}", torch.from_numpy(array), persistent=False)
        if not isinstance(programs, Mapping) or set(programs) != set(PASSES):
            raise PolicyError(f"programs are {str(programs)[:80]}, expected {', '.join(PASSES)}")
        self._programs = {key: self._read(programs[key], key) for key in PASSES}

    def get_initial_state(self) -> Any:
        return self._initial

    def _forward_exploration(self, batch: Batch, **kwargs: Any) -> Batch:
        return self._run("forward_exploration", batch)

    def _forward_inference(self, batch: Batch, **kwargs: Any) -> Batch:
        return self._run("forward_inference", batch)

    def _forward_train(self, batch: Batch, **kwargs: Any) -> Batch:
        raise ModuleError(
            f"{self.origin.record['name']} is here as a program that acts, expected its class for training"
        )

    def check(self, batch: Batch) -> None:
        """Raise PolicyError if a pass over a batch like this one would fail, or take too much memory."""
        for key in PASSES:
            with refused(f"programs: {key} can't be run"):
                self._run(key, map_tree(lambda leaf: leaf.to("meta"), batch), checks=True)

    def _run(self, key: str, batch: Batch, *, checks: bool = False) -> Batch:
        program = self._programs[key]
        values: Values = [part_at(batch, path, "the batch", "what the program was made for") for path in program.paths]
        tensors = [owner[name] for owner, name in program.weights]
        values += [tensor.to("meta") for tensor in tensors] if checks else tensors
        for call, args, kwargs in program.steps:
            made = call(*[read(values) for read in args], **{name: read(values) for name, read in kwargs})
            if checks:
                _check_size(made, key)
            values.append(made)
        output: Batch = map_tree(lambda place: values[place], program.output)
        return output

    # Reading

    def _read(self, record: Any, where: str) -> _Program:
        if not isinstance(record, Mapping) or record.keys() != _FIELDS:
            raise PolicyError(f"programs: {where} is {str(record)[:80]}, expected {', '.join(sorted(_FIELDS))}")
        operations, names = record["operations"], record["weights"]
        if not isinstance(operations, list) or len(operations) > MOST_OPERATIONS or not isinstance(names, list):
            raise PolicyError(f"programs: {where} has no list of weights, and of at most {MOST_OPERATIONS} operations")
        inputs = from_plain(record["inputs"], f"{where}/inputs", {})
        paths = optree.tree_paths(inputs, none_is_leaf=True)
        if leaves_of(inputs) != list(range(len(paths))) or not isinstance(inputs, dict):
            raise PolicyError(f"programs: {where}: inputs are {str(inputs)[:80]}, expected a number for each")
        first = len(paths) + len(names)
        output = from_plain(record["output"], f"{where}/output", {})
        total = first + len(operations)
        made = leaves_of(output)
        if not isinstance(output, dict) or not all(type(each) is int and 0 <= each < total for each in made):
            raise PolicyError(f"programs: {where}: output is {str(output)[:80]}, expected numbers below {total}")
        steps = [_operation(each, first + place, where) for place, each in enumerate(operations)]
        return _Program(tuple(paths), tuple(self._owner(name, where) for name in names), tuple(steps), output)

    def _owner(self, name: Any, where: str) -> tuple[dict[str, Any], str]:
        if isinstance(name, str) and name.startswith(CONSTANT):
            owner, last = self._buffers, f"constant {name.removeprefix(CONSTANT)}"
        else:
            *path, last = str(name).split(".")
            found: Any = self
            for part in path:
                found = found._modules.get(part) if found is not None else None
            owner = {} if found is None else found._parameters
        if last not in owner:
            raise PolicyError(f"programs: {where} names weights {str(name)[:80]!r}, which are not there")
        return owner, last


def _operation(record: Any, number: int, where: str) -> _Step:
    if not isinstance(record, list) or len(record) != 3 or not isinstance(record[1], list):
        raise PolicyError(f"programs: {where}: an operation is {str(record)[:80]}, expected a name and arguments")
    name, args, kwargs = record
    if not isinstance(kwargs, dict):
        raise PolicyError(f"programs: {where}: arguments of {str(name)[:80]!r} are no dict: {str(kwargs)[:80]}")
    call = operation_named(name)
    read = tuple(_reader(each, number) for each in args)
    named = {key: _reader(each, number) for key, each in kwargs.items()}
    if isinstance(call, torch._ops.OpOverload) and _makes_tensors(call):
        named["device"] = _device
    return call, read, tuple(named.items())


def _makes_tensors(call: torch._ops.OpOverload) -> bool:
    """True for an operation that makes tensors of no others, on a device."""
    kinds = {each.name: str(each.type) for each in call._schema.arguments}
    return "device" in kinds and not any("Tensor" in kind for kind in kinds.values())


def _reader(argument: Any, number: int) -> Reader:
    """What gives an argument; values are named by their number, of which those before `number` are there."""
    if isinstance(argument, list):
        return partial(_read_list, [_reader(each, number) for each in argument])
    if not isinstance(argument, dict):
        return partial(_constant, argument)
    if len(argument) == 1:
        [(kind, value)] = argument.items()
        if kind == "value" and type(value) is int and 0 <= value < number:
            return itemgetter(value)
        if kind == "float" and value in _FLOATS:
            return partial(_constant, float(value))
        if kind == "device" and value is None:
            return _device
        made = (
            getattr(torch, value, None) if kind in ("dtype", "memory_format", "layout") and type(value) is str else None
        )
        if made is not None and isinstance(made, getattr(torch, kind)):
            return partial(_constant, made)
    raise PolicyError(f"programs: an argument is {str(argument)[:80]}, expected a value before it, or a constant")


# Functions of modules, so that a program can be pickled.
def _constant(value: Any, values: Values) -> Any:
    return value


def _read_list(parts: Sequence[Reader], values: Values) -> list[Any]:
    return [read(values) for read in parts]


def _device(values: Values) -> torch.device:
    """Where the batch is, whose first leaf is the first value."""
    device: torch.device = values[0].device
    return device


def _check_size(made: Any, where: str) -> None:
    for each in made if isinstance(made, list | tuple) else [made]:
        if isinstance(each, Tensor) and each.numel() * each.element_size() > MOST_BYTES:
            raise PolicyError(f"programs: {where} makes {list(each.shape)}, expected at most {MOST_BYTES} bytes")
        if isinstance(each, int) and abs(each) > MOST_BYTES:
            raise PolicyError(f"programs: {where} makes the number {each}, expected at most {MOST_BYTES}")


def _module_at(module: torch.nn.Module, path: Sequence[str]) -> torch.nn.Module:
    for part in path:
        if part not in module._modules:
            module.add_module(part, torch.nn.Module())
        module = module._modules[part]  # type: ignore[assignment]
    return module
