"""Records of connector pieces and modules: class by name, arguments and state; no pickle anywhere."""

import importlib
import inspect
import json
import math
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import fields
from enum import Enum
from functools import partial
from typing import Any, TypeVar

import gymnasium as gym
import numpy as np
import torch
from numpy.typing import NDArray

from rollflow.nodes.connectors.common.batches import NumpyToTensor
from rollflow.nodes.connectors.connector_v2 import ConnectorV2
from rollflow.nodes.connectors.module_to_env.action_pieces import Linear
from rollflow.nodes.connectors.pipelines.connector_pipeline_v2 import ConnectorPipelineV2
from rollflow.nodes.modules.default_module import DefaultModelConfig
from rollflow.nodes.modules.rl_module import RLModule
from rollflow.nodes.policies.space_text import described, space_of
from rollflow.stream.data.errors import PolicyError, located, refused, shown
from rollflow.stream.data.stored_files import StoredKind, array_bytes

ArraysByName = dict[str, NDArray[Any]]
Thing = TypeVar("Thing")

_OF_THE_DEVICE = {"device", "pin_memory"}  # arguments of `NumpyToTensor` that a file must not fix
_PIECE = {"name", "label", "config", "state"}
_PIPELINE = {"name", "label", "config", "pieces"}
MODULE_FIELDS = {"name", "observation_space", "action_space", "config", "initial_state"}
_FORMER = {"version", "computed_by"}  # fields that older versions wrote, which nobody reads
_RECORDS: dict[str, Any] = {"$linear": Linear, "$model_config": DefaultModelConfig}
_FLOATS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_DTYPES = {"bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"} | {
    "float16",
    "float32",
    "float64",
}
_PLAIN = "plain"  # name of the JSON text among the arrays of a packed state
_OWN = "rollflow."
_BY_ONNX = {"module": "; a policy saved with onnx=True acts without the class: OnnxPolicy.load(path)"}
_registered: dict[str, dict[str, Any]] = {"connector": {}, "module": {}, "function": {}}
_EXPORT = ", or export_onnx(path), for an OnnxPolicy, which acts without the class"
_BASES: dict[str, type] = {"connector": ConnectorV2, "module": torch.nn.Module}


# Names of classes and functions that a saved policy may have; nothing else is run when it is loaded


def register_connector(name: str, cls: type[ConnectorV2]) -> type[ConnectorV2]:
    """Give a class of connector pieces the name that saved policies have for it; the class.

    Raises PolicyError for a name that is taken, and for anything but such a class.
    """
    return _register("connector", name, cls)


def register_module(name: str, cls: type) -> type:
    """Give a class of modules the name that saved policies have for it; the class. Raises PolicyError likewise."""
    return _register("module", name, cls)


