"""Nodes and gates of a graph: the protocols of what they may have, looked up once; errors and closing of nodes.

A node needs no base class. `node_methods` looks its optional methods up when it is added to a graph, and checks them
against the protocols below. A class that inherits from a protocol has the defaults; any other class may leave them out.
"""

import inspect
import math
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol

import anyio

from rollflow.stream.data.errors import GraphError

if TYPE_CHECKING:
    from rollflow.stream.graph.graph import Graph
    from rollflow.stream.graph.meter import CallTimes, NodeMeter
    from rollflow.stream.graph.report import Report
    from rollflow.stream.observe.trace import FragmentTrace
    from rollflow.stream.observe.waits import Sign, Wait


class Source(Protocol):
    """A node that sends items before any has come to it."""

    def start(self) -> Iterable[Any] | None:
        """The items that set out first."""
        return None

    @property
    def done(self) -> bool:
        """True when a source of a ring wants no more items."""
        return False

    def take_drain(self) -> None:
        """Take note that the run is drained: no more items are asked for."""


class Processor(Protocol):
    """A node that makes other items of those that come to it."""

    def finish(self) -> Iterable[Any] | None:
        """The items that are sent after the last one has come."""
        return None

    def origins_of(self, batch: Any, /) -> Iterable[Any]:
        """The origins of the fragments that a batch of this node's was made of."""
        return ()

    def take_sources(self, sources: Sequence[Any], *, drops: bool, is_all: bool) -> Iterable[Any]:
        """Take the nodes that lead to this one: after each new edge before it and, with `is_all`, at validation.

            sources    as `Graph.sources_of` has them
            drops      whether an edge between may drop items

        Returns the composite nodes that are to be expanded again by `graph()`.
        """
        return ()


class Sink(Protocol):
    """A node that keeps items, and what is to be closed when the run is over."""

    def held(self) -> Iterable[Any]:
        """Items taken and not passed on: their fragments count as lost when the run ends."""
        return ()

    def take_ending(self, cause: str, /) -> None:
        """Take note that the run has ended: cause is "closed" or "failed"."""

    def take_failure(self, error: Exception, /) -> None:
        """Take the error of a node that has raised, before `close`. In an event loop."""

    def close(self) -> None:
        """Close. Called once, when the run is over."""


class Background(Protocol):
    """A synchronous node that takes items and gives its outputs later. Its last three members may be missing.

    A call with an item returns None. The outputs come from `completed()`. All methods are called in the thread that the
    graph runs in. The descriptor says that another thread or process has completed something.
    """

    @property
    def in_flight(self) -> int:
        """Number of items that were taken and have no output yet."""
        ...

    @property
    def patience(self) -> float | None:
        """Seconds after which `completed` is to be called even if the descriptor is silent; None: never."""
        ...

    def fileno(self) -> int:
        """A descriptor that is readable once something is completed; -1: `completed` never has to be waited for."""
        ...

    def completed(self) -> Iterable[Any]:
        """The outputs since the last call, without waiting for more. Raises the error of a failed item."""
        ...

    def take_meter(self, meter: "NodeMeter", /) -> None:
        """Count all work by this meter, from `begin_work` to `end_work`: else calls, and waits for the node, count."""

    def hasten(self) -> None:
        """Return unfinished work as it is: no more items will be asked for."""

    @property
    def unsettled(self) -> int:
        """Number of items in flight that come back by themselves: those of hosts that are away may not."""
        return self.in_flight


