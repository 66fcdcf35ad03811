"""Arguments and states as JSON values, with their arrays beside them, and back; no pickle anywhere."""

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from numpy.typing import NDArray

from rollflow.nodes.connectors.alpha.connector import Connector, ConnectorContext, get_connector
from rollflow.nodes.connectors.module_to_env.exploration import Linear
from rollflow.nodes.modules.default_module import DefaultModelConfig
from rollflow.nodes.policies.registry import name_of, named
from rollflow.nodes.policies.space_text import described, space_of
from rollflow.stream.data.errors import PolicyError, located, shown

ArraysByName = dict[str, NDArray[Any]]

_OF_ARRAYS = ("$array", "$tensor", "$scalar")
_FLOATS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_DTYPES = {"bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"} | {
    "float16",
    "float32",
    "float64",
}


def to_plain(value: Any, where: str, arrays: ArraysByName) -> Any:
    """A value as JSON has it; its arrays go into `arrays` under the name `where`.

    Raises PolicyError, with the place, for a value without such a form.
    """
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
    if isinstance(value, Connector):
        return {"$connector": _connector_record(value, where, arrays)}
    if isinstance(value, Linear):
        return {"$linear": to_plain({field.name: getattr(value, field.name) for field in fields(value)}, where, arrays)}
    if isinstance(value, DefaultModelConfig):
        config = {field.name: getattr(value, field.name) for field in fields(value)}
        return {"$model_config": to_plain(config, where, arrays)}
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
    try:
        return _READERS[mark](value[mark], where, arrays, allow)
    except PolicyError:
        raise
    except Exception as error:
        raise PolicyError(f"{where}: no {mark} can be made of {str(value[mark])[:80]}: {error}") from None


def array_names(value: Any) -> list[str]:
    """The names of the arrays that a value in plain form uses, without anything of it being made."""
    if isinstance(value, list):
        return [name for each in value for name in array_names(each)]
    if not isinstance(value, dict):
        return []
    names = [each for mark, each in value.items() if mark in _OF_ARRAYS and isinstance(each, str)]
    return names + [name for each in value.values() for name in array_names(each)]


def _stored(value: Any, where: str, arrays: ArraysByName) -> Any:
    is_tensor = isinstance(value, torch.Tensor)
    if is_tensor and value.dtype is torch.bfloat16:
        array: NDArray[Any] = np.empty(0, object)
    else:
        array = value.detach().cpu().numpy() if is_tensor else np.asarray(value)
    if array.dtype.name not in _DTYPES:
        raise PolicyError(
            f"{where}: {value.dtype} can't be saved, expected one of {', '.join(sorted(_DTYPES))}; a piece's get_state "
            "may give it in another form"
        )
    if where in arrays:
        raise PolicyError(f"{where}: two arrays have this name, expected keys that differ as text")
    arrays[where] = np.array(array, array.dtype.newbyteorder("="), order="C")
    return {"$tensor" if is_tensor else "$scalar" if isinstance(value, np.generic) else "$array": where}


def _array(name: Any, where: str, arrays: ArraysByName) -> NDArray[Any]:
    if name not in arrays:
        raise PolicyError(f"{where}: there is no array {name!r}; the file has: {', '.join(sorted(arrays)) or 'none'}")
    return arrays.pop(name)


_CONTEXT = ("config", "initial_states", "observation_space", "action_space", "is_policy_recurrent")


def _connector_record(connector: Connector, where: str, arrays: ArraysByName) -> dict[str, Any]:
    """An Alpha connector by the name that it is registered by, its params, and the context that it was made with."""
    with located(where):
        name, params = connector.to_state()
    ctx = connector.ctx or ConnectorContext()
    if ctx.view_requirements is not None:
        raise PolicyError(f"{where}: the context of {connector!r} has view_requirements, which can't be saved")
    facts = {each: getattr(ctx, each) for each in _CONTEXT}
    facts["initial_states"], facts["config"] = list(ctx.initial_states), dict(ctx.config)
    context = to_plain(facts, f"{where}/context", arrays)
    return {"name": name, "params": to_plain(params, f"{where}/params", arrays), "context": context}


def _connector(record: Any, where: str, arrays: ArraysByName, allow: Collection[str]) -> Any:
    if not isinstance(record, dict) or record.keys() != {"name", "params", "context"}:
        raise PolicyError(f"{where}: a connector is {str(record)[:80]!r}, expected name, params and context")
    facts = from_plain(record["context"], f"{where}/context", arrays, allow)
    if not isinstance(facts, dict) or facts.keys() != set(_CONTEXT) or not isinstance(record["name"], str):
        raise PolicyError(f"{where}: a connector's context is {str(facts)[:80]!r}, expected {', '.join(_CONTEXT)}")
    params = from_plain(record["params"], f"{where}/params", arrays, allow)
    return get_connector(record["name"], ConnectorContext(**facts), params)


def _pairs(pairs: Any, where: str, arrays: ArraysByName, allow: Collection[str]) -> dict[Any, Any]:
    places = enumerate(pairs)
    return dict([from_plain(each, f"{where}/{place}", arrays, allow) for each in pair] for place, pair in places)


_Reader = Callable[[Any, str, ArraysByName, Collection[str]], Any]
_READERS: dict[str, _Reader] = {
    "$float": lambda value, where, arrays, allow: _FLOATS[value],
    "$array": lambda value, where, arrays, allow: _array(value, where, arrays),
    "$tensor": lambda value, where, arrays, allow: torch.from_numpy(_array(value, where, arrays)),
    "$scalar": lambda value, where, arrays, allow: _array(value, where, arrays)[()],
    "$tuple": lambda value, where, arrays, allow: tuple(from_plain(value, where, arrays, allow)),
    "$dict": _pairs,
    "$space": lambda value, where, arrays, allow: space_of(value, where),
    "$connector": _connector,
    "$linear": lambda value, where, arrays, allow: Linear(**from_plain(value, where, arrays, allow)),
    "$model_config": lambda value, where, arrays, allow: DefaultModelConfig(**from_plain(value, where, arrays, allow)),
    "$function": lambda value, where, arrays, allow: named("function", value, allow, where),
}