def register_function(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Give a function, which may be a lambda, the name that saved policies have for it; the function.

    Pieces take functions as arguments, such as `LambdaConnector`. Raises PolicyError likewise.
    """
    return _register("function", name, function)


def name_of(kind: str, thing: Any, where: str) -> str:
    """The name that a policy saves a class or function under.

    kind    "connector", "module" or "function"

    Raises PolicyError, with the place `where`, for what can't be found again by a name.
    """
    for name, registered in _registered[kind].items():
        if registered is thing:
            return name
    module, qualified = getattr(thing, "__module__", None), getattr(thing, "__qualname__", None)
    if kind in _BASES and _own(kind, getattr(thing, "__name__", "")) is thing:
        return f"{_OWN}{thing.__name__}"
    remedy = f'expected register_{kind}("my_name", …) before it is saved, and again before it is loaded'
    if not isinstance(module, str) or not isinstance(qualified, str):
        raise PolicyError(f"{where}: {thing!r} has no name by which it could be found again; {remedy}")
    if "<" in qualified or module == "__main__":
        raise PolicyError(
            f"{where}: {module}.{qualified} can't be imported by another program; {remedy}, or one on the top "
            f"level of a file that can be imported{_EXPORT if kind == 'module' else ''}"
        )
    return f"{module}:{qualified}"


def named(kind: str, name: Any, allow: Collection[str], where: str) -> Any:
    """The class or function of a name.

    allow    packages and modules whose classes and functions may be imported

    Raises PolicyError, with the place `where`, for a name that is not allowed, or that stands for nothing of the kind.
    """
    if not isinstance(name, str):
        raise PolicyError(f"{where}: the name of a {kind} is {name!r}, expected text")
    if name in _registered[kind]:
        return _registered[kind][name]
    found = _own(kind, name.removeprefix(_OWN)) if name.startswith(_OWN) else None
    if found is not None:
        return found
    module, colon, qualified = name.partition(":")
    by_onnx = _BY_ONNX.get(kind, "")
    if not colon:
        raise PolicyError(
            f"{where}: there is no {kind} of the name {name!r}; expected register_{kind}({name!r}, …) before the "
            f"policy is loaded{by_onnx}"
        )
    if not any(module == each or module.startswith(f"{each}.") for each in allow):
        raise PolicyError(
            f"{where}: {kind} {name!r} is not allowed to be imported; expected allow=[{module.split('.')[0]!r}], or "
            f"--allow {module.split('.')[0]}, where you trust that package, or register_{kind}({name!r}, …){by_onnx}"
        )
    thing, place = None, ", ".join(sys.path)
    try:
        thing = importlib.import_module(module)
        place = getattr(thing, "__file__", None) or module
        for part in qualified.split("."):
            thing = getattr(thing, part)
    except (ImportError, AttributeError) as error:
        raise PolicyError(
            f"{where}: {kind} {name!r} can't be imported: {error}; it was looked for in {place}; expected it there, or "
            f"register_{kind}({name!r}, …) before the policy is loaded{by_onnx}"
        ) from None
    if not _is_one(kind, thing):
        raise PolicyError(f"{where}: {name!r} is no {kind}, expected one")
    return thing


def _own(kind: str, name: str) -> Any:
    """rollflow's own class of this name; None if it has none."""
    found = getattr(importlib.import_module("rollflow.nodes"), name, None)
    return found if found is not None and kind in _BASES and _is_one(kind, found) else None


def _is_one(kind: str, thing: Any) -> bool:
    base = _BASES.get(kind)
    return callable(thing) if base is None else isinstance(thing, type) and issubclass(thing, base)


def _register(kind: str, name: str, thing: Thing) -> Thing:
    if not isinstance(name, str) or not name or name.startswith(_OWN):
        raise PolicyError(f"the name of a {kind} is {name!r}, expected text that does not begin with '{_OWN}'")
    if not _is_one(kind, thing):
        raise PolicyError(f"{kind} {name!r} is {thing!r}, expected a {kind if kind == 'function' else f'{kind} class'}")
    before = _registered[kind].get(name)
    if before is not None and before is not thing and _place(before) != _place(thing):
        raise PolicyError(f"{kind} {name!r} is {_place(before)} already, expected another name for {_place(thing)}")
    _registered[kind][name] = thing
    return thing


def _place(thing: Any) -> str:
    return f"{getattr(thing, '__module__', '')}.{getattr(thing, '__qualname__', repr(thing))}"


# Values


def to_plain(value: Any, where: str, arrays: ArraysByName) -> Any:
    """A value as JSON has it; its arrays go into `arrays` under the name `where`.

    Raises PolicyError, with the place, for a value without such a form.
    """
    if isinstance(value, Enum) and isinstance(value, int | str):
        value = value.value
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"$float": str(value)}
    if isinstance(value, np.ndarray | torch.Tensor | np.generic):
        return _stored(value, where, arrays)
    if type(value) is list:
        return [to_plain(each, f"{where}/{place}", arrays) for place, each in enumerate(value)]
    if type(value) is tuple:
        return {"$tuple": [to_plain(each, f"{where}/{place}", arrays) for place, each in enumerate(value)]}
    if isinstance(value, gym.Space):  # some of them are mappings
        return {"$space": described(value)}
    if isinstance(value, Mapping):
        if all(type(key) is str and not key.startswith("$") for key in value):
            return {key: to_plain(each, f"{where}/{key}", arrays) for key, each in value.items()}
        pairs = enumerate(value.items())
        return {"$dict": [[to_plain(each, f"{where}/{place}", arrays) for each in pair] for place, pair in pairs]}
    for mark, cls in _RECORDS.items():
        if isinstance(value, cls):
            record = {field.name: getattr(value, field.name) for field in fields(value)}
            return {mark: to_plain(record, where, arrays)}
    if callable(value):
        return {"$function": name_of("function", value, where)}
    raise PolicyError(
        f"{where}: {type(value).__name__} {shown(value)} can't be saved; expected numbers, text, arrays, spaces, and "
        "lists, tuples and dicts of them"
    )