class Observable(Protocol):
    """A node that shows what it does."""

    def describe(self) -> str:
        """Text for `Graph.explain`."""
        return ""

    def at_work(self, name: str, /) -> "Iterable[Wait]":
        """What the node of this name works on or waits for right now, for the stall doctor. From another thread."""
        return ()

    @property
    def waits_in_call(self) -> bool:
        """True while a call waits for what the node works on: the doctor then asks `at_work`."""
        return False

    def take_report(self, report: "Callable[[], Report]", /) -> None:
        """Take what gives the run's report at any time, when the run begins. In an event loop."""

    def take_trace(self, name: str, trace: "FragmentTrace | None", /) -> None:
        """Take the node's name and a trace that begins; None: it has ended."""

    @property
    def report_notes(self) -> Sequence[str]:
        """Sentences for the report."""
        return ()

    @property
    def slowest_piece(self) -> str:
        """Name of the connector piece that took most of the node's time; "": it runs none."""
        return ""

    @property
    def call_times(self) -> "CallTimes | None":
        """Times of its calls, of a node that works elsewhere; None: they are measured here."""
        return None


class Composite(Protocol):
    """A node that is made of others, and shows itself as a whole."""

    def signs(self) -> "Sequence[Sign]":
        """Silent faults."""
        return ()

    def snapshot(self) -> dict[str, Any]:
        """What there is to see of it, as plain values."""
        return {}


class Gate(Protocol):
    """Decides item by item whether an edge lets it pass now.

    A refused item is parked. When the gate calls the function passed to `watch`, all parked items are tried again,
    oldest first. Both happen in the thread that the graph runs in. What a gate may have beside is in `ObservableGate`.
    """

    def admits(self, item: Any, /) -> bool:
        """True if the item may pass; it then passes. Called again for a parked item."""
        ...

    def watch(self, changed: Callable[[], None], /) -> None:
        """Keep `changed`, and call it whenever a refused item might now be admitted."""
        ...


class ObservableGate(Protocol):
    """What a gate may have beside."""

    @property
    def holder(self) -> str | None:
        """Name of the party that it waits for: a stage of the report of a run on an event loop.

        It is read if items are parked and nothing else can be done.
        """
        return None

    def waits_for(self) -> "Wait | None":
        """What refused items wait for, for the stall doctor. From another thread."""
        return None

    @property
    def is_ready(self) -> bool:
        """False while sources of a run on an event loop may not begin."""
        return True


def node_methods(name: str, node: Any) -> dict[str, Callable[..., Any]]:
    """The optional methods of a node, by name; those of `Background` only of a node that works in the background.

    Raises GraphError for one that can't be called as its protocol says.
    """
    owner = f"node '{name}'"
    found: dict[str, Callable[..., Any]] = {}
    for protocol in (Source, Processor, Sink, Observable):
        found |= methods_of(owner, node, protocol)
    if hasattr(node, "completed") and hasattr(node, "in_flight"):
        there = methods_of(owner, node, Background)
        missing = [each for each in ("completed", "fileno") if each not in there]
        _check_there(owner, node, Background, missing + ([] if hasattr(node, "patience") else ["patience"]))
        found |= there
    return found


def check_gate(owner: str, gate: Any) -> None:
    """Raise GraphError for a gate with a method that is missing, or can't be called."""
    found = methods_of(owner, gate, Gate)
    _check_there(owner, gate, Gate, [each for each in ("admits", "watch") if each not in found])
    methods_of(owner, gate, ObservableGate)


def wait_at(gate: Any) -> "Wait | None":
    """What the refused items of a gate wait for; None: it is not known."""
    return gate.waits_for() if getattr(gate, "waits_for", None) is not None else None


def methods_of(owner: str, thing: Any, protocol: type) -> dict[str, Callable[..., Any]]:
    """The methods of an object that a protocol has, by name, without the protocol's own defaults.

    owner    in words, for an error

    Raises GraphError for one that can't be called as the protocol says.
    """
    found: dict[str, Callable[..., Any]] = {}
    for name, declared in _declared(protocol).items():
        method = getattr(thing, name, None)
        if method is None or getattr(method, "__func__", None) is declared:
            continue
        if not callable(method) or not _takes(method, declared):
            has = f"{name}{inspect.signature(method)}" if callable(method) else f"{name} = {method!r}"
            text = f"{owner} has {has}, expected a method {_shown(name, declared)}, as {protocol.__name__} has it"
            raise GraphError(text).see("node")
        found[name] = method
    return found


