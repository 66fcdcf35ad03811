"""Registry of the classes and functions that a saved policy may name; nothing else is run when it is loaded."""

import importlib
from collections.abc import Callable, Collection
from typing import Any

import torch

from rollflow.nodes.connectors.connector_v2 import ConnectorV2
from rollflow.stream.data.errors import PolicyError

_OWN = "rollflow."
_ALPHA = "rollflow.nodes.connectors.alpha.pieces"
_ELSEWHERE = {
    "ActionConnectorPiece": _ALPHA,
    "AgentConnectorPiece": _ALPHA,
}  # rollflow's own classes that users don't name
_registered: dict[str, dict[str, Any]] = {"connector": {}, "module": {}, "function": {}}
_BASES: dict[str, type] = {"connector": ConnectorV2, "module": torch.nn.Module}


def register_connector(name: str, cls: type[ConnectorV2]) -> type[ConnectorV2]:
    """Give a class of connector pieces the name that saved policies have for it; the class.

    Raises PolicyError for a name that is taken, and for anything but such a class.
    """
    _register("connector", name, cls)
    return cls


def register_module(name: str, cls: type) -> type:
    """Give a class of modules the name that saved policies have for it; the class. Raises PolicyError likewise."""
    _register("module", name, cls)
    return cls


def register_function(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Give a function, which may be a lambda, the name that saved policies have for it; the function.

    Pieces take functions as arguments, such as `LambdaConnector`. Raises PolicyError likewise.
    """
    _register("function", name, function)
    return function


def name_of(kind: str, thing: Any, where: str, *, found_again: bool = True) -> str:
    """The name that a policy saves a class or function under.

        kind           "connector", "module" or "function"
        found_again    False: it need not be imported, since the policy acts without it

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
    if found_again and ("<" in qualified or module == "__main__"):
        raise PolicyError(
            f"{where}: {module}.{qualified} can't be imported by another program; {remedy}, or a {kind} on the top "
            "level of a module that can be imported, or save_policy(path, program=True), which needs no class to act"
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
    if not colon:
        raise PolicyError(
            f"{where}: there is no {kind} of the name {name!r}; expected register_{kind}({name!r}, …) before the "
            "policy is loaded"
        )
    if not any(module == each or module.startswith(f"{each}.") for each in allow):
        raise PolicyError(
            f"{where}: {kind} {name!r} is not allowed to be imported; expected allow=[{module.split('.')[0]!r}], or "
            f"--allow {module.split('.')[0]}, where you trust that package, or register_{kind}({name!r}, …)"
        )
    thing: Any
    try:
        thing = importlib.import_module(module)
        for part in qualified.split("."):
            thing = getattr(thing, part)
    except (ImportError, AttributeError) as error:
        raise PolicyError(f"{where}: {kind} {name!r} can't be imported: {error}") from None
    if not _is_one(kind, thing):
        raise PolicyError(f"{where}: {name!r} is no {kind}, expected one")
    return thing


def is_known(kind: str, name: Any, allow: Collection[str]) -> bool:
    """True if `named` gives the class or function of a name."""
    try:
        named(kind, name, allow, kind)
    except PolicyError:
        return False
    return True


def _own(kind: str, name: str) -> Any:
    """rollflow's own class of this name; None where it has none."""
    nodes = importlib.import_module(_ELSEWHERE.get(name, "rollflow.nodes"))
    found = getattr(nodes, name, None)
    return found if found is not None and kind in _BASES and _is_one(kind, found) else None


def _is_one(kind: str, thing: Any) -> bool:
    base = _BASES.get(kind)
    return callable(thing) if base is None else isinstance(thing, type) and issubclass(thing, base)


def _register(kind: str, name: str, thing: Any) -> None:
    if not isinstance(name, str) or not name or name.startswith(_OWN):
        raise PolicyError(f"the name of a {kind} is {name!r}, expected text that does not begin with '{_OWN}'")
    if not _is_one(kind, thing):
        raise PolicyError(f"{kind} {name!r} is {thing!r}, expected a {kind if kind == 'function' else f'{kind} class'}")
    before = _registered[kind].get(name)
    if before is not None and before is not thing and _place(before) != _place(thing):
        raise PolicyError(f"{kind} {name!r} is {_place(before)} already, expected another name for {_place(thing)}")
    _registered[kind][name] = thing


def _place(thing: Any) -> str:
    return f"{getattr(thing, '__module__', '')}.{getattr(thing, '__qualname__', repr(thing))}"