def from_plain(value: Any, where: str, arrays: ArraysByName, allow: Collection[str] = ()) -> Any:
    """The value that `to_plain` was given. Every array that it uses is taken out of `arrays`.

    Raises PolicyError, with the place, for what is no such form, and for functions that are not allowed.
    """
    if isinstance(value, list):
        return [from_plain(each, f"{where}/{place}", arrays, allow) for place, each in enumerate(value)]
    if not isinstance(value, dict):
        return value
    marks = [key for key in value if key.startswith("$")]
    if not marks:
        return {key: from_plain(each, f"{where}/{key}", arrays, allow) for key, each in value.items()}
    mark = marks[0]
    if len(value) != 1 or mark not in _READERS:
        raise PolicyError(f"{where}: a value with {sorted(value)}, expected one of {', '.join(sorted(_READERS))}")
    with refused(f"{where}: no {mark} can be made of {str(value[mark])[:80]}"):
        made = _READERS[mark](value[mark], where, arrays, allow)
    return made


def packed(state: Any) -> bytes:
    """A state in one file of arrays, which has all else as JSON among them. Raises PolicyError as `to_plain` does."""
    arrays: ArraysByName = {}
    text = json.dumps(to_plain(state, "state", arrays)).encode()
    return array_bytes({**arrays, _PLAIN: np.frombuffer(text, np.uint8)})


def unpacked(kind: StoredKind, data: bytes, name: str) -> Any:
    """The state in a file that `packed` has made. Raises the kind's error, with the file's name, for what is none."""
    with refused(f"{name} can't be read", error=kind.error):
        arrays = kind.arrays_of(data, name)
        state = from_plain(json.loads(arrays.pop(_PLAIN).tobytes()), "state", arrays)
    return state


def _dicts_in(value: Any) -> Iterator[dict[str, Any]]:
    """Every dict in a value in plain form, outer ones first."""
    if isinstance(value, dict):
        yield value
    for part in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _dicts_in(part)


def _stored(value: Any, where: str, arrays: ArraysByName) -> Any:
    is_tensor = isinstance(value, torch.Tensor)
    if is_half := is_tensor and value.dtype is torch.bfloat16:  # which numpy lacks
        value = value.detach().view(torch.int16)
    array: NDArray[Any] = value.detach().cpu().numpy() if is_tensor else np.asarray(value)
    if array.dtype.name not in _DTYPES:
        raise PolicyError(
            f"{where}: {value.dtype} can't be saved, expected one of {', '.join(sorted(_DTYPES))}; a piece's get_state "
            "may give it in another form"
        )
    if where in arrays:
        raise PolicyError(f"{where}: two arrays have this name, expected keys that differ as text")
    arrays[where] = np.asarray(array, array.dtype.newbyteorder("="), order="C")
    if is_half:
        return {"$bfloat16": where}
    return {"$tensor" if is_tensor else "$scalar" if isinstance(value, np.generic) else "$array": where}


def _array(name: Any, where: str, arrays: ArraysByName) -> NDArray[Any]:
    if name not in arrays:
        raise PolicyError(f"{where}: there is no array {name!r}; the file has: {', '.join(sorted(arrays)) or 'none'}")
    return arrays.pop(name)


def _pairs(pairs: Any, where: str, arrays: ArraysByName, allow: Collection[str]) -> dict[Any, Any]:
    places = enumerate(pairs)
    return dict([from_plain(each, f"{where}/{place}", arrays, allow) for each in pair] for place, pair in places)


def _record(cls: Any, value: Any, where: str, arrays: ArraysByName, allow: Collection[str]) -> Any:
    return cls(**from_plain(value, where, arrays, allow))


_Reader = Callable[[Any, str, ArraysByName, Collection[str]], Any]
_READERS: dict[str, _Reader] = {
    "$float": lambda value, where, arrays, allow: _FLOATS[value],
    "$array": lambda value, where, arrays, allow: _array(value, where, arrays),
    "$tensor": lambda value, where, arrays, allow: torch.from_numpy(_array(value, where, arrays)),
    "$bfloat16": lambda value, where, arrays, allow: torch.from_numpy(_array(value, where, arrays)).view(
        torch.bfloat16
    ),
    "$scalar": lambda value, where, arrays, allow: _array(value, where, arrays)[()],
    "$tuple": lambda value, where, arrays, allow: tuple(from_plain(value, where, arrays, allow)),
    "$dict": _pairs,
    "$space": lambda value, where, arrays, allow: space_of(value, where),
    **{mark: partial(_record, cls) for mark, cls in _RECORDS.items()},
    "$function": lambda value, where, arrays, allow: named("function", value, allow, where),
}


