"""Records of connector pieces and modules: class by name, version, constructor arguments and state, and back."""

import inspect
from collections.abc import Collection, Mapping
from typing import Any

import torch

from rollflow.nodes.connectors.common.tensors import NumpyToTensor
from rollflow.nodes.connectors.connector_v2 import ConnectorV2
from rollflow.nodes.connectors.pipelines.connector_pipeline_v2 import ConnectorPipelineV2
from rollflow.nodes.modules.rl_module import RLModule
from rollflow.nodes.policies.plain_values import ArraysByName, from_plain, to_plain
from rollflow.nodes.policies.registry import name_of, named
from rollflow.nodes.policies.space_text import described, space_of
from rollflow.stream.data.errors import PolicyError, located

_OF_THE_DEVICE = {"device", "pin_memory"}  # arguments of `NumpyToTensor` that a file must not fix
_PIECE = {"name", "version", "label", "config", "state"}
_PIPELINE = {"name", "version", "label", "config", "pieces"}
MODULE_FIELDS = {"name", "version", "observation_space", "action_space", "config", "initial_state"}


def check_fields(record: Any, expected: Collection[str], where: str) -> None:
    """Raise PolicyError unless a record is a dict with just these fields, with those that are missing and unknown."""
    if not isinstance(record, Mapping):
        raise PolicyError(f"{where} is {str(record)[:80]!r}, expected a dict with {sorted(expected)}")
    missing, unknown = sorted(set(expected) - record.keys()), sorted(record.keys() - set(expected))
    if missing or unknown:
        raise PolicyError(f"{where}: missing {missing}, unknown {unknown}; expected {sorted(expected)}")


def classes_of(record: Any) -> set[str]:
    """The Python modules that a record's names are imported from."""
    if isinstance(record, list):
        return {name for each in record for name in classes_of(each)}
    if not isinstance(record, dict):
        return set()
    found = {name for each in record.values() for name in classes_of(each)}
    names = [record[key] for key in ("name", "$function") if isinstance(record.get(key), str)]
    return found | {name.partition(":")[0] for name in names if ":" in name}


# Pieces


def record_of_piece(piece: ConnectorV2, where: str, arrays: ArraysByName) -> dict[str, Any]:
    """A piece's record; arrays of its state go into `arrays`. Raises PolicyError for a piece that can't be saved."""
    cls = type(piece)
    record = {
        "name": name_of("connector", cls, where),
        "version": version_of(cls, where),
        "label": piece._name,
        "config": to_plain(_config_of(piece, where), f"{where}/config", arrays),
    }
    if isinstance(piece, ConnectorPipelineV2):
        record["pieces"] = records_of_pieces(piece, where, arrays)
    else:
        with located(where):
            state = piece.get_state()
        record["state"] = to_plain(state, f"{where}/state", arrays)
    return record


def records_of_pieces(pipeline: ConnectorPipelineV2, where: str, arrays: ArraysByName) -> list[dict[str, Any]]:
    """The records of all pieces of a pipeline."""
    names = zip(pipeline.names, pipeline, strict=True)
    return [record_of_piece(piece, f"{where}/{name}", arrays) for name, piece in names]


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
    config, state = upgraded(cls, config, state, record["version"], where)
    inner = pieces_of_records(record["pieces"], where, arrays, allow) if is_pipeline else []
    if is_pipeline:
        config, state = {**config, "connectors": [piece for piece, _ in inner]}, inner
    try:
        piece: ConnectorV2 = cls(**config)
    except Exception as error:
        raise PolicyError(f"{where}: {cls.__name__} can't be made of {sorted(config)}: {error}") from error
    if record["label"] is not None:
        piece.name = str(record["label"])
    return piece, state


def pieces_of_records(
    records: Any, where: str, arrays: ArraysByName, allow: Collection[str]
) -> list[tuple[ConnectorV2, Any]]:
    """(piece, state) of each record. Raises PolicyError for what is no list of records."""
    if not isinstance(records, list):
        raise PolicyError(f"{where} is {str(records)[:80]!r}, expected a list of pieces")
    return [piece_of(record, f"{where}/{place}", arrays, allow) for place, record in enumerate(records)]