def _check_there(owner: str, thing: Any, protocol: type, missing: Sequence[str]) -> None:
    if missing:
        declared = _declared(protocol)
        expected = ", ".join(_shown(each, declared[each]) if each in declared else each for each in missing)
        text = f"{owner} is {type(thing).__name__} without {expected}, expected what {protocol.__name__} has"
        raise GraphError(text).see("node")


@cache
def _declared(protocol: type) -> dict[str, Any]:
    """The methods of a protocol, by name."""
    return {
        name: each for name, each in vars(protocol).items() if inspect.isfunction(each) and not name.startswith("_")
    }


@cache
def _arguments(declared: Any) -> tuple[list[str], list[str]]:
    """Names of a protocol method's positional parameters, without `self`, and of its keywords."""
    parameters = list(inspect.signature(declared).parameters.values())[1:]
    keywords = [each.name for each in parameters if each.kind is each.KEYWORD_ONLY]
    return [each.name for each in parameters if each.name not in keywords], keywords


def _takes(method: Callable[..., Any], declared: Any) -> bool:
    """True if a method can be called as a protocol's is, or if that can't be read."""
    positional, keywords = _arguments(declared)
    try:
        inspect.signature(method).bind(*positional, **dict.fromkeys(keywords))
    except ValueError:  # a built-in without a signature
        return True
    except TypeError:
        return False
    return True


def _shown(name: str, declared: Any) -> str:
    positional, keywords = _arguments(declared)
    return f"{name}({', '.join([*positional, *(['*', *keywords] if keywords else [])])})"


def note_node(error: BaseException, name: str) -> None:
    """Add the note "in node ..." to an error that has none yet.

    Raises RuntimeError in place of a StopIteration, which would silently end the iterators that it passes through.
    """
    if isinstance(error, StopIteration):
        replacement = RuntimeError("a node raised StopIteration")
        replacement.add_note(f"in node '{name}'")
        raise replacement from error
    if not any(note.startswith("in node ") for note in getattr(error, "__notes__", ())):
        error.add_note(f"in node '{name}'")


def close_nodes(graph: "Graph") -> None:
    """Call `close()` of every node that has it, even if one raises; then raise the error, or a group of several."""
    errors: list[Exception] = []
    for name, close in graph.having("close"):
        try:
            close()
        except Exception as error:
            note_node(error, name)
            errors.append(error)
    if len(errors) == 1:
        raise errors[0]
    if errors:
        raise ExceptionGroup(f"closing graph '{graph.name}'", errors)


async def ending_quietly(task: Callable[[], Awaitable[None]]) -> None:
    """Run a task of a group: if it is cancelled with the group, or with what is around it, it ends without an error.

    An event loop would keep the cancellation in a cycle, with a frame that refers to all callers of the loop.
    """
    try:
        await task()
    except anyio.get_cancelled_exc_class():
        if anyio.current_effective_deadline() != -math.inf:
            raise


def first_error(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first error of a task group; the group itself if there is more than errors in it, such as Ctrl-C."""
    error: BaseException = group.exceptions[0] if isinstance(group, ExceptionGroup) else group
    while isinstance(error, ExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


@contextmanager
def out_of_group(choose: Callable[[BaseExceptionGroup[BaseException]], BaseException] = first_error) -> Iterator[None]:
    """Raise an error of a task group in the block as it is, without the group: the one that is chosen."""
    failure: BaseException | None = None
    try:
        yield
    except BaseExceptionGroup as group:
        failure = choose(group)
    if failure is not None:
        context = failure.__context__  # `raise` would replace it by the group
        try:
            raise failure
        finally:
            failure.__context__ = context
            del failure, context  # whose tracebacks refer to this frame
