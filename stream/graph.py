"""A graph of nodes: drawn, checked and explained before it runs.

Without its feedback edges a graph is acyclic. Synchronous neighbours that stand in the same thread and were joined
without a capacity are *chained*: they run as one task, which calls them in turn. Every other edge is a bounded channel.
"""

from collections.abc import Iterable
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rollflow.stream.channel import Overflow
from rollflow.stream.drawing import explain, mermaid
from rollflow.stream.edge import Edge, Port, check_room, leading_to, may_drop_before, within
from rollflow.stream.errors import GraphError
from rollflow.stream.gate import Gate
from rollflow.stream.port import NodeSpec, Where, is_same_method, meet, outlet_method, own_name, read_node, type_name

if TYPE_CHECKING:
    from rollflow.stream.run import Run


class Graph:
    """Nodes with named, typed ports, and the edges between them.

    >>> graph = Graph("doubling")
    >>> graph.add(source=numbers, double=lambda number: 2 * number)
    >>> graph.connect("source", "double", capacity=4)
    >>> graph.output("doubled", "double")

    `numbers` may be `async def numbers(out: Outlet[int]) -> None`. What a node may be is said in `read_node`; a Graph,
    or an object with a method `graph() -> Graph`, is a node too: its outputs and inputs are its ports.
    """

    def __init__(self, name: str = "graph") -> None:
        self.name = name
        self.nodes: dict[str, NodeSpec] = {}
        self.edges: list[Edge] = []
        self.outputs: dict[str, Edge] = {}
        self.inputs: dict[str, Port] = {}
        self._added: dict[str, Any] = {}  # as they were given
        self._composites: dict[str, tuple[dict[str, Port], dict[str, Port]]] = {}
        self._wholes: dict[str, Any] = {}  # what the names of nodes begin with -> what has been taken apart into these
        self._tasks: dict[str, str] | None = None

    # Drawing

    def add(self, **nodes: Any) -> None:
        """Add nodes, each under its keyword as its name. Raises GraphError for what is no node."""
        for name, node in nodes.items():
            self.add_node(name, node)

    def add_node(self, name: str, node: Any, *, where: Where | None = None) -> None:
        """Add one node; `where="thread"` has a synchronous node's calls made in a worker thread, one at a time."""
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
        """Join an outlet to an inlet: `"node.port"`, or `"node"` where it has only one.

        A node itself will do, and a method of one that is called like its outlet: `rollout`, `rollout.fragments`. One
        that has not been added is, under the name of its class: a `TrainerSink` as "trainer_sink", another one as
        "trainer_sink_2".

            capacity    items that may wait on the edge. None asks for no channel: synchronous neighbours are then
                        chained; where they can't be, or another way from one to the other leads through a
                        channel, the edge holds one item
            overflow    what a full edge does: "block" holds the sender back, "drop_oldest" and "latest" throw the
                        oldest away, which is counted
            feedback    declares that this edge closes a cycle. What goes round in a cycle must fit into it: its nodes
                        may not send more items than its edges hold
            gate        lets items pass one by one; only between synchronous nodes joined without a capacity

        An outlet joined to several inlets gives each the same object; an inlet joined to several outlets takes from
        all. Raises GraphError for an unknown port, for types that don't meet, and for a capacity below 1.
        """
        source, target = self._named(source, outlet=True), self._named(target, outlet=False)
        outlet, inlet = self._port(source, outlet=True), self._port(target, outlet=False)
        check_room(f"{source} → {target}", capacity, overflow, feedback=feedback)
        given, taken = self.nodes[outlet[0]].outlets[outlet[1]], self.nodes[inlet[0]].inlets[inlet[1]]
        if not meet(given, taken):
            raise GraphError(
                f"{'.'.join(outlet)} gives {type_name(given)}, but {'.'.join(inlet)} takes {type_name(taken)}"
            )
        edge = Edge(outlet, inlet, capacity, overflow, feedback, gate)
        if gate is not None and (feedback or not self._may_chain(edge)):
            raise GraphError(
                f"{edge.name}: a gate stands only between synchronous, inline nodes, on an edge without a capacity "
                "that is no feedback edge"
            )
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
        """Export an outlet: as an async iterator of the run, or as a port where this graph is a node of another."""
        if name in self.outputs:
            raise GraphError(f"graph '{self.name}' has an output '{name}' already")
        if capacity < 1:
            raise GraphError(f"output '{name}': capacity is {capacity}, expected at least 1")
        self.outputs[name] = Edge(self._port(port, outlet=True), (self.name, name), capacity, is_output=True)

    def input(self, name: str, port: str) -> None:
        """Export an inlet, as a port where this graph is a node of another."""
        if name in self.inputs:
            raise GraphError(f"graph '{self.name}' has an input '{name}' already")
        self.inputs[name] = self._port(port, outlet=False)

    # Checking

    def validate(self) -> None:
        """Raise GraphError for the first thing that can't run: an unconnected port, a cycle, a node nothing reaches."""
        if not self.nodes:
            raise GraphError(f"graph '{self.name}' has no nodes")
        fed = {edge.target for edge in self.edges}
        read = {edge.source for edge in (*self.edges, *self.outputs.values())}
        for name, spec in self.nodes.items():
            for port in spec.inlets:
                if (name, port) in self.inputs.values():
                    raise GraphError(
                        f"'{name}.{port}' is an input of graph '{self.name}', which has to be fed by another"
                    )
                if (name, port) not in fed:
                    raise GraphError(f"inlet '{name}.{port}' is connected to nothing: connect an outlet to it")
            for port in spec.outlets:
                if (name, port) not in read:
                    raise GraphError(
                        f"outlet '{name}.{port}' is connected to nothing: connect it to an inlet, or make it an output"
                        f"{_gives_nothing(spec)}"
                    )
        cycle = self._cycle()
        if cycle:
            raise GraphError(f"cycle {' → '.join(cycle)}: declare the edge that closes it with feedback=True")
        gated = next((edge for edge in self.edges if edge.gate is not None and not self.is_chained(edge)), None)
        if gated is not None:
            raise GraphError(
                f"{gated.name}: a gate can't stand where another way from '{gated.source[0]}' to '{gated.target[0]}' "
                "leads through a channel"
            )
        unreached = [name for name in self.nodes if name not in self._started()]
        if unreached:
            raise GraphError(
                f"nothing would ever flow through {', '.join(unreached)}: no source feeds them, and none of them has a "
                "start() that sets out the first items"
            )
        self._tell_sources(self.nodes, is_all=True)

    def is_chained(self, edge: Edge) -> bool:
        """Whether the nodes at both ends of an edge run as one task."""
        return self._may_chain(edge) and self._task_of(edge.source[0]) == self._task_of(edge.target[0])

    def groups(self) -> list[list[str]]:
        """The nodes task by task; within a chain in the order of the flow."""
        groups: dict[str, list[str]] = {}
        for name in self.flow_order():
            groups.setdefault(self._task_of(name), []).append(name)
        return list(groups.values())

    def flow_order(self) -> list[str]:
        """The nodes from sources to sinks, feedback edges left out."""
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
        """The nodes that items of these may come to, these themselves only if in a cycle."""
        reached: set[str] = set()
        left = list(names)
        while left:
            name = left.pop()
            more = {edge.target[0] for edge in self.edges if edge.source[0] == name} - reached
            reached |= more
            left += more
        return reached

    def sources_of(self, name: str) -> list[Any]:
        """What leads to a node, feedback edges left out: nodes as they were added, in the order of the flow."""
        before = leading_to(name, self.edges)
        found: dict[int, Any] = {}
        for each in self.flow_order():
            if each in before and each != name:
                wholes = [whole for prefix, whole in self._wholes.items() if each.startswith(prefix)]
                found |= {id(node): node for node in wholes or [self.nodes[each].node]}
        return list(found.values())

    def harmless(self) -> frozenset[str]:
        """The nodes that hold no other back: all that comes to them comes over edges that drop, or from such nodes."""
        into = {name: [edge for edge in self.edges if edge.target[0] == name] for name in self.nodes}
        found: set[str] = set()
        for name in self.flow_order():
            edges = [edge for edge in into[name] if not edge.feedback]
            if edges and all(edge.overflow != "block" or edge.source[0] in found for edge in edges):
                found.add(name)
        return frozenset(found)

    # Showing and running

    def explain(self) -> str:
        """What is chained into one task, where each node runs, and how much each edge holds."""
        return explain(self)

    def mermaid(self) -> str:
        """A Mermaid flowchart of the graph."""
        return mermaid(self)

    def run(self, *, seed: int | None = None) -> "AbstractAsyncContextManager[Run]":
        """`async with graph.run() as run:` checks the graph and runs it until the block is left.

        A node's error is raised as it is, with the node's name noted on it.

        seed    gives every node that asks for a random generator its own, by its name; None: a fresh one
        """
        from rollflow.stream.running import Running  # which is made of a graph: not at the top, or both were half there

        self.validate()
        return Running(self, seed)

    # Inside

    def _place(self, prefix: str, node: Any, inner: "Graph") -> tuple[dict[str, Port], dict[str, Port]]:
        """Have the parts of a node among those here, a prefix before their names; its inlets and outlets.

        Where it has been taken apart before, these parts take the place of those.
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
            self._wholes[prefix] = node
        self._wholes |= {prefix + name: whole for name, whole in inner._wholes.items()}
        outlets = {export: within(prefix, edge.source) for export, edge in inner.outputs.items()}
        inlets = {export: within(prefix, port) for export, port in inner.inputs.items()}
        return inlets, outlets

    def _tell_sources(self, names: Iterable[str], *, is_all: bool) -> None:
        """Tell those nodes that want to know what leads to them, and take apart once more what they ask for."""
        asking = [(name, self.nodes[name].node) for name in names if hasattr(self.nodes[name].node, "take_sources")]
        for name, node in asking:
            try:
                drops = may_drop_before(name, self.edges)
                changed = list(node.take_sources(self.sources_of(name), drops=drops, is_all=is_all))
            except Exception as error:
                error.add_note(f"in node '{name}'")
                raise
            for prefix, whole in list(self._wholes.items()):
                if any(whole is each for each in changed):
                    self._place(prefix, whole, whole.graph())
        self._tasks = None

    def _named(self, end: str | Any, *, outlet: bool) -> str:
        """An end of an edge by its name; what is no node yet becomes one."""
        if isinstance(end, str):
            return end
        node, port = outlet_method(end) if outlet else (end, "")
        # A method is another object each time that it is asked for.
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
            ports: Iterable[str] = self._composites[name][outlet]
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
        return self._composites[name][outlet][port] if name in self._composites else (name, port)

    def _cycle(self) -> list[str]:
        """The names round a cycle without a feedback edge, the first repeated at the end; empty where there is none."""
        after: dict[str, list[str]] = {name: [] for name in self.nodes}
        for edge in self.edges:
            if not edge.feedback:
                after[edge.source[0]].append(edge.target[0])
        done: set[str] = set()

        def visit(name: str, path: list[str]) -> list[str]:
            if name in path:
                return [*path[path.index(name) :], name]
            found = next(
                (cycle for each in after[name] if name not in done and (cycle := visit(each, [*path, name]))), []
            )
            done.add(name)
            return found

        return next((cycle for name in self.nodes if (cycle := visit(name, []))), [])

    def _started(self) -> set[str]:
        starts = {name for name, spec in self.nodes.items() if spec.starts}
        return starts | self.reached_from(starts)

    def _may_chain(self, edge: Edge) -> bool:
        """Whether the edge asks for no channel, and neither of its nodes needs one."""
        if edge.capacity is not None or edge.is_output:
            return False
        return all(
            not spec.is_async and spec.where == "inline"
            for spec in (self.nodes[edge.source[0]], self.nodes[edge.target[0]])
        )

    def _task_of(self, name: str) -> str:
        """The node that stands for all that run as one task with this one.

        Two tasks become one only where nothing that leaves the one task by a channel comes back to it: it would be
        held back by itself. Of a feedback edge this is known, and looked to by whoever drew it.
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
        reached: set[str] = set()
        left = [task]
        while left:
            here = left.pop()
            more = {target for source, target in channels if source == here} - reached
            reached |= more
            left += more
        return task in reached


def _gives_nothing(spec: NodeSpec) -> str:
    """What to do where an outlet is there only because nobody has said that there is none."""
    is_said = spec.is_async or spec.has_fields or tuple(spec.outlets) != ("out",) or spec.outlets["out"] is not Any
    return "" if is_said else "; a callable that gives nothing says so by its annotation: def sink(item) -> None"
