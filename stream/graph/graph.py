"""Graph: nodes and edges, which are checked and can be explained before they run.

Without its feedback edges a graph is acyclic. Synchronous neighbours in the same thread, connected without a capacity,
are *chained*: they run as one task, which calls them in turn. Every other edge is a bounded channel.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from graphlib import CycleError, TopologicalSorter
from os import PathLike
from pathlib import Path
from typing import Any

from rollflow.stream.data.errors import GraphError, noted
from rollflow.stream.graph.channel import Overflow
from rollflow.stream.graph.drawing import explain, shape
from rollflow.stream.graph.node import Composite, Gate, check_gate, methods_of
from rollflow.stream.graph.port import (
    Edge,
    NodeSpec,
    Port,
    Where,
    check_room,
    gives_nothing,
    is_same_method,
    meet,
    outlet_method,
    own_name,
    reached,
    read_node,
    type_name,
    within,
)
from rollflow.stream.graph.run import Run
from rollflow.stream.observe.graph_picture import graph_picture
from rollflow.stream.observe.watch import OnStall, StallRules


class Graph:
    """Nodes with named, typed ports, and the edges between them.

    >>> graph = Graph("doubling")
    >>> graph.add(source=numbers, double=lambda number: 2 * number)
    >>> graph.connect("source", "double", capacity=4)
    >>> graph.output("doubled", "double")

    `numbers` may be `async def numbers(out: Outlet[int]) -> None`. `read_node` describes the forms of a node. A Graph,
    or an object with a method `graph() -> Graph`, is a composite node, whose outputs are its outlets. Items come to it
    at one of its nodes: `graph.connect("source", "whole/part")`.
    """

    def __init__(self, name: str = "graph") -> None:
        self.name = name
        self.nodes: dict[str, NodeSpec] = {}
        self.edges: list[Edge] = []
        self.outputs: dict[str, Edge] = {}
        self._added: dict[str, Any] = {}  # nodes by name, composite ones as a whole
        self._composites: dict[str, dict[str, Port]] = {}  # outlets of each
        self.wholes: dict[str, Any] = {}  # prefix of the names of a composite node's parts -> the composite node
        self.methods_of_wholes: dict[str, dict[str, Callable[[], Any]]] = {}  # of `Composite`, by the same prefixes
        self._tasks: dict[str, str] | None = None

    # Drawing

    def add(self, **nodes: Any) -> None:
        """Add nodes under their keywords as names. Raises GraphError for an object that is no node."""
        for name, node in nodes.items():
            self.add_node(name, node)

    def add_node(self, name: str, node: Any, *, where: Where | None = None) -> None:
        """Add one node; `where="thread"` calls a synchronous node in a worker thread, one call at a time.

        Without `where` a sink is called in a thread if all edges into it drop items, and any other node inline.
        """
        if name in self.nodes or name in self._composites:
            raise GraphError(f"graph '{self.name}' has a node '{name}' already")
        if "." in name or "/" in name:
            raise GraphError(
                f"node '{name}': a '.' stands between a node and its port, and a '/' between a node and its parts, "
                "expected a name without one"
            )
        self._tasks = None
        inner = node if isinstance(node, Graph) else node.graph() if hasattr(node, "graph") else None
        if inner is None:
            self.nodes[name] = read_node(name, node, where)
        else:
            self._composites[name] = self._place(f"{name}/", node, inner)
        self._added[name] = node

    def connect(
        self,
        source: str | Any,
        target: str | Any,
        *,
        capacity: int | None = None,
        overflow: Overflow = "block",
        feedback: bool = False,
        gate: Gate | None = None,
    ) -> None:
        """Connect an outlet to an inlet: `"node.port"`, or `"node"` if it has only one such port.

        An end may also be a node, or a node's method with the name of its outlet: `rollout`, `rollout.fragments`. A
        node that was not added is added under the name of its class: a `TrainerSink` as "trainer_sink", the next as
        "trainer_sink_2".

            capacity    items that may wait on the edge. None asks for no channel: synchronous neighbours are then
                        chained. If they can't be, or another way between them leads through a channel, the
                        edge holds one item
            overflow    policy of a full edge: "block" holds the sender back, "drop_oldest" drops the oldest
                        item, and counts it; "latest" does the same, and says that only the newest counts
            feedback    declares that this edge closes a cycle. The nodes of a cycle may not send more items than its
                        edges hold
            gate        lets items pass one by one; only between synchronous nodes connected without a capacity

        An outlet connected to several inlets sends each the same object; an inlet connected to several outlets takes
        from all. Raises GraphError for an unknown port, types that don't meet, and a capacity below 1.
        """
        source, target = self._named(source, outlet=True), self._named(target, outlet=False)
        outlet, inlet = self._port(source, outlet=True), self._port(target, outlet=False)
        check_room(f"{source} → {target}", capacity, overflow, feedback=feedback)
        sent, taken = self.nodes[outlet[0]].outlets[outlet[1]], self.nodes[inlet[0]].inlets[inlet[1]]
        if not meet(sent, taken):
            raise GraphError(
                f"{'.'.join(outlet)} gives {type_name(sent)}, but {'.'.join(inlet)} takes {type_name(taken)}"
            ).see("graph")
        edge = Edge(outlet, inlet, capacity, overflow, feedback)
        if gate is not None:
            if feedback or not self._may_chain(edge):
                raise GraphError(
                    f"{edge.name}: a gate stands only between synchronous, inline nodes, on an edge without a capacity "
                    "that is no feedback edge"
                )
            check_gate(f"the gate of {edge.name}", gate)
            edge = replace(edge, gate=gate)
        if any((each.source, each.target) == (outlet, inlet) for each in self.edges):
            raise GraphError(f"{edge.name}: these are connected already")
        self._tasks = None
        self.edges.append(edge)
        try:
            self._tell_sources({inlet[0], *self.reached_from([inlet[0]])}, is_all=False)
        except BaseException:
            self.edges.remove(edge)
            raise

    def output(self, name: str, port: str, *, capacity: int = 1) -> None:
        """Export an outlet: an async iterator of the run, or a port if this graph is a node of another graph."""
        if name in self.outputs:
            raise GraphError(f"graph '{self.name}' has an output '{name}' already")
        if capacity < 1:
            raise GraphError(f"output '{name}': capacity is {capacity}, expected at least 1")
        self.outputs[name] = Edge(self._port(port, outlet=True), (self.name, name), capacity, is_output=True)

    # Checking

    def validate(self) -> None:
        """Raise GraphError if the graph can't run: an unconnected port, a cycle, a node that nothing reaches."""
        if not self.nodes:
            raise GraphError(f"graph '{self.name}' has no nodes")
        fed = {edge.target for edge in self.edges}
        read = {edge.source for edge in (*self.edges, *self.outputs.values())}
        for name, spec in self.nodes.items():
            for port in spec.inlets:
                if (name, port) not in fed:
                    problem = f"inlet '{name}.{port}' is connected to nothing: connect an outlet to it"
                    raise GraphError(problem).see("graph")
            for port in spec.outlets:
                if (name, port) not in read:
                    raise GraphError(
                        f"outlet '{name}.{port}' is connected to nothing, neither by graph.connect('{name}.{port}', …) "
                        f"nor by graph.output('{port}', '{name}.{port}'): connect it to an inlet, or make it an output"
                        f"{gives_nothing(spec)}"
                    ).see("graph")
        cycle = self._cycle()
        if cycle:
            problem = f"cycle {' → '.join(cycle)}: declare the edge that closes it with feedback=True"
            raise GraphError(problem).see("graph")
        gated = next((edge for edge in self.edges if edge.gate is not None and not self.is_chained(edge)), None)
        if gated is not None:
            raise GraphError(
                f"{gated.name}: a gate can't stand where another way from '{gated.source[0]}' to '{gated.target[0]}' "
                "leads through a channel"
            )
        starts = {
            name for name, spec in self.nodes.items() if spec.is_async or not spec.inlets or "start" in spec.methods
        }
        unreached = [name for name in self.nodes if name not in starts | self.reached_from(starts)]
        if unreached:
            raise GraphError(
                f"nothing would ever flow through {', '.join(unreached)}: no source feeds them, and none of them has a "
                "start() that sets out the first items"
            )
        self._tell_sources(self.nodes, is_all=True)

    def is_chained(self, edge: Edge) -> bool:
        """True if the nodes at both ends of an edge run as one task."""
        return self._may_chain(edge) and self._task_of(edge.source[0]) == self._task_of(edge.target[0])

    def groups(self) -> list[list[str]]:
        """The names of the nodes, task by task; within a chain in the order of the flow."""
        groups: dict[str, list[str]] = {}
        for name in self.flow_order():
            groups.setdefault(self._task_of(name), []).append(name)
        return list(groups.values())

    def flow_order(self) -> list[str]:
        """The names of the nodes from sources to sinks, without feedback edges."""
        order: list[str] = []
        waiting = dict.fromkeys(self.nodes)
        forward = [(edge.source[0], edge.target[0]) for edge in self.edges if not edge.feedback]
        while waiting:
            ready = [name for name in waiting if not any(t == name and s in waiting for s, t in forward)]
            for name in ready or list(waiting):
                order.append(name)
                del waiting[name]
        return order

    def reached_from(self, names: Iterable[str]) -> set[str]:
        """The nodes that items of the nodes `names` may come to; one of `names` itself only if in a cycle."""
        return reached(names, [(edge.source[0], edge.target[0]) for edge in self.edges])

    def leading_to(self, name: str) -> set[str]:
        """A node and all nodes that lead to it, without feedback edges."""
        return {name} | reached([name], [(edge.target[0], edge.source[0]) for edge in self.edges if not edge.feedback])

    def is_only_way(self, edge: Edge) -> bool:
        """True if the items on an edge go nowhere else, except within the composite node that they come from."""
        ports = [edge.source]
        while ports:
            port = ports.pop()
            inside = port[0][: port[0].rfind("/") + 1]
            ways = [each for each in (*self.edges, *self.outputs.values()) if each.source == port]
            if len([each for each in ways if not (inside and each.target[0].startswith(inside))]) > 1:
                return False
            ports += [each.source for each in self.edges if each.target[0] == port[0] and not each.feedback]
        return True

    def sources_of(self, name: str) -> list[Any]:
        """The nodes that lead to a node, as they were added, in the order of the flow; without feedback edges."""
        before = self.leading_to(name)
        found: dict[int, Any] = {}
        for each in self.flow_order():
            if each in before and each != name:
                wholes = [whole for prefix, whole in self.wholes.items() if each.startswith(prefix)]
                found |= {id(node): node for node in wholes or [self.nodes[each].node]}
        return list(found.values())

    def having(self, method: str, names: Iterable[str] | None = None) -> list[tuple[str, Callable[..., Any]]]:
        """(node, its method) of all nodes, or of some, that have an optional method of this name."""
        return [
            (name, methods[method])
            for name in (self.nodes if names is None else names)
            if method in (methods := self.nodes[name].methods)
        ]

    def slowest_pieces(self) -> dict[str, str]:
        """Node -> name of the connector piece that took most of its time, for those that run pieces."""
        found = {name: getattr(spec.node, "slowest_piece", "") for name, spec in self.nodes.items()}
        return {name: piece for name, piece in found.items() if piece}

    def place_of(self, name: str) -> Where:
        """Where a node is called: as it was asked for; else a sink behind edges that drop in a thread, others inline.

        Inline such a sink would hold up the whole run, whatever its edges drop.
        """
        spec = self.nodes[name]
        if spec.where is not None:
            return spec.where
        is_sink = not (spec.is_async or spec.outlets or spec.background is not None)
        into = [edge for edge in self.edges if edge.target[0] == name]
        is_fed_by_drops = bool(into) and all(edge.overflow != "block" for edge in into)
        return "thread" if is_sink and is_fed_by_drops else "inline"

    def harmless(self) -> frozenset[str]:
        """The nodes that hold no other back: every edge into them drops items, or comes from such a node.

        A synchronous node that is called inline is none of them: it holds up the event loop.
        """
        into = {name: [edge for edge in self.edges if edge.target[0] == name] for name in self.nodes}
        found: set[str] = set()
        for name in self.flow_order():
            edges = [edge for edge in into[name] if not edge.feedback]
            if edges and all(edge.overflow != "block" or edge.source[0] in found for edge in edges):
                found.add(name)
        return frozenset(each for each in found if self.nodes[each].is_async or self.place_of(each) == "thread")

    # Showing and running

    def explain(self) -> str:
        """A text of the tasks, where each node runs, and how much each edge holds."""
        return explain(self)

    def draw(self, path: str | PathLike[str]) -> None:
        """Write a picture of the graph to a file, as SVG. Raises GraphError for a file of another kind."""
        if Path(path).suffix != ".svg":
            raise GraphError(f"graph '{self.name}' was to be drawn as {path}, expected a file that ends in .svg")
        Path(path).write_text(self._repr_html_(), encoding="utf-8")

    def _repr_html_(self) -> str:
        return graph_picture(shape(self), f"graph {self.name}")

    def run(
        self, *, stall_after: float | None = 5.0, on_stall: OnStall = "log", trace: str | PathLike[str] | None = None
    ) -> Run:
        """`async with graph.run() as run:` checks the graph and runs it until the block is left.

        A node's error is raised unchanged, with the node's name in a note.

            stall_after    seconds after which a run that stands still is logged, with the reason; None: never
            on_stall       "log", or "raise": a run that stands still also ends, with a StallError
            trace          file for a trace of the run; compressed if it ends in .gz; None: none
        """
        self.validate()
        return Run(self, StallRules(stall_after, on_stall), trace)

    # Inside

    def _place(self, prefix: str, node: Any, inner: "Graph") -> dict[str, Port]:
        """Add the parts of a composite node under `prefix`; return its outlets.

        Parts that it was expanded to before are replaced.
        """
        placed = {prefix + spec.name: replace(spec, name=prefix + spec.name) for spec in inner.nodes.values()}
        nodes: dict[str, NodeSpec] = {}
        for name, spec in self.nodes.items():
            nodes |= placed if name.startswith(prefix) else {name: spec}
        self.nodes = nodes | placed
        own = [edge for edge in self.edges if edge.source[0].startswith(prefix) and edge.target[0].startswith(prefix)]
        at = self.edges.index(own[0]) if own else len(self.edges)
        self.edges[at:] = [
            *(
                replace(edge, source=within(prefix, edge.source), target=within(prefix, edge.target))
                for edge in inner.edges
            ),
            *(edge for edge in self.edges[at:] if edge not in own),
        ]
        if inner is not node:
            self.wholes[prefix] = node
            self.methods_of_wholes[prefix] = methods_of(f"node '{prefix[:-1]}'", node, Composite)
        self.wholes |= {prefix + name: whole for name, whole in inner.wholes.items()}
        self.methods_of_wholes |= {prefix + name: methods for name, methods in inner.methods_of_wholes.items()}
        return {export: within(prefix, edge.source) for export, edge in inner.outputs.items()}

    def _tell_sources(self, names: Iterable[str], *, is_all: bool) -> None:
        """Call `take_sources` of the nodes that have it, and expand composite nodes again if they ask for it."""
        for name, take_sources in self.having("take_sources", names):
            before = self.leading_to(name)
            drops = any(
                each.overflow != "block" for each in self.edges if each.target[0] in before and not each.feedback
            )
            with noted(f"in node '{name}'"):
                changed = list(take_sources(self.sources_of(name), drops=drops, is_all=is_all))
            for prefix, whole in list(self.wholes.items()):
                if any(whole is each for each in changed):
                    self._place(prefix, whole, whole.graph())
        self._tasks = None

    def _named(self, end: str | Any, *, outlet: bool) -> str:
        """The name of an end of an edge; an object that is no node yet is added."""
        if isinstance(end, str):
            return end
        node, port = outlet_method(end) if outlet else (end, "")
        # Each access to a method makes a new object, so `is` finds no method.
        name = next((name for name, added in self._added.items() if added is node or is_same_method(added, node)), None)
        if name is None:
            name = first = own_name(node)
            number = 1
            while name in self._added:
                name = f"{first}_{(number := number + 1)}"
            self.add_node(name, node)
        return f"{name}.{port}" if port else name

    def _port(self, text: str, *, outlet: bool) -> Port:
        name, _, port = text.partition(".")
        kind = "outlet" if outlet else "inlet"
        if name in self._composites:
            ports: Iterable[str] = self._composites[name] if outlet else ()
        elif name in self.nodes:
            ports = self.nodes[name].outlets if outlet else self.nodes[name].inlets
        else:
            there = ", ".join([*self.nodes, *self._composites]) or "none"
            raise GraphError(f"'{text}': graph '{self.name}' has no node '{name}'; nodes: {there}")
        there = ", ".join(ports) or "none"
        if not port:
            if len(list(ports)) != 1:
                raise GraphError(f"'{text}': node '{name}' has not one {kind} but these: {there}; write 'node.port'")
            port = next(iter(ports))
        elif port not in ports:
            raise GraphError(f"'{text}': node '{name}' has no {kind} '{port}'; {kind}s: {there}")
        return self._composites[name][port] if name in self._composites else (name, port)

    def _cycle(self) -> list[str]:
        """The names along a cycle without a feedback edge, the first repeated at the end; empty: there is no cycle."""
        before: dict[str, list[str]] = {name: [] for name in self.nodes}
        for edge in self.edges:
            if not edge.feedback:
                before[edge.target[0]].append(edge.source[0])
        try:
            TopologicalSorter(before).prepare()
        except CycleError as error:
            return list(error.args[1])
        return []

    def _may_chain(self, edge: Edge) -> bool:
        """True if the edge asks for no channel, and neither of its nodes needs one."""
        if edge.capacity is not None or edge.is_output:
            return False
        names = edge.source[0], edge.target[0]
        return all(not self.nodes[name].is_async and self.place_of(name) == "inline" for name in names)

    def _task_of(self, name: str) -> str:
        """The name of the first node of the task that a node runs in.

        Two tasks become one only if no way through a channel leads from the joint task back to it: it would hold itself
        back. A feedback edge is exempt: its author declares that what goes round fits.
        """
        if self._tasks is None:
            place = {each: index for index, each in enumerate(self.flow_order())}
            tasks = {each: each for each in self.nodes}
            joints = [edge for edge in self.edges if self._may_chain(edge)]
            for edge in sorted(joints, key=lambda edge: (edge.feedback, place[edge.target[0]])):
                kept, merged = tasks[edge.source[0]], tasks[edge.target[0]]
                joined = {each: kept if task == merged else task for each, task in tasks.items()}
                if edge.feedback or not self._comes_back(kept, joined):
                    tasks = joined
            self._tasks = tasks
        return self._tasks[name]

    def _comes_back(self, task: str, tasks: dict[str, str]) -> bool:
        channels = [
            (tasks[edge.source[0]], tasks[edge.target[0]])
            for edge in self.edges
            if not edge.feedback and not (self._may_chain(edge) and tasks[edge.source[0]] == tasks[edge.target[0]])
        ]
        return task in reached([task], channels)
