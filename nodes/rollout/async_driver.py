"""Driver that runs a rollout's ring on the event loop of its reader."""

from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Any

from rollflow.stream.data.errors import RunError, StallError
from rollflow.stream.graph.graph import Graph
from rollflow.stream.graph.report import Report
from rollflow.stream.graph.run import Run
from rollflow.stream.graph.run_handle import RunHandle
from rollflow.stream.graph.tracing import Traceable
from rollflow.stream.observe.waits import Look
from rollflow.stream.observe.watch import StallRules


class AsyncDriver:
    """Runs the ring as tasks of the event loop that the reader runs in, from `enter` to `leave`.

    rules    of the stall doctor, which watches the rollout as a whole
    """

    def __init__(self, ring: Graph, rules: StallRules) -> None:
        ring.validate()
        self.ring = ring
        self._handle: AbstractAsyncContextManager[Run] = RunHandle(ring, rules=rules)
        self._run: Run | None = None

    async def enter(self) -> None:
        """Start the tasks."""
        self._run = await self._handle.__aenter__()

    async def leave(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        """Cancel what still runs, and close the nodes."""
        return await self._handle.__aexit__(kind, error, traceback)

    @property
    def run(self) -> Run:
        """The run. Raises RunError before `enter`."""
        if self._run is None:
            raise RunError("the rollout's tasks have not started yet: nothing to report")
        return self._run

    @property
    def traceable(self) -> Traceable:
        """Graph, meters and chains of the ring, as far as it has begun, for a trace."""
        return Traceable(self.ring, (), ()) if self._run is None else self._run.doctor.traceable

    async def next(self) -> Any:
        """The next fragment. Raises anyio.EndOfStream when no more come, and what a node raised."""
        return await self.run["fragments"].receive()

    def drain(self) -> None:
        """Stop the environments; `next` gives what is left."""
        self.run.stop()

    def report(self) -> Report:
        """A report of what has been counted so far."""
        return self.run.report()

    def look(self) -> Look | None:
        """What every stage does right now, for the stall doctor; None: it does not run."""
        return None if self._run is None else self._run.doctor.look()

    def end_stalled(self, error: StallError) -> None:
        """Have the run end with this error. From any thread."""
        self.run.doctor.end_stalled(error)
