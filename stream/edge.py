"""What joins two nodes of a graph."""

from collections.abc import Iterable
from dataclasses import dataclass

from rollflow.stream.channel import Overflow
from rollflow.stream.errors import GraphError
from rollflow.stream.gate import Gate

Port = tuple[str, str]  # the name of a node, and of one of its inlets or outlets


@dataclass(frozen=True, slots=True)
class Edge:
    """From one node's outlet to another's inlet, or to an output of the graph."""

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


def check_room(name: str, capacity: int | None, overflow: Overflow, *, feedback: bool) -> None:
    """Raise GraphError where an edge can't have these together."""
    if capacity is not None and capacity < 1:
        raise GraphError(f"{name}: capacity is {capacity}, expected at least 1, or None")
    if overflow not in ("block", "drop_oldest", "latest"):
        raise GraphError(f"{name}: overflow is {overflow!r}, expected 'block', 'drop_oldest' or 'latest'")
    if overflow != "block" and (feedback or capacity is None):
        told = "a feedback edge" if feedback else "an edge without a capacity"
        raise GraphError(f"{name}: {told} can't have overflow='{overflow}', expected 'block'")


def within(prefix: str, port: Port) -> Port:
    """The port of a node that is a part of another."""
    return prefix + port[0], port[1]


def leading_to(name: str, edges: Iterable[Edge]) -> set[str]:
    """A node and all that lead to it, feedback edges left out."""
    before = {name}
    while more := {each.source[0] for each in edges if each.target[0] in before and not each.feedback} - before:
        before |= more
    return before


def may_drop_before(name: str, edges: Iterable[Edge]) -> bool:
    """Whether something may be dropped on its way to a node."""
    before = leading_to(name, edges)
    return any(each.overflow != "block" and not each.feedback for each in edges if each.target[0] in before)