def set_states(pairs: list[tuple[ConnectorV2, Any]], where: str) -> None:
    """Set each piece's state. Raises PolicyError where a piece does not take it."""
    for piece, state in pairs:
        if isinstance(piece, ConnectorPipelineV2):
            set_states(state, f"{where}/{piece.name}")
            continue
        if not isinstance(state, dict):
            raise PolicyError(f"{where}/{piece.name}: the state is {str(state)[:80]!r}, expected a dict")
        if state:
            try:
                piece.set_state(state)
            except Exception as error:
                raise PolicyError(f"{where}/{piece.name}: the state can't be set: {error}") from error


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


def record_of_module(module: Any, where: str, arrays: ArraysByName, *, has_program: bool) -> dict[str, Any]:
    """A module's record, without its weights. Raises PolicyError for a module that can't be saved.

    has_program    True: its class need not be found again, nor say how it is made
    """
    cls = type(module)
    if isinstance(module, RLModule):
        config = {"inference_only": module.inference_only, "model_config": module.model_config}
    elif callable(getattr(module, "get_config", None)):
        config = module.get_config()
    elif has_program:
        config = None
    else:
        raise PolicyError(
            f"{where}: {cls.__name__} does not say how it is made; expected an RLModule, or a method get_config() that "
            "gives the arguments of its constructor, or program=True"
        )
    initial = module.get_initial_state() if hasattr(module, "get_initial_state") else {}
    return {
        "name": name_of("module", cls, where, found_again=not has_program),
        "version": version_of(cls, where),
        "observation_space": described(module.observation_space),
        "action_space": described(module.action_space),
        "config": to_plain(config, f"{where}/config", arrays),
        "initial_state": to_plain(initial, f"{where}/initial_state", arrays),
    }


def module_of(
    record: Any, weights: dict[str, Any], where: str, arrays: ArraysByName, allow: Collection[str]
) -> tuple[Any, Any]:
    """A module with its weights, and the initial state that it is to have. Raises PolicyError for no such record."""
    check_fields(record, MODULE_FIELDS, where)
    cls = named("module", record["name"], allow, where)
    spaces = [space_of(record[name], f"{where}/{name}") for name in ("observation_space", "action_space")]
    config = from_plain(record["config"], f"{where}/config", arrays, allow)
    initial = from_plain(record["initial_state"], f"{where}/initial_state", arrays, allow)
    config, weights = upgraded(cls, config, weights, record["version"], where)
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
    """Raise PolicyError where weights are not of a module's names, shapes and dtypes."""
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

    One of rollflow's own is refused where it would be larger than they are, and has no memory for weights before.
    """
    try:
        if not cls.__module__.startswith("rollflow."):
            return cls(**arguments)
        with torch.device("meta"):
            module: torch.nn.Module = cls(**arguments)
        state = module.state_dict()
        _check_weights(state, weights, where)
        tensors = {name for name, _ in (*module.named_parameters(), *module.named_buffers())}
        # A tensor of two names would become two, and one that is in no state would stay empty.
        return module if tensors == state.keys() else cls(**arguments)
    except PolicyError:
        raise
    except Exception as error:
        raise PolicyError(f"{where}: {cls.__name__} can't be made of {sorted(arguments)}: {error}") from error


# Versions


def version_of(cls: type, where: str) -> int:
    """The version of a class's arguments and state: its attribute `version`, or 1."""
    version = getattr(cls, "version", 1)
    if type(version) is not int or version < 1:
        raise PolicyError(f"{where}: {cls.__name__}.version is {version!r}, expected a whole number, 1 or more")
    return version


def upgraded(cls: Any, config: Any, state: Any, version: Any, where: str) -> tuple[Any, Any]:
    """Arguments and state as today's class takes them. Raises PolicyError for a version that it knows nothing of."""
    today = version_of(cls, where)
    if type(version) is not int or version < 1:
        raise PolicyError(f"{where}: version is {version!r}, expected a whole number, 1 or more")
    if version > today:
        raise PolicyError(
            f"{where}: {cls.__name__} was saved in version {version}, and this program has version {today}; expected a "
            "newer package"
        )
    if version == today:
        return config, state
    upgrade = getattr(cls, "upgrade", None)
    if not callable(upgrade):
        raise PolicyError(
            f"{where}: {cls.__name__} was saved in version {version}, today's is {today}; expected a classmethod "
            "upgrade(config, state, from_version) that gives today's config and state"
        )
    new_config, new_state = upgrade(config, state, version)
    return new_config, new_state
