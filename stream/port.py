"""What a node is, read off its signature once: its kind, its inlets, its outlets."""

import functools
import inspect
import re
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from rollflow.stream.channel import Inlet, Outlet
from rollflow.stream.errors import GraphError

Where = Literal["inline", "thread"]


@dataclass(frozen=True, slots=True)
class NodeSpec:
    """A node and its ports: name -> type of the items."""

    name: str
    node: Any
    is_async: bool
    where: Where
    inlets: Mapping[str, Any]
    outlets: Mapping[str, Any]
    has_fields: bool  # a synchronous node gives a NamedTuple, one field per outlet
    generator: str | None = None  # the parameter of an asynchronous node that takes a random generator

    @property
    def starts(self) -> bool:
        """Whether items can come from this node before any has come to it."""
        return self.is_async or not self.inlets or hasattr(self.node, "start")


def read_node(name: str, node: Any, where: Where | None = None) -> NodeSpec:
    """Read a node's signature.

    A synchronous node is a callable of one parameter, its inlet; what it is annotated to return are its outlets: the
    fields of a NamedTuple, nothing for None, else one called `out`. An asynchronous one is an `async def`, or has a
    method `async def run`, with parameters annotated `Inlet[...]` and `Outlet[...]`; one annotated
    `numpy.random.Generator` is given the node's own, which follows from the run's seed and the node's name.

    A synchronous node may have, besides: `start()`, whose items set out before any has come; `finish()`, whose items
    come after the last; `done`, true when a source of a ring wants no more; `where`, "inline" or "thread". Any node
    may have `close()`, called once when the run is over, in an event loop after `take_failure(error)` where a node has
    raised, and `describe()`, shown by `Graph.explain`; and
    `take_sources(sources, *, drops, is_all)`, told the nodes that lead to it, as `Graph.sources_of` gives them, and
    whether something may be dropped between them, whenever an edge is drawn before it, and, with `is_all`, when the
    graph is validated: it gives those of them that are to be taken apart by `graph()` once more, as what it has told
    them changes how they are.

    Raises GraphError for anything else.
    """
    run = node if inspect.iscoroutinefunction(node) else getattr(node, "run", None)
    if inspect.iscoroutinefunction(run):
        if where == "thread":
            raise GraphError(f"node '{name}' is asynchronous and can't be placed in a thread; expected where='inline'")
        return _async_spec(name, node, run)
    if not callable(node) or _gives_no_items(_annotated(node)):
        raise GraphError(
            f"node '{name}' is {node!r}, expected a callable of one parameter, an object with 'async def run', "
            "or a Graph"
        )
    return _sync_spec(name, node, where)


def outlet_method(end: Any) -> tuple[Any, str]:
    """A node, and the outlet that is meant by a method of its: one without parameters, so that it is no node itself."""
    if inspect.ismethod(end) and not inspect.signature(end).parameters:
        return end.__self__, end.__name__
    return end, ""


def is_same_method(one: Any, other: Any) -> bool:
    """Whether both are the same method of the same object."""
    return inspect.ismethod(one) and inspect.ismethod(other) and one == other


def own_name(node: Any) -> str:
    """What a node is called that is given no name: like its class or function, in lower case."""
    name: str = getattr(node, "__name__", type(node).__name__)
    if not name.isidentifier():
        raise GraphError(f"{node!r} has no name of its own, expected it to be added under one: graph.add(name=...)")
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()


def meet(given: Any, taken: Any) -> bool:
    """Whether items of the type `given` may go where `taken` is expected; True where that can't be told."""
    if given is Any or taken is Any or isinstance(given, typing.TypeVar) or isinstance(taken, typing.TypeVar):
        return True
    for ours in _alternatives(given):
        for theirs in _alternatives(taken):
            ours_class, theirs_class = typing.get_origin(ours) or ours, typing.get_origin(theirs) or theirs
            if not (isinstance(ours_class, type) and isinstance(theirs_class, type)):
                return True
            if issubclass(ours_class, theirs_class) or (ours_class, theirs_class) == (int, float):
                return True
    return False


def type_name(port_type: Any) -> str:
    """A type as it is written in code."""
    return port_type.__name__ if isinstance(port_type, type) else str(port_type).replace("typing.", "")


def _async_spec(name: str, node: Any, run: Callable[..., Any]) -> NodeSpec:
    inlets: dict[str, Any] = {}
    outlets: dict[str, Any] = {}
    generator = None
    hints = _hints(_annotated(run))
    for parameter in inspect.signature(run).parameters.values():
        hint = hints.get(parameter.name, Any)
        end = typing.get_origin(hint) or hint
        item = next(iter(typing.get_args(hint)), Any)
        if end is Inlet:
            inlets[parameter.name] = item
        elif end is Outlet:
            outlets[parameter.name] = item
        elif end is np.random.Generator:
            generator = parameter.name
        elif parameter.default is inspect.Parameter.empty:
            raise GraphError(
                f"node '{name}': parameter '{parameter.name}' of run is annotated {type_name(hint)}, expected "
                "Inlet[...], Outlet[...] or numpy.random.Generator"
            )
    return NodeSpec(name, node, True, "inline", inlets, outlets, False, generator)


def _sync_spec(name: str, node: Any, where: Where | None) -> NodeSpec:
    try:
        signature = inspect.signature(node)
    except ValueError:
        raise GraphError(
            f"node '{name}': {node!r} has no signature to be read, expected a callable of one parameter; wrap it in a "
            "function"
        ) from None
    parameters = [
        parameter
        for parameter in signature.parameters.values()
        if parameter.default is inspect.Parameter.empty
        and parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    if len(parameters) != 1:
        raise GraphError(
            f"node '{name}' is called with {len(parameters)} items, expected a callable of one parameter: its inlet"
        )
    hints = _hints(_annotated(node))
    given = hints.get("return", Any)
    if given is not type(None):
        given = _without_none(given)
    has_fields = isinstance(given, type) and issubclass(given, tuple) and hasattr(given, "_fields")
    if has_fields:
        fields = _hints(given)
        outlets = {field: _without_none(fields.get(field, Any)) for field in given._fields}
    elif given is type(None):
        outlets = {}
    else:
        outlets = {"out": given}
    placed: Any = getattr(node, "where", "inline") if where is None else where
    if placed not in ("inline", "thread"):
        raise GraphError(f"node '{name}': where is {placed!r}, expected 'inline' or 'thread'")
    inlets = {parameters[0].name: hints.get(parameters[0].name, Any)}
    return NodeSpec(name, node, False, placed, inlets, outlets, has_fields)


def _gives_no_items(call: Any) -> bool:
    """Whether what comes of a call is a coroutine or an asynchronous generator, and no item."""
    return inspect.iscoroutinefunction(call) or inspect.isasyncgenfunction(call)


def _annotated(call: Any) -> Any:
    """What bears a callable's annotations."""
    while isinstance(call, functools.partial):
        call = call.func
    return call if inspect.isroutine(call) else type(call).__call__


def _hints(annotated: Any) -> dict[str, Any]:
    try:
        return typing.get_type_hints(annotated)
    except (NameError, TypeError):  # a name that only the type checker sees: the port takes anything
        return {}


def _alternatives(port_type: Any) -> tuple[Any, ...]:
    if typing.get_origin(port_type) in (typing.Union, types.UnionType):
        return typing.get_args(port_type)
    return (port_type,)


def _without_none(port_type: Any) -> Any:
    rest = [each for each in _alternatives(port_type) if each is not type(None)]
    return rest[0] if len(rest) == 1 else typing.Union[tuple(rest)] if rest else Any  # noqa: UP007
