"""Synchronous nodes run as one: each is called with what the one before gave.

A `Chain` is the part that needs no event loop. An item that enters is carried depth-first through the nodes until each
of its descendants has left the chain (and is `pending`), has reached a feedback edge (and is `runnable` again), or is
parked at a gate. Whoever drives the chain delivers what is pending before it pumps on; this is what lets a full
channel hold the whole chain back.

Time is read once after each call, not before and after: what the engine itself takes between two calls is counted with
the later one.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from rollflow.stream.background import Background, is_background
from rollflow.stream.edge import Edge, Port
from rollflow.stream.gate import Gate
from rollflow.stream.graph import Graph
from rollflow.stream.meter import NodeMeter, clock

Deliver = Callable[[Any], None]


class Chain:
    """The chained nodes `names` of a graph, in the order of the flow.

    runnable    (what to call, item) of items that can go on
    pending     (edge, item, meter of the giver) of items that have left the chain and are to be delivered
    parked      (gate, what to call, item) of items that a gate holds
    background  those of the nodes whose work goes on elsewhere, with their meters
    reopened    whether a gate has said, since the last `unpark`, that it might admit some of them
    on_gate     called when a gate says so
    """

    def __init__(self, graph: Graph, names: Sequence[str], meters: dict[str, NodeMeter]) -> None:
        self.names = list(names)
        self.runnable: deque[tuple[Deliver, Any]] = deque()
        self.pending: deque[tuple[Edge, Any, NodeMeter]] = deque()
        self.parked: list[tuple[Gate, Deliver, Any]] = []
        self.reopened = False
        self.on_gate: Callable[[], None] = _nothing
        self._graph = graph
        self._meters = meters
        # In the order of the flow: what comes of the first ones may be worked on by the later ones in one go.
        self.background: list[tuple[Background, NodeMeter]] = [
            (graph.nodes[name].node, meters[name]) for name in self.names if is_background(graph.nodes[name].node)
        ]
        self._mark = [0]  # when the last call ended
        self._steps: dict[str, Deliver] = {}
        self._routes: dict[str, Deliver] = {}
        for name in reversed(self.names):
            self._routes[name] = self._route(name)
            self._steps[name] = self._step(name)
        for edge in graph.edges:
            if edge.gate is not None and edge.source[0] in self.names:
                edge.gate.watch(self._reopen)

    def entry(self, port: Port) -> Deliver:
        """What to call, by `pump`, with an item that arrives at an inlet."""
        return self._steps[port[0]]

    @property
    def can_start(self) -> bool:
        """Whether one of the nodes sets out items of its own."""
        return any(hasattr(self._graph.nodes[name].node, "start") for name in self.names)

    @property
    def is_done(self) -> bool:
        """Whether one of the nodes says, by `done`, that it wants no more."""
        return any(getattr(self._graph.nodes[name].node, "done", False) for name in self.names)

    def start(self) -> Iterator[None]:
        """Carry what the nodes' `start()` give through the chain, one item at each step of the iterator."""
        return self._carry_all("start")

    def pump(self) -> None:
        """Carry the oldest runnable item through the chain. Raises what a node raises, with the node's name noted."""
        self.carry(*self.runnable.popleft())

    def pump_on(self) -> None:
        """Pump until something is pending, a gate has spoken, or nothing is runnable."""
        runnable, pending, mark = self.runnable, self.pending, self._mark
        while runnable and not pending and not self.reopened:
            deliver, item = runnable.popleft()
            mark[0] = clock()
            deliver(item)

    def carry(self, deliver: Deliver, item: Any) -> None:
        """Carry one item through the chain, from where `deliver` takes it in."""
        self._mark[0] = clock()
        deliver(item)

    @property
    def in_flight(self) -> int:
        """Items that are being worked on elsewhere."""
        return sum(node.in_flight for node, _ in self.background)

    def collect(self) -> bool:
        """Carry through the chain what has been completed elsewhere; whether there was anything."""
        found = False
        for node, meter in self.background:
            if not node.in_flight:
                continue
            self._mark[0] = clock()
            try:
                outputs = list(node.completed())
            except Exception as error:
                note_node(error, meter.name)
                raise
            now = clock()
            meter.busy_ns += now - self._mark[0]
            self._mark[0] = now
            for output in outputs:
                self._routes[meter.name](output)
                found = True
        return found

    @property
    def holder(self) -> str | None:
        """The name of whoever the parked items wait for; None: nobody who is known."""
        return next((name for gate, _, _ in self.parked if (name := getattr(gate, "holder", None)) is not None), None)

    def hasten(self) -> None:
        """Have what is worked on elsewhere come back as it is: no more will be asked for."""
        for node, _ in self.background:
            if hasattr(node, "hasten"):
                node.hasten()

    def unpark(self) -> bool:
        """Make parked items runnable where their gates admit them now; whether there were any."""
        self.reopened = False
        parked, self.parked = self.parked, []
        for gate, deliver, item in parked:
            if gate.admits(item):
                self.runnable.append((deliver, item))
            else:
                self.parked.append((gate, deliver, item))
        return len(self.parked) < len(parked)

    def finish(self) -> Iterator[None]:
        """Give up what is runnable or parked, and carry what the nodes' `finish()` give, one item at each step."""
        self.give_up()
        yield from self._carry_all("finish")
        self.give_up()

    def give_up(self) -> None:
        """Forget what is runnable or parked."""
        self.runnable.clear()
        self.parked.clear()

    def _reopen(self) -> None:
        self.reopened = True
        self.on_gate()

    def _carry_all(self, method: str) -> Iterator[None]:
        for name in self.names:
            given = getattr(self._graph.nodes[name].node, method, None)
            if given is not None:
                for output in self._outputs_of(name, given):
                    self._routes[name](output)
                    yield

    def _outputs_of(self, name: str, given: Callable[[], Iterable[Any] | None]) -> Iterator[Any]:
        """What a node's `start` or `finish` gives, the time that it takes counted as the node's."""
        mark, meter = self._mark, self._meters[name]
        mark[0] = clock()
        try:
            for output in given() or ():
                now = clock()
                meter.busy_ns += now - mark[0]
                mark[0] = now
                yield output
                mark[0] = clock()
        except Exception as error:
            note_node(error, name)
            raise
        meter.busy_ns += clock() - mark[0]

    def _step(self, name: str) -> Deliver:
        call: Callable[[Any], Any] = self._graph.nodes[name].node
        meter, mark, route = self._meters[name], self._mark, self._routes[name]

        def step(item: Any) -> None:
            try:
                output = call(item)
            except Exception as error:
                note_node(error, name)
                raise
            now = clock()
            meter.items += 1
            meter.busy_ns += now - mark[0]
            mark[0] = now
            if output is not None:
                route(output)

        return step

    def _route(self, name: str) -> Deliver:
        """What is done with a node's output."""
        spec = self._graph.nodes[name]
        by_port = [self._deliver_all(self._edges((name, port)), self._meters[name]) for port in spec.outlets]
        if not by_port:
            return _ignore
        if not spec.has_fields:
            return by_port[0]
        if len(by_port) == 2:
            return _route_two(*by_port)

        def route(output: Any) -> None:
            for deliver, value in zip(by_port, output, strict=True):
                if value is not None:
                    deliver(value)

        return route

    def _edges(self, port: Port) -> list[Edge]:
        graph = self._graph
        return [edge for edge in (*graph.edges, *graph.outputs.values()) if edge.source == port]

    def _deliver_all(self, edges: Sequence[Edge], meter: NodeMeter) -> Deliver:
        delivers = [self._deliver(edge, meter) for edge in edges]
        if len(delivers) == 1:
            return delivers[0]

        def deliver(item: Any) -> None:
            for each in delivers:
                each(item)

        return deliver

    def _deliver(self, edge: Edge, meter: NodeMeter) -> Deliver:
        if not self._graph.is_chained(edge):
            pending = self.pending
            return lambda item: pending.append((edge, item, meter))
        target = edge.target[0]
        if edge.gate is not None:
            return self._deliver_gated(edge.gate, target)
        if edge.feedback:
            steps, runnable = self._steps, self.runnable
            return lambda item: runnable.append((steps[target], item))
        return self._steps[target]

    def _deliver_gated(self, gate: Gate, target: str) -> Deliver:
        step = self._steps[target]

        def deliver(item: Any) -> None:
            if gate.admits(item):
                step(item)
            else:
                self.parked.append((gate, step, item))

        return deliver


def note_node(error: BaseException, name: str) -> None:
    """Say on an error in which node it arose; the first to say so is right.

    A StopIteration would end the iterators that it passes through: of it, a RuntimeError is raised.
    """
    if isinstance(error, StopIteration):
        told = RuntimeError("a node raised StopIteration")
        told.add_note(f"in node '{name}'")
        raise told from error
    if not any(note.startswith("in node ") for note in getattr(error, "__notes__", ())):
        error.add_note(f"in node '{name}'")


def _route_two(first: Deliver, second: Deliver) -> Deliver:
    def route(output: Any) -> None:
        one, two = output
        if two is not None:
            second(two)
        if one is not None:
            first(one)

    return route


def _nothing() -> None:
    pass


def _ignore(output: Any) -> None:
    """A sink's output, which there is none of."""
