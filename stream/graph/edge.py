"""Edges between the nodes of a graph, and questions about the ways along them."""

from collections.abc import Iterable
from dataclasses import dataclass

from rollflow.stream.data.errors import GraphError
from rollflow.stream.graph.channel import Overflow
from rollflow.stream.graph.gate import Gate

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


def check_room(name: str, capacity: int | None, overflow: Overflow, *, feedback: bool) -> None:
    """Raise GraphError where an edge can't have this capacity and overflow policy."""
    if capacity is not None and capacity < 1:
        raise GraphError(f"{name}: capacity is {capacity}, expected at least 1, or None")
    if overflow not in ("block", "drop_oldest", "latest"):
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


def leading_to(name: str, edges: Iterable[Edge]) -> set[str]:
    """A node and all nodes that lead to it, without feedback edges."""
    return {name} | reached([name], [(each.target[0], each.source[0]) for each in edges if not each.feedback])


def is_only_way(edge: Edge, edges: Iterable[Edge]) -> bool:
    """True if the items on an edge go nowhere else, except within the composite node that they come from."""
    edges, ports = list(edges), [edge.source]
    while ports:
        port = ports.pop()
        inside = port[0][: port[0].rfind("/") + 1]
        ways = [each for each in edges if each.source == port and not (inside and each.target[0].startswith(inside))]
        if len(ways) > 1:
            return False
        before = [each for each in edges if each.target[0] == port[0] and not (each.feedback or each.is_output)]
        ports += [each.source for each in before]
    return True


def may_drop_before(name: str, edges: Iterable[Edge]) -> bool:
    """True if an edge on the way to a node may drop items."""
    before = leading_to(name, edges)
    return any(each.overflow != "block" and not each.feedback for each in edges if each.target[0] in before)
