"""InlineRun: a graph that runs step by step, without an event loop."""

from collections.abc import Iterator
from threading import get_ident
from types import TracebackType
from typing import Any, Self

from rollflow.stream.data.errors import GraphError, RunError
from rollflow.stream.graph.background import Waiter
from rollflow.stream.graph.chain import CallMark, Chain
from rollflow.stream.graph.graph import Graph
from rollflow.stream.graph.meter import NodeMeter, clock
from rollflow.stream.graph.node import close_nodes
from rollflow.stream.graph.report import Report, report_of
from rollflow.stream.graph.run_doctor import look_of_inline_run
from rollflow.stream.graph.tracing import Traceable
from rollflow.stream.graph.wakeup import Wakeup
from rollflow.stream.observe.waits import CALLER, Look


class InlineRun:
    """Runs a graph of synchronous, inline nodes in the caller's thread, while the caller asks for outputs.

        bell            rung by another thread to make `next_outputs` return, even without outputs
        mark            record of the call under way, for others to read: see `CallMark`
        interruption    rung by `interrupt`; None: a wait for a background node goes on until the node has something

        caller    meter of the code that asks for the outputs
        meters    meters of the nodes, in the order in which they were added to the graph; `meters_by_name` by name
        chain     the chain of all nodes
        is_starting    whether the nodes' `start` is under way, and the caller waits for it

    `next_outputs` raises a node's error, or KeyboardInterrupt, as it is; after that, RunError.

    A context manager, which closes the nodes at its end. Raises GraphError for a graph that needs an event loop.
    """

    def __init__(
        self,
        graph: Graph,
        bell: Wakeup | None = None,
        mark: CallMark | None = None,
        interruption: Wakeup | None = None,
    ) -> None:
        graph.validate()
        if not can_run_inline(graph):
            raise GraphError(
                f"graph '{graph.name}' needs an event loop: expected synchronous, inline, chained nodes alone"
            )
        self.graph = graph
        self.meters_by_name = graph.meters()
        self.caller = NodeMeter(CALLER)
        self.meters = list(self.meters_by_name.values())
        self.chain = Chain(graph, graph.flow_order(), self.meters_by_name, mark)
        self.is_starting = False
        self._failure: BaseException | None = None
        self._waiter = Waiter(self.chain.background, *(each for each in (bell, interruption) if each is not None))
        self._bell, self._interruption = bell, interruption
        self._state = "new"
        self._is_interrupted = False
        self._steps: Iterator[None] | None = None  # over the outputs of the nodes' `start` or `finish`
        self._began = clock()
        self._ended_at: int | None = None

    def __enter__(self) -> Self:
        if self._state != "new":
            raise RunError(f"graph '{self.graph.name}' has been run before; a run is for once")
        self._state = "running"
        self._began = clock()
        self.chain.thread = get_ident()
        self.is_starting = self._bell is None
        try:
            self._steps = self.chain.start()
            while not self.chain.pending and not self._is_interrupted and self._step():
                pass
        except BaseException:
            self.close()
            raise
        finally:
            self.is_starting = False
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def next_outputs(self) -> list[tuple[str, Any]]:
        """Run until there are outputs, and return them: pairs (name of the output, item).

        The list is empty when every item is parked at a gate, or the run has ended.
        """
        if self._state not in ("running", "finished"):
            raise RunError(f"graph '{self.graph.name}' is not running: it is {self._state}")
        self.caller.begin_wait()
        try:
            outputs = self.next_outputs_unmetered()
        finally:
            self.caller.end_wait()
        self.caller.items += len(outputs)
        if outputs or not self.has_ended:
            self.caller.begin_life()
        else:
            self.stop_clock()
        return outputs

    def next_outputs_unmetered(self) -> list[tuple[str, Any]]:
        """`next_outputs` for a thread that passes the outputs on, to a reader that `caller` measures."""
        if self._failure is not None:
            failure = f"{type(self._failure).__name__}: {self._failure}"
            raise RunError(
                f"graph '{self.graph.name}' can't go on: it has failed with {failure}; expected another one to be made"
            ) from self._failure
        self.chain.thread = get_ident()
        try:
            return self._outputs()
        except BaseException as error:
            self._failure = error
            raise

    def _outputs(self) -> list[tuple[str, Any]]:
        chain = self.chain
        while not chain.pending and not self._is_interrupted:
            if self._steps is not None and self._step():
                if self._bell is not None:
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
            elif (chain.background and chain.in_flight) or (chain.parked and self._bell is not None):
                self._waiter.wait()
                if self._bell is not None:
                    break
            elif chain.parked or self._state == "finished":
                return []
            else:
                self.finish()
        outputs = [(edge.target[1], item) for edge, item, _ in chain.pending]
        chain.pending.clear()
        return outputs

    def interrupt(self) -> None:
        """Make `next_outputs` return once the nodes are done with the current item. Thread-safe."""
        self._is_interrupted = True
        self.chain.reopened = True  # ends `pump_on`
        if self._interruption is not None:
            self._interruption.ring()

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
                self._waiter.wait()
            chain.give_up()
            yield
        yield from chain.finish()

    @property
    def is_in_call(self) -> bool:
        """True while a node is being called, rather than waited for. From any thread."""
        return self.chain.mark[1] >= 0

    def look(self) -> Look | None:
        """What every node and the reader do right now, for the stall doctor; None: it does not run."""
        return look_of_inline_run(self) if self._state in ("running", "finished") else None

    @property
    def traceable(self) -> Traceable:
        """Graph, meters and chain, for a trace."""
        return Traceable(self.graph, self.meters, [self.chain])

    def report(self) -> Report:
        """A report of the counts so far."""
        elapsed = (clock() if self._ended_at is None else self._ended_at) - self._began
        under_way = dict([self.chain.under_way])
        meters = [*self.meters_by_name.values(), self.caller]
        pieces, notes = self.graph.slowest_pieces(), self.graph.report_notes()
        return report_of(elapsed, meters, [], under_way=under_way, pieces=pieces, notes=notes)

    def close(self) -> None:
        """Call every node's `close()`, and let go of all items. A second call does nothing."""
        if self._state != "closed":
            self._state = "closed"
            if self._bell is None:
                self.stop_clock()
            self._failure = self._steps = None  # an error's traceback refers to this run
            try:
                close_nodes(self.graph)
            finally:
                self.chain.close()

    def stop_clock(self) -> None:
        """Count no more; what the caller does from now on is none of this run's.

        A thread that has a bell leaves this to the reader of its outputs, who may be behind.
        """
        if self._ended_at is None:
            self._ended_at = clock()
            self.caller.end_life()


def can_run_inline(graph: Graph) -> bool:
    """True if every node is synchronous and inline, and every edge but the outputs is chained."""
    return all(graph.is_chained(edge) for edge in graph.edges) and all(
        not spec.is_async and graph.place_of(name) == "inline" for name, spec in graph.nodes.items()
    )
