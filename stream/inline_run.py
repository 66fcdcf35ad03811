"""Running a graph step by step, without an event loop."""

from collections.abc import Iterator
from types import TracebackType
from typing import Any, Self

from rollflow.stream.background import Waiter
from rollflow.stream.bell import Bell
from rollflow.stream.chain import Chain
from rollflow.stream.errors import GraphError, RunError
from rollflow.stream.graph import Graph
from rollflow.stream.meter import NodeMeter, clock
from rollflow.stream.report import CALLER, Report, report_of
from rollflow.stream.run import close_nodes


class InlineRun:
    """A graph of synchronous, inline nodes, run step by step by whoever asks for its outputs; no event loop.

    Errors come straight out of `next_outputs`, with their own traceback. A context manager: leaving it closes the
    nodes. Raises GraphError for a graph that needs an event loop.

        bell    rung by another thread that wants `next_outputs` to come back, be it with nothing

        caller    measures whoever asks for the outputs
    """

    def __init__(self, graph: Graph, bell: Bell | None = None) -> None:
        graph.validate()
        if not can_run_inline(graph):
            raise GraphError(
                f"graph '{graph.name}' needs an event loop: expected synchronous, inline, chained nodes alone"
            )
        self.graph = graph
        self._meters = {name: NodeMeter(name) for name in graph.nodes}
        self.caller = NodeMeter(CALLER)
        self._chain = Chain(graph, graph.flow_order(), self._meters)
        self._waiter = Waiter(self._chain.background, bell)
        self._bell = bell
        self._state = "new"
        self._is_interrupted = False
        self._steps: Iterator[None] | None = None  # of what is given by the nodes' `start` or `finish`
        self._began = clock()
        self._ended_at: int | None = None

    def __enter__(self) -> Self:
        if self._state != "new":
            raise RunError(f"graph '{self.graph.name}' has been run before; a run is for once")
        self._state = "running"
        self._began = clock()
        try:
            self._steps = self._chain.start()
            while not self._chain.pending and self._step():
                pass
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def next_outputs(self) -> list[tuple[str, Any]]:
        """Run until something comes out: (name of the output, item), at least one unless nothing can come any more now.

        Nothing comes once every item is parked at a gate, or all has ended.
        """
        if self._state not in ("running", "finished"):
            raise RunError(f"graph '{self.graph.name}' is not running: it is {self._state}")
        self.caller.begin_wait()
        try:
            given = self.next_outputs_unmetered()
        finally:
            self.caller.end_wait()
        self.caller.items += len(given)
        self.caller.begin_life()
        return given

    def next_outputs_unmetered(self) -> list[tuple[str, Any]]:
        """The same, for a thread that hands the outputs to somebody else, whose time `caller` is to measure."""
        chain = self._chain
        while not chain.pending:
            if self._steps is not None and self._step():
                if self._bell is not None:
                    break  # whoever rings it is to be heard between two steps
                continue
            if self._is_interrupted:
                break
            if chain.reopened:
                chain.unpark()
            if chain.runnable:
                chain.pump_on()
            elif chain.background and chain.collect():
                continue
            elif chain.parked and chain.unpark():
                continue
            elif (chain.background and chain.in_flight) or (chain.parked and self._bell is not None):
                self._waiter.wait()
                if self._bell is not None:
                    break
            elif chain.parked or self._state == "finished":
                return []
            else:
                self.finish()
        given = [(edge.target[1], item) for edge, item, _ in chain.pending]
        chain.pending.clear()
        return given

    def interrupt(self) -> None:
        """Have `next_outputs` return once the nodes are done with the item that they are at. From any thread."""
        self._is_interrupted = True
        self._chain.reopened = True  # so that it looks up

    def _step(self) -> bool:
        """Carry one more item of what the nodes' `start` or `finish` give; whether there was one."""
        for _ in self._steps or ():
            return True
        self._steps = None
        return False

    @property
    def has_ended(self) -> bool:
        """Whether nothing more will come."""
        return self._state != "running" and self._steps is None and not self._chain.pending

    def finish(self) -> None:
        """Stop the sources; what the nodes still hold comes out of `next_outputs`."""
        if self._state == "running":
            self._state = "finished"
            self._steps = self._finish()

    def _finish(self) -> Iterator[None]:
        chain = self._chain
        chain.give_up()
        chain.hasten()
        while chain.in_flight:
            if not chain.collect() and chain.in_flight:
                self._waiter.wait()
            chain.give_up()
            yield
        yield from chain.finish()

    def report(self) -> Report:
        """What has been counted so far."""
        elapsed = (clock() if self._ended_at is None else self._ended_at) - self._began
        return report_of(elapsed, [*self._meters.values(), self.caller], [])

    def close(self) -> None:
        """Call every node's `close()`; again does nothing."""
        if self._state != "closed":
            self._state = "closed"
            self.caller.end_life()
            self._ended_at = clock()
            close_nodes(self.graph)


def can_run_inline(graph: Graph) -> bool:
    """Whether every node is synchronous and inline, and every edge but the outputs is chained."""
    return all(graph.is_chained(edge) for edge in graph.edges) and all(
        not spec.is_async and spec.where == "inline" for spec in graph.nodes.values()
    )