def check_fields(record: Any, expected: Collection[str], where: str) -> None:
    """Raise PolicyError unless a record is a dict with just these fields, with those that are missing and unknown."""
    if not isinstance(record, Mapping):
        raise PolicyError(f"{where} is {str(record)[:80]!r}, expected a dict with {sorted(expected)}")
    missing, unknown = sorted(set(expected) - record.keys()), sorted(record.keys() - set(expected) - _FORMER)
    if missing or unknown:
        raise PolicyError(f"{where}: missing {missing}, unknown {unknown}; expected {sorted(expected)}")


def classes_of(record: Any) -> set[str]:
    """The Python modules that a record's names are imported from."""
    named = [each.get(key) for each in _dicts_in(record) for key in ("name", "$function")]
    return {name.partition(":")[0] for name in named if isinstance(name, str) and ":" in name}


# Pieces


def record_of_piece(piece: ConnectorV2, where: str, arrays: ArraysByName) -> dict[str, Any]:
    """A piece's record; arrays of its state go into `arrays`. Raises PolicyError for a piece that can't be saved."""
    cls = type(piece)
    record = {
        "name": name_of("connector", cls, where),
        "label": piece._name,
        "config": to_plain(_config_of(piece, where), f"{where}/config", arrays),
    }
    if isinstance(piece, ConnectorPipelineV2):
        named_pieces = zip(piece.names, piece, strict=True)
        record["pieces"] = [record_of_piece(each, f"{where}/{name}", arrays) for name, each in named_pieces]
    else:
        with located(where):
            state = piece.get_state()
        record["state"] = to_plain(state, f"{where}/state", arrays)
    return record


def piece_of(record: Any, where: str, arrays: ArraysByName, allow: Collection[str]) -> tuple[ConnectorV2, Any]:
    """A piece without its state, and the state that is to be set once the piece has its spaces.

    The state of a pipeline is the list of its pieces' (piece, state). Raises PolicyError for what is no such record.
    """
    is_pipeline = isinstance(record, Mapping) and "pieces" in record
    check_fields(record, _PIPELINE if is_pipeline else _PIECE, where)
    cls = named("connector", record["name"], allow, where)
    config = from_plain(record["config"], f"{where}/config", arrays, allow)
    if not isinstance(config, dict):
        raise PolicyError(f"{where}: config is {config!r}, expected a dict of arguments")
    state: Any = {} if is_pipeline else from_plain(record["state"], f"{where}/state", arrays, allow)
    if is_pipeline:
        if not isinstance(records := record["pieces"], list):
            raise PolicyError(f"{where} is {str(records)[:80]!r}, expected a list of pieces")
        state = [piece_of(each, f"{where}/{place}", arrays, allow) for place, each in enumerate(records)]
        config = {**config, "connectors": [piece for piece, _ in state]}
    with refused(f"{where}: {cls.__name__} can't be made of {sorted(config)}"):
        piece: ConnectorV2 = cls(**config)
    if record["label"] is not None:
        piece.name = str(record["label"])
    return piece, state


def set_states(pairs: list[tuple[ConnectorV2, Any]], where: str) -> None:
    """Set each piece's state. Raises PolicyError if a piece does not take it."""
    for piece, state in pairs:
        if isinstance(piece, ConnectorPipelineV2):
            set_states(state, f"{where}/{piece.name}")
            continue
        if not isinstance(state, dict):
            raise PolicyError(f"{where}/{piece.name}: the state is {str(state)[:80]!r}, expected a dict")
        if state:
            with refused(f"{where}/{piece.name}: the state can't be set"):
                piece.set_state(state)


def _config_of(piece: ConnectorV2, where: str) -> dict[str, Any]:
    """The arguments of a piece's constructor by name, without those of the device and without inner pieces."""
    args, kwargs = piece.get_ctor_args_and_kwargs()
    signature = inspect.signature(type(piece).__init__)
    try:
        bound = signature.bind(piece, *args, **kwargs)
    except TypeError as error:
        raise PolicyError(f"{where}: get_ctor_args_and_kwargs() does not fit the constructor: {error}") from None
    config: dict[str, Any] = {}
    for name, value in list(bound.arguments.items())[1:]:
        kind = signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_POSITIONAL:
            raise PolicyError(f"{where}: the constructor takes *{name}, expected arguments that have names")
        config |= value if kind is inspect.Parameter.VAR_KEYWORD else {name: value}
    if isinstance(piece, ConnectorPipelineV2):
        config.pop("connectors", None)
    if isinstance(piece, NumpyToTensor):
        config = {name: value for name, value in config.items() if name not in _OF_THE_DEVICE}
    return {name: value for name, value in config.items() if value is not None or not name.startswith("input_")}


