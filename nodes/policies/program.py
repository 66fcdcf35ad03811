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
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rollflow.nodes.modules.distribution import DistributionType
from rollflow.nodes.policies.plain_values import to_plain
from rollflow.stream.data.errors import PolicyError, shown
from rollflow.stream.data.tree import Tree, leaves_of, map_tree

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
    try:
        with torch.no_grad():
            output = getattr(module, name)(dict(batch))
        return _recorded(exported(wrapped, leaves_of(dict(batch))), batch, output, constants)
    except PolicyError:
        raise
    except Exception as error:
        reason = str(error).strip().split("\n")[0]
        raise PolicyError(
            f"module: {type(module).__name__}.{name} has no program: {type(error).__name__}: {reason}; expected torch "
            "operations alone, that do not depend on elements of tensors or on the number of rows"
        ) from error


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
            operation = _operation(node.target)
            if operation is None:
                continue
            args, kwargs = (
                _argument(list(node.args), numbers),
                {k: _argument(v, numbers) for k, v in node.kwargs.items()},
            )
            operations.append([operation, args, kwargs])
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


def _operation(target: Any) -> str | None:
    """The name of an operation; None for one that checks alone. Raises PolicyError where programs can't have it."""
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
