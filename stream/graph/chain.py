"""Chain: synchronous nodes that run as one task, each called with the output of the one before.

A chain needs no event loop. It carries an item depth-first through the nodes, until each of its descendants

    has left the chain             and is `pending`
    has reached a feedback edge    and is `runnable` again
    was refused by a gate          and is `parked`

The driver of the chain delivers pending items before it pumps on. So a full channel holds the whole chain back.

Time is read once after each call: the engine's own time between two calls counts for the later one. `CallMark` has the
node that is being called, and since when.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from inspect import ismethod
from typing import TYPE_CHECKING, Any

from rollflow.stream.graph.meter import CallTimes, NodeMeter, clock
from rollflow.stream.graph.node import Background, Gate, note_node
from rollflow.stream.graph.port import Edge, Port

if TYPE_CHECKING:
    from rollflow.stream.graph.graph import Graph

Deliver = Callable[[Any], None]


CallMark = list[int] | memoryview
"""Two integers: the time at which the last call ended, in ns, and the number of the node called now (-1: none)."""


class Chain:
    """The chained nodes `names` of a graph, in the order of the flow.

    mark        record of the call under way, with nodes numbered as in `meters`; None: the chain makes one

    runnable    (function to call, item) of items that can go on
    pending     (edge, item, meter of the sender) of items that have left the chain and are to be delivered
    parked      (gate, function to call, item) of items that a gate refused
    background  background nodes of the chain, with their meters
    reopened    whether a gate has said, since the last `unpark`, that it might admit parked items
    on_gate     called when a gate says so
    mark        the record of the call under way; `thread` is that which calls
    """

    def __init__(
        self, graph: "Graph", names: Sequence[str], meters: dict[str, NodeMeter], mark: CallMark | None = None
    ) -> None:
        self.names = list(names)
        self.runnable: deque[tuple[Deliver, Any]] = deque()
        self.pending: deque[tuple[Edge, Any, NodeMeter]] = deque()
        self.parked: list[tuple[Gate, Deliver, Any]] = []
        self.reopened = False
        self.on_gate: Callable[[], None] = _nothing
        self.graph = graph
        for name, take_meter in graph.having("take_meter", names):
            meters[name].counts_itself = True
            take_meter(meters[name])
        self._meters = meters
        self._raised_on: list[Any] = []  # items whose call raised
        # In the order of the flow: later nodes may then take the outputs of earlier ones in the same `collect`.
        self.background: list[tuple[Background, NodeMeter]] = [
            (node, meters[name]) for name in names if (node := graph.nodes[name].background) is not None
        ]
        self.mark = self._mark = [0, -1] if mark is None else mark
        self._mark[1] = -1
        self.thread = 0
        self._numbers = {name: number for number, name in enumerate(meters)}
        self._steps: dict[str, Deliver] = {}
        self._routes: dict[str, Deliver] = {}
        for name in reversed(self.names):
            self._routes[name] = self._route(name)
            self._steps[name] = self._step(name)
        self._gates = [edge.gate for edge in graph.edges if edge.gate is not None and edge.source[0] in self.names]
        for gate in self._gates:
            gate.watch(self._reopen)

    def entry(self, port: Port) -> Deliver:
        """The function that `carry` calls with an item that arrives at an inlet."""
        return self._steps[port[0]]

    @property
    def can_start(self) -> bool:
        """True if a node has a `start()`, which sends the first items."""
        return bool(self.graph.having("start", self.names))

    @property
    def is_done(self) -> bool:
        """True if a node's `done` says that it wants no more items."""
        return any(getattr(self.graph.nodes[name].node, "done", False) for name in self.names)

    def awaits_gates(self) -> bool:
        """True while a gate is not ready for what the nodes' `start()` sends, which is parked there."""
        self.parked = [(gate, _nothing, None) for gate in self._gates if not getattr(gate, "is_ready", True)]
        return bool(self.parked)

    def start(self) -> Iterator[None]:
        """Carry the outputs of the nodes' `start()` through the chain, one at each step of the iterator."""
        return self._carry_all("start")

    def pump_on(self) -> None:
        """Pump until something is pending, a gate has reopened, or nothing is runnable."""
        runnable, pending, mark = self.runnable, self.pending, self._mark
        try:
            while runnable and not pending and not self.reopened:
                deliver, item = runnable.popleft()
                mark[0] = clock()
                deliver(item)
        finally:
            mark[1] = -1

    def carry(self, deliver: Deliver, item: Any) -> None:
        """Carry one item through the chain, starting with the call `deliver(item)`.

        Raises what a node raises, with the node's name noted.
        """
        self._mark[0] = clock()
        self._call(deliver, item)

    def _call(self, deliver: Deliver, item: Any) -> None:
        try:
            deliver(item)
        finally:
            self._mark[1] = -1

    @property
    def under_way(self) -> tuple[str, int]:
        """Name of the node that is being called ("": none), and nanoseconds since the call began. Thread-safe."""
        number, since = self._mark[1], self._mark[0]
        return ("", 0) if number < 0 else (list(self._numbers)[number], max(clock() - since, 0))

    @property
    def in_flight(self) -> int:
        """Number of items with background nodes."""
        return sum(node.in_flight for node, _ in self.background)

    @property
    def unsettled(self) -> int:
        """The same, without those whose node does not say when they come back, by `unsettled`."""
        return sum(getattr(node, "unsettled", node.in_flight) for node, _ in self.background)

    def collect(self) -> bool:
        """Carry the outputs of background nodes through the chain; return True if there were any."""
        found = False
        for node, meter in self.background:
            for output in self._completed(node, meter) if node.in_flight else ():
                found = True
                self._call(self._routes[meter.name], output)
        return found

    def _completed(self, node: Background, meter: NodeMeter) -> list[Any]:
        mark, name = self._mark, meter.name
        mark[0], mark[1] = clock(), self._numbers[name]
        try:
            outputs = list(node.completed())
        except Exception as error:
            note_node(error, name)
            raise
        finally:
            mark[1] = -1
        now = clock()
        if not meter.counts_itself:
            meter.count_work(mark[0], now)
        mark[0] = now
        return outputs

    @property
    def holder(self) -> str | None:
        """The name of the first gate holder that parked items wait for; None: no gate names one."""
        return next((name for gate, _, _ in self.parked if (name := getattr(gate, "holder", None)) is not None), None)

    def hasten(self) -> None:
        """Tell background nodes to return unfinished work as it is: no more items will be asked for."""
        for _, hasten in self.graph.having("hasten", self.names):
            hasten()

    def unpark(self) -> bool:
        """Make parked items runnable that their gates admit now; return True if there were any."""
        self.reopened = False
        parked, self.parked = self.parked, []
        for gate, deliver, item in parked:
            if gate.admits(item):
                self.runnable.append((deliver, item))
            else:
                self.parked.append((gate, deliver, item))
        return len(self.parked) < len(parked)

    def finish(self) -> Iterator[None]:
        """Discard runnable and parked items, then carry the outputs of the nodes' `finish()`, one at each step."""
        self.give_up()
        yield from self._carry_all("finish")
        self.give_up()

    def held(self) -> list[Any]:
        """The items that are to be delivered, and those whose call raised."""
        return [*(item for _, item, _ in self.pending), *self._raised_on]

    def give_up(self) -> None:
        """Discard runnable and parked items."""
        self.runnable.clear()
        self.parked.clear()

    def close(self) -> None:
        """Let go of all items, and of the functions that call the nodes: no more items are carried."""
        self.give_up()
        for items in (self.pending, self._raised_on, self._steps, self._routes):
            items.clear()
        self.on_gate = _nothing
        for gate in self._gates:
            gate.watch(_nothing)

    def _reopen(self) -> None:
        self.reopened = True
        self.on_gate()

    def _carry_all(self, method: str) -> Iterator[None]:
        for name, function in self.graph.having(method, self.names):
            for output in self._outputs_of(name, function):
                self._call(self._routes[name], output)
                yield

    def _outputs_of(self, name: str, function: Callable[[], Iterable[Any] | None]) -> Iterator[Any]:
        """The outputs of a node's `start` or `finish`; the time counts for the node."""
        mark, meter, number = self._mark, self._meters[name], self._numbers[name]
        mark[0], mark[1] = clock(), number
        try:
            for output in function() or ():
                now = clock()
                mark[1] = -1
                meter.count_work(mark[0], now)
                mark[0] = now
                yield output
                mark[0], mark[1] = clock(), number
        except Exception as error:
            note_node(error, name)
            raise
        finally:
            mark[1] = -1
        meter.count_work(mark[0], clock())

    def _step(self, name: str) -> Deliver:
        """A function that calls a node with an item, and routes the output on."""
        spec = self.graph.nodes[name]
        call = _method_of(spec.node)
        meter, mark, route, number = self._meters[name], self._mark, self._routes[name], self._numbers[name]
        busy = NodeMeter(name) if meter.counts_itself else meter
        calls = (
            CallTimes() if spec.background is not None else meter.calls
        )  # to hand an item over is no call of its own
        recent = calls.recent.append

        def step(item: Any) -> None:
            mark[1] = number
            try:
                output = call(item)
            except BaseException as error:
                self._raised_on.append(item)
                note_node(error, name)
                raise
            now = clock()
            took = now - mark[0]
            meter.items += 1
            busy.busy_ns += took
            recent(took)
            if took > calls.longest:
                calls.longest = took
            trace = busy.trace
            if trace is not None:
                trace["busy"](mark[0], now)
            mark[0] = now
            if output is not None:
                route(output)

        return step

    def _route(self, name: str) -> Deliver:
        """A function that delivers a node's output to its outlets' edges."""
        spec = self.graph.nodes[name]
        all_edges = (*self.graph.edges, *self.graph.outputs.values())
        by_port = [
            self._deliver_all([edge for edge in all_edges if edge.source == (name, port)], self._meters[name])
            for port in spec.outlets
        ]
        if not by_port:
            return _nothing
        if not spec.has_fields:
            return by_port[0]
        if len(by_port) == 2:
            return _route_two(*by_port)

        def route(output: Any) -> None:
            for deliver, value in zip(by_port, output, strict=True):
                if value is not None:
                    deliver(value)

        return route

    def _deliver_all(self, edges: Sequence[Edge], meter: NodeMeter) -> Deliver:
        delivers = [self._deliver(edge, meter) for edge in edges]

        def deliver(item: Any) -> None:
            for each in delivers:
                each(item)

        return delivers[0] if len(delivers) == 1 else deliver

    def _deliver(self, edge: Edge, meter: NodeMeter) -> Deliver:
        if not self.graph.is_chained(edge):
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
        step, admits = self._steps[target], gate.admits

        def deliver(item: Any) -> None:
            if admits(item):
                step(item)
            else:
                self.parked.append((gate, step, item))

        return deliver


def _method_of(node: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The `__call__` of an object whose class has one in Python, which takes less time to call; else the node."""
    method: Callable[[Any], Any] = getattr(node, "__call__")  # noqa: B004, B009
    return method if ismethod(method) else node


def _route_two(first: Deliver, second: Deliver) -> Deliver:
    def route(output: Any) -> None:
        one, two = output
        if two is not None:
            second(two)
        if one is not None:
            first(one)

    return route


def _nothing(*outputs: Any) -> None:
    """Do nothing: the default of `on_gate`, and the route of a sink, which has no output."""
