"""InlineRun: a graph that runs step by step, without an event loop."""

from collections.abc import Iterator
from contextlib import nullcontext
from threading import get_ident
from typing import Any, Self

from rollflow.stream.data.closing import closing_on_error
from rollflow.stream.data.errors import GraphError, RunError
from rollflow.stream.graph.background import wait_for_any
from rollflow.stream.graph.chain import CallMark, Chain
from rollflow.stream.graph.counters import RunCounters
from rollflow.stream.graph.graph import Graph
from rollflow.stream.graph.meter import clock
from rollflow.stream.graph.node import close_nodes
from rollflow.stream.graph.wakeup import Wakeup
from rollflow.stream.observe.waits import Look


class InlineRun:
    """Runs a graph of synchronous, inline nodes in the caller's thread, while the caller asks for outputs.

        mark            record of the call under way, for others to read: see `CallMark`
        is_answering    whether `next_outputs` returns if the bell rings, and between two steps, even without outputs

        bell        ends a wait for background nodes, rung from another thread
        counters    meters of the nodes; who asks for the outputs counts by that of the caller
        chain       the chain of all nodes

    `next_outputs` raises a node's error, or KeyboardInterrupt, as it is; then the run can only be closed.

    A context manager, which closes the nodes at its end. Raises GraphError for a graph that needs an event loop.
    """

    def __init__(self, graph: Graph, mark: CallMark | None = None, *, is_answering: bool = False) -> None:
        graph.validate()
        is_inline = all(not spec.is_async and graph.place_of(name) == "inline" for name, spec in graph.nodes.items())
        if not is_inline or not all(map(graph.is_chained, graph.edges)):
            raise GraphError(
                f"graph '{graph.name}' needs an event loop: expected synchronous, inline, chained nodes alone"
            )
        self.graph = graph
        self.counters = RunCounters(graph)
        self.chain = Chain(graph, graph.flow_order(), self.counters.nodes, mark)
        self.counters.chains.append(self.chain)
        self.bell, self._is_answering = Wakeup(), is_answering
        self._state = "new"
        self._is_interrupted = False
        self._steps: Iterator[None] | None = None  # over the outputs of the nodes' `start` or `finish`

    def __enter__(self) -> Self:
        if self._state != "new":
            raise RunError(f"graph '{self.graph.name}' has been run before; a run is for once")
        self._state = "running"
        self.counters.began = clock()
        self.counters.live.add(self.chain.names[0])
        self.chain.thread = get_ident()
        waits = nullcontext() if self._is_answering else self.counters.caller.waits()
        with closing_on_error(self.close), waits:
            self._steps = self.chain.start()
            while not self.chain.pending and not self._is_interrupted and self._step():
                pass
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def next_outputs(self) -> list[tuple[str, Any]]:
        """Run until there are outputs, and return them: pairs (name of the output, item).

        The list is empty when every item is parked at a gate, or the run has ended.
        """
        if self._state not in ("running", "finished"):
            raise RunError(f"graph '{self.graph.name}' is not running: it is {self._state}")
        chain = self.chain
        chain.thread = get_ident()
        while not chain.pending and not self._is_interrupted:
            if self._steps is not None and self._step():
                if self._is_answering:
                    break  # a thread that rings it is answered between two steps
                continue
            if chain.reopened:
                chain.unpark()
            if chain.runnable:
                chain.pump_on()
            elif chain.background and chain.collect():
                continue
            elif chain.parked and chain.unpark():
                continue
            elif (chain.background and chain.in_flight) or (chain.parked and self._is_answering):
                wait_for_any(self.chain.background, self.bell)
                if self._is_answering:
                    break
            elif chain.parked or self._state == "finished":
                return []
            else:
                self.finish()
        outputs = [(edge.target[1], item) for edge, item, _ in chain.pending]
        chain.pending.clear()
        return outputs

    def settle(self) -> None:
        """Run until every item is parked at a gate that lets none pass, or is away, and keep the outputs.

        Raises RunError if it is interrupted meanwhile.
        """
        chain = self.chain
        while self._steps is not None or chain.runnable or chain.unsettled:
            if self._is_interrupted:
                raise RunError(f"graph '{self.graph.name}' is being closed")
            if self._steps is not None:
                self._step()
            elif chain.runnable:
                chain.carry(*chain.runnable.popleft())
            elif not chain.collect():
                wait_for_any(chain.background, self.bell)

    def interrupt(self) -> None:
        """Make `next_outputs` return once the nodes are done with the current item. Thread-safe."""
        self._is_interrupted = True
        self.chain.reopened = True  # ends `pump_on`
        self.bell.ring()

    def _step(self) -> bool:
        """Carry one more output of the nodes' `start` or `finish`; return True if there was one."""
        for _ in self._steps or ():
            return True
        self._steps = None
        return False

    @property
    def has_ended(self) -> bool:
        """True if no more outputs will come."""
        return self._state != "running" and self._steps is None and not self.chain.pending

    def finish(self) -> None:
        """Stop the sources; `next_outputs` then returns the items that the nodes still hold."""
        if self._state == "running":
            self._state = "finished"
            self._steps = self._finish()

    def _finish(self) -> Iterator[None]:
        chain = self.chain
        chain.give_up()
        chain.hasten()
        while chain.in_flight:
            if not chain.collect() and chain.in_flight:
                wait_for_any(self.chain.background, self.bell)
            chain.give_up()
            yield
        yield from chain.finish()

    def look(self) -> Look | None:
        """What every node and the reader do right now, for the stall doctor; None: it does not run."""
        return self.counters.look() if self._state in ("running", "finished") else None

    def close(self) -> None:
        """Call every node's `close()`, and let go of all items. A second call does nothing."""
        if self._state != "closed":
            self._state = "closed"
            self._steps = None
            try:
                close_nodes(self.graph)
            finally:
                self.chain.close()
                self.bell.close()
