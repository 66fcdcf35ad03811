"""Node specifications: a node's kind, inlets and outlets, read from its signature; and the edges between them."""

import functools
import inspect
import re
import types
import typing
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from rollflow.stream.data.errors import GraphError
from rollflow.stream.graph.channel import Inlet, Outlet, Overflow
from rollflow.stream.graph.node import Background, Gate, node_methods

Where = Literal["inline", "thread"]


@dataclass(frozen=True, slots=True)
class NodeSpec:
    """A node and its ports.

    where              place that was asked for; None: `Graph.place_of` decides
    inlets, outlets    name -> type of the items
    has_fields         whether a synchronous node returns a NamedTuple, one field per outlet
    methods            optional methods of the node by name, looked up once
    run                asynchronous function of the inlets and outlets; None: the node is called with each item
    """

    name: str
    node: Any
    is_async: bool
    where: Where | None
    inlets: Mapping[str, Any]
    outlets: Mapping[str, Any]
    has_fields: bool
    methods: Mapping[str, Callable[..., Any]]
    run: Callable[..., Awaitable[None]] | None = None

    @property
    def background(self) -> Background | None:
        """The node, if it works in the background."""
        return self.node if "completed" in self.methods else None


def read_node(name: str, node: Any, where: Where | None = None) -> NodeSpec:
    """Read a node's signature. Raises GraphError for an object that is no node.

    A synchronous node is a callable of one parameter, its inlet. Its return annotation gives its outlets: the fields of
    a NamedTuple, none for None, else one called `out`. An `async def` of one item is the same, and awaited. Any other
    asynchronous node is an `async def`, or has a method `async def run`, with parameters annotated `Inlet[...]` and
    `Outlet[...]`.

    A synchronous node may have an attribute `where`, "inline" or "thread". Without it a sink behind edges that drop is
    called in a thread, and any other node inline. What else a node may have is in the protocols of `node.py`: `Source`,
    `Processor`, `Sink`, `Background`, `Observable`.
    """
    if isinstance(node, type) and any({"__call__", "run"} & vars(each).keys() for each in node.__mro__):
        raise GraphError(f"node '{name}' is the class {node.__name__}, expected {node.__name__}(…)").see("node")
    run = node if inspect.iscoroutinefunction(node) else getattr(node, "run", None)
    if inspect.iscoroutinefunction(run):
        if where == "thread":
            raise GraphError(f"node '{name}' is asynchronous and can't be placed in a thread; expected where='inline'")
        if _takes_items(node):
            return replace(_sync_spec(name, node, "inline"), is_async=True)
        return _async_spec(name, node, run)
    if not callable(node) or _gives_no_items(_annotated(node)):
        what = f"{node!r}, whose call is asynchronous" if callable(node) else repr(node)
        raise GraphError(
            f"node '{name}' is {what}, expected a callable of one parameter that returns an item, an object with "
            "'async def run', or a Graph"
        ).see("node")
    return _sync_spec(name, node, where)


def outlet_method(end: Any) -> tuple[Any, str]:
    """The node and outlet that `end` stands for: a node's method without an item parameter names its outlet."""
    if not inspect.ismethod(end):
        return end, ""
    kinds = {parameter.kind for parameter in inspect.signature(end).parameters.values()}
    return (end.__self__, end.__name__) if kinds <= {inspect.Parameter.KEYWORD_ONLY} else (end, "")


def is_same_method(one: Any, other: Any) -> bool:
    """True if both are the same method of the same object."""
    return inspect.ismethod(one) and inspect.ismethod(other) and one == other


def own_name(node: Any) -> str:
    """The default name of a node: its class's or function's name in snake case."""
    name: str = getattr(node, "__name__", type(node).__name__)
    if not name.isidentifier():
        raise GraphError(f"{node!r} has no name of its own, expected it to be added under one: graph.add(name=...)")
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()


def meet(sent: Any, taken: Any) -> bool:
    """True if items of the type `sent` may go where `taken` is expected, or if that can't be decided."""
    if sent is Any or taken is Any or isinstance(sent, typing.TypeVar) or isinstance(taken, typing.TypeVar):
        return True
    for ours in _alternatives(sent):
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


_ITEM = "; or, for an async def that is called with one item after the other, one parameter with the item's type"


def _takes_items(node: Any) -> bool:
    """True for an `async def` function of one parameter that is annotated as an item."""
    if not inspect.iscoroutinefunction(node):
        return False
    needed = [each for each in inspect.signature(node).parameters.values() if each.default is each.empty]
    hint = _hints(_annotated(node)).get(needed[0].name) if len(needed) == 1 else None
    return hint is not None and (typing.get_origin(hint) or hint) not in (Inlet, Outlet)