# Modules


def record_of_module(module: Any, where: str, arrays: ArraysByName) -> dict[str, Any]:
    """A module's record, without its weights. Raises PolicyError for a module that can't be saved."""
    cls = type(module)
    if isinstance(module, RLModule):
        config = {"inference_only": module.inference_only, "model_config": module.model_config}
    elif callable(getattr(module, "get_config", None)):
        config = module.get_config()
    else:
        raise PolicyError(
            f"{where}: {cls.__name__} does not say how it is made; expected an RLModule, or a method get_config() that "
            f"gives the arguments of its constructor{_EXPORT}"
        )
    initial = module.get_initial_state() if hasattr(module, "get_initial_state") else {}
    return {
        "name": name_of("module", cls, where),
        "observation_space": described(module.observation_space),
        "action_space": described(module.action_space),
        "config": to_plain(config, f"{where}/config", arrays),
        "initial_state": to_plain(initial, f"{where}/initial_state", arrays),
    }


def module_of(
    record: Any, weights: dict[str, Any], where: str, arrays: ArraysByName, allow: Collection[str]
) -> tuple[Any, Any]:
    """A module with its weights, and the initial state that it is to have.

    record    with the `MODULE_FIELDS`, which the caller has checked

    Raises PolicyError for a module that can't be made of it.
    """
    cls = named("module", record["name"], allow, where)
    spaces = [space_of(record[name], f"{where}/{name}") for name in ("observation_space", "action_space")]
    config = from_plain(record["config"], f"{where}/config", arrays, allow)
    initial = from_plain(record["initial_state"], f"{where}/initial_state", arrays, allow)
    if not isinstance(config, dict):
        raise PolicyError(
            f"{where}: {record['name']} was saved without the arguments of its constructor, as a program that older "
            f"versions could run; expected a class that says how it is made{_BY_ONNX['module']}"
        )
    named_spaces = dict(zip(("observation_space", "action_space"), spaces, strict=True))
    arguments = {**named_spaces, **config} if issubclass(cls, RLModule) else config
    module = _made(cls, arguments, weights, where)
    for name, space in named_spaces.items():
        if getattr(module, name, None) is None:
            setattr(module, name, space)
    expected = module.state_dict()
    _check_weights(expected, weights, where)
    is_empty = any(isinstance(tensor, torch.Tensor) and tensor.is_meta for tensor in expected.values())
    module.load_state_dict(weights, assign=is_empty)
    return module, initial


def _check_weights(expected: Mapping[str, Any], weights: Mapping[str, Any], where: str) -> None:
    """Raise PolicyError if weights are not of a module's names, shapes and dtypes."""
    missing, unused = sorted(expected.keys() - weights.keys()), sorted(weights.keys() - expected.keys())
    if missing or unused:
        raise PolicyError(f"{where}: weights are missing: {missing}, and unused: {unused}")
    for name, tensor in expected.items():
        if (got := _kind(weights[name])) != (wanted := _kind(tensor)):
            raise PolicyError(f"{where}: weights '{name}' are {got}, expected {wanted}")


def _kind(value: Any) -> str:
    return f"{value.dtype}{list(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__


def _made(cls: type, arguments: dict[str, Any], weights: Mapping[str, Any], where: str) -> Any:
    """A module that is to get these weights.

    One of rollflow's own is refused if it would be larger than they are, and has no memory for weights before.
    """
    with refused(f"{where}: {cls.__name__} can't be made of {sorted(arguments)}"):
        if cls.__module__.startswith("rollflow."):
            with torch.device("meta"):
                module: torch.nn.Module = cls(**arguments)
            state = module.state_dict()
            _check_weights(state, weights, where)
            tensors = {name for name, _ in (*module.named_parameters(), *module.named_buffers())}
            if tensors == state.keys():
                return module
            # A tensor of two names would become two, and one that is in no state would stay empty.
        made = cls(**arguments)
    return made