def _async_spec(name: str, node: Any, run: Callable[..., Any]) -> NodeSpec:
    inlets: dict[str, Any] = {}
    outlets: dict[str, Any] = {}
    hints = _hints(_annotated(run))
    for parameter in inspect.signature(run).parameters.values():
        hint = hints.get(parameter.name, Any)
        end = typing.get_origin(hint) or hint
        item = next(iter(typing.get_args(hint)), Any)
        if end is Inlet:
            inlets[parameter.name] = item
        elif end is Outlet:
            outlets[parameter.name] = item
        elif parameter.default is inspect.Parameter.empty:
            has = f"is annotated {type_name(hint)}" if parameter.name in hints else "has no annotation that can be read"
            raise GraphError(
                f"node '{name}': parameter '{parameter.name}' of {run.__name__} {has}, expected Inlet[...] "
                f"or Outlet[...]{_ITEM if run is node else ''}"
            )
    methods = node_methods(name, node)
    return NodeSpec(name, node, True, "inline", inlets, outlets, False, methods, run)


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
    result = hints.get("return", Any)
    if result is not type(None):
        result = _without_none(result)
    has_fields = isinstance(result, type) and issubclass(result, tuple) and hasattr(result, "_fields")
    if has_fields:
        fields = _hints(result)
        outlets = {field: _without_none(fields.get(field, Any)) for field in result._fields}
    elif result is type(None):
        outlets = {}
    else:
        outlets = {"out": result}
    placed: Any = getattr(node, "where", None) if where is None else where
    if placed not in (None, "inline", "thread"):
        raise GraphError(f"node '{name}': where is {placed!r}, expected 'inline' or 'thread'")
    inlets = {parameters[0].name: hints.get(parameters[0].name, Any)}
    return NodeSpec(name, node, False, placed, inlets, outlets, has_fields, node_methods(name, node))


def _gives_no_items(call: Any) -> bool:
    """True if a call returns a coroutine or an asynchronous generator rather than an item."""
    return inspect.iscoroutinefunction(call) or inspect.isasyncgenfunction(call)


def _annotated(call: Any) -> Any:
    """The function or method that has a callable's annotations."""
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


def gives_nothing(spec: NodeSpec) -> str:
    """Advice for the outlet of a callable without a return annotation; "" for any other node."""
    is_stated = spec.run is not None or spec.has_fields or dict(spec.outlets) != {"out": Any}
    if is_stated:
        return ""
    how = "def __call__(self, item) -> None" if _annotated(spec.node) is not spec.node else "def sink(item) -> None"
    if spec.is_async:
        how = "async def sink(item: …) -> None"
    return f"; a callable that gives nothing says so by its annotation: {how}"


Port = tuple[str, str]  # the name of a node, and of one of its inlets or outlets


@dataclass(frozen=True, slots=True)
class Edge:
    """An edge from a node's outlet to another's inlet, or to an output of the graph."""

    source: Port
    target: Port
    capacity: int | None
    overflow: Overflow = "block"
    feedback: bool = False
    gate: Gate | None = None
    is_output: bool = False  # the target is the graph's own name and that of one of its outputs

    @property
    def name(self) -> str:
        """`a.out → b.items`."""
        return f"{'.'.join(self.source)} → {'.'.join(self.target)}"


def check_room(name: str, capacity: int | None, overflow: str, *, feedback: bool) -> None:
    """Raise GraphError if an edge can't have this capacity and overflow policy."""
    if capacity is not None and capacity < 1:
        raise GraphError(f"{name}: capacity is {capacity}, expected at least 1, or None")
    if overflow not in get_args(Overflow):
        raise GraphError(f"{name}: overflow is {overflow!r}, expected 'block', 'drop_oldest' or 'latest'")
    if overflow != "block" and (feedback or capacity is None):
        kind = "a feedback edge" if feedback else "an edge without a capacity"
        raise GraphError(f"{name}: {kind} can't have overflow='{overflow}', expected 'block'")


def within(prefix: str, port: Port) -> Port:
    """The port with `prefix` before its node's name: a port of a part of a composite node."""
    return prefix + port[0], port[1]


def reached(names: Iterable[str], ways: Iterable[tuple[str, str]]) -> set[str]:
    """The names at the ends of paths from `names`; one of these itself only if a path leads back to it.

    ways    pairs (from, to)
    """
    ways, waiting = list(ways), list(names)
    found: set[str] = set()
    while waiting:
        name = waiting.pop()
        more = {target for source, target in ways if source == name} - found
        found |= more
        waiting += more
    return found
