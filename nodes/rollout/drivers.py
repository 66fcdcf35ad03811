"""Drivers that run a rollout's ring: in its reader's thread or beside it, with or without event loop."""

import logging
import signal
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager
from time import monotonic
from types import TracebackType
from typing import Any, Protocol, TypeVar

import anyio
import anyio.from_thread

from rollflow.nodes.env.workers.worker_process import CLOSE_TIMEOUT_S
from rollflow.nodes.stages.credits import FragmentCredits
from rollflow.stream.data.errors import RunError, StallError
from rollflow.stream.graph.graph import Graph
from rollflow.stream.graph.inline_run import InlineRun
from rollflow.stream.graph.report import Report
from rollflow.stream.graph.run import Run, RunHandle
from rollflow.stream.graph.tracing import Traceable
from rollflow.stream.graph.wakeup import Wakeup
from rollflow.stream.observe.waits import Look
from rollflow.stream.observe.watch import StallRules

T = TypeVar("T")

logger = logging.getLogger(__name__)

_NODES_CLOSE_S = 2 * CLOSE_TIMEOUT_S  # which have limits of their own, as for worker processes


class Driver(Protocol):
    """Runs a rollout's ring, as far as the credits let it. One thread asks for fragments; any may close it."""

    ring: Graph

    def __init__(self, ring: Graph, credits: FragmentCredits, rules: StallRules) -> None: ...

    @property
    def traceable(self) -> Traceable:
        """Graph, meters and chains of the ring, as far as it has begun, for a trace."""
        ...

    def start(self) -> None:
        """Begin, once; `report` may come before. Raises what a node raised."""
        ...

    def next(self) -> Any:
        """The next fragment; None when no more come, or it was closed. Raises what a node raised."""
        ...

    def release(self, lanes: Sequence[int]) -> None:
        """Give back the credits of fragments, by their lanes."""
        ...

    def drain(self) -> None:
        """Stop the environments; `next` gives what is left."""
        ...

    def report(self) -> Report:
        """A report of what has been counted so far."""
        ...

    def look(self) -> Look | None:
        """What every stage does right now, for the stall doctor; None: it does not run. From any thread."""
        ...

    def end_stalled(self, error: StallError) -> None:
        """Have `next` raise this error, as soon as it can. From any thread."""
        ...

    def close(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End, and close the nodes."""
        ...


class InlineDriver:
    """Runs the ring in the reader's thread, whenever it asks for a fragment.

    A stall ends a wait for threads, workers or hosts at once. It breaks off a call in the main thread as Ctrl-C would,
    if that has Python's own handler. Any other call raises the error once it returns.
    """

    def __init__(self, ring: Graph, credits: FragmentCredits, rules: StallRules) -> None:
        self.ring, self._credits = ring, credits
        self._waiting: list[Any] = []
        self._interruption = Wakeup()
        self._run = InlineRun(ring, interruption=self._interruption)
        self._stalled: StallError | None = None
        self._reader = 0  # thread that drives the run now; 0: none
        self._reading = threading.Lock()  # held while `_reader` is cleared, or is broken off
        self._at_work = threading.RLock()  # held while the ring runs; `close` may come from another thread
        self._is_closed = self._is_left = False

    def start(self) -> None:
        """Have the environments reset, and the first actions made. Raises RunError where it was closed meanwhile."""
        with self._at_work:
            self._drive(self._run.__enter__)
            if self._is_left:
                self._end()
        if self._is_closed:
            raise RunError("the rollout was closed while its environments were being reset")

    def next(self) -> Any:
        """The next fragment; None when no more come, or it was closed."""
        with self._at_work:
            try:
                if not self._waiting and not self._is_closed:
                    self._waiting = [fragment for _, fragment in self._drive(self._run.next_outputs)]
            finally:
                if self._is_left:
                    self._end()
        return self._waiting.pop(0) if self._waiting else None

    def _drive(self, function: Callable[[], T]) -> T:
        """Call a function of the run. Raises the StallError that ends it."""
        self._reader = threading.get_ident()
        try:
            try:
                result = function()
            finally:
                with self._reading:
                    self._reader = 0
        except (Exception, KeyboardInterrupt) as error:
            if self._stalled is None:
                raise
            self._reader = 0
            raise self._stalled from None if isinstance(error, KeyboardInterrupt) else error
        if self._stalled is not None:
            raise self._stalled
        return result

    @property
    def traceable(self) -> Traceable:
        """Graph, meters and chain of the ring, for a trace."""
        return self._run.traceable

    def release(self, lanes: Sequence[int]) -> None:
        """Give back the credits of fragments, by their lanes."""
        self._credits.release(lanes)

    def drain(self) -> None:
        """Stop the environments; `next` gives what is left."""
        self._run.finish()

    def look(self) -> Look | None:
        """What every stage does right now, for the stall doctor; None: it does not run. From any thread."""
        return self._run.look()

    def end_stalled(self, error: StallError) -> None:
        """Have `next` raise this error, as soon as it can. From any thread."""
        with self._reading:
            if not self._reader:
                return
            self._stalled = error
            self._run.interrupt()
            is_in_main_thread = self._reader == threading.main_thread().ident
            raises = signal.getsignal(signal.SIGINT) is signal.default_int_handler
            if is_in_main_thread and raises and self._run.is_in_call:
                signal.pthread_kill(self._reader, signal.SIGINT)

    def report(self) -> Report:
        """A report of what has been counted so far."""
        return self._run.report()

    def close(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close the nodes, once the reader's thread is done with the item that it is at.

        Where that hangs, the reader's thread closes them when it comes back, which is logged.
        """
        self._is_closed = True
        self._run.interrupt()
        self._is_left = not self._at_work.acquire(timeout=CLOSE_TIMEOUT_S)
        if self._is_left and not self._at_work.acquire(blocking=False):
            logger.warning(
                "the rollout is left to the thread of its loop: an environment or the module hangs after %.1f s",
                CLOSE_TIMEOUT_S,
            )
            return
        try:
            self._end()
        finally:
            self._at_work.release()

    def _end(self) -> None:
        self._run.close()
        self._interruption.close()
        self._waiting = []


class ThreadDriver:
    """Runs the ring in a thread of its own, so that it can go on while the reader is at work."""

    def __init__(self, ring: Graph, credits: FragmentCredits, rules: StallRules) -> None:
        self.ring, self._credits = ring, credits
        self._bell = Wakeup()
        self._run = InlineRun(ring, self._bell)
        self._fragments: deque[Any] = deque()  # None: there are no more
        self._commands: deque[Callable[[], None]] = deque()
        self._error: BaseException | None = None
        self._stalled: StallError | None = None
        self._is_closed = False
        self._has_stopped = threading.Event()
        self._arrived = threading.Event()
        self._thread = threading.Thread(target=self._work, name="rollflow ring", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def next(self) -> Any:
        """The next fragment; None when no more come. Raises what a node raised."""
        caller = self._run.caller
        caller.begin_wait()
        try:
            self._wait_for_some()
        finally:
            caller.end_wait()
        if self._stalled is not None:
            raise self._stalled
        fragment = self._fragments[0]
        if fragment is None:
            caller.end_life()
            self._raise()
            return None
        caller.begin_life()
        self._fragments.popleft()
        caller.items += 1
        return fragment

    def _wait_for_some(self) -> None:
        while not self._fragments:
            self._arrived.wait()
            self._arrived.clear()

    def _put(self, fragment: Any) -> None:
        self._fragments.append(fragment)
        self._arrived.set()

    @property
    def traceable(self) -> Traceable:
        """Graph, meters and chain of the ring, for a trace."""
        return self._run.traceable

    def release(self, lanes: Sequence[int]) -> None:
        """Give back the credits of fragments, by their lanes."""
        self._command(lambda: self._credits.release(lanes))

    def drain(self) -> None:
        """Stop the environments; `next` gives what is left."""
        self._command(self._run.finish)

    def look(self) -> Look | None:
        """What every stage does right now, for the stall doctor; None: it does not run. From any thread."""
        return self._run.look()

    def end_stalled(self, error: StallError) -> None:
        """Have `next` raise this error, as soon as it can. From any thread."""
        self._stalled = error
        self._put(None)

    def report(self) -> Report:
        """A report of what has been counted so far."""
        return self._run.report()

    def close(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Have the thread stop where it is and close the nodes, and wait until it has. Raises what nobody has seen.

        One whose environments or module hang is left behind, which is logged.
        """
        if self._is_closed:
            return
        self._is_closed, began = True, monotonic()
        self._run.interrupt()
        self._bell.ring()
        if self._has_stopped.wait(CLOSE_TIMEOUT_S):
            self._thread.join(_NODES_CLOSE_S)
        if self._thread.is_alive():
            self._put(None)  # a reader that waits waits no more
            what = "a node has not closed" if self._has_stopped.is_set() else "an environment or the module hangs"
            logger.warning("the rollout's thread is left behind: %s after %.1f s", what, monotonic() - began)
            return
        self._bell.close()
        self._fragments = deque([None])
        if error is None:
            self._raise()
        self._error = None

    def _raise(self) -> None:
        error, self._error = self._error, None
        try:
            if error is not None:
                raise error
        finally:
            del error  # whose traceback refers to this frame

    def _command(self, command: Callable[[], None]) -> None:
        if not self._is_closed:
            self._commands.append(command)
            self._bell.ring()

    def _work(self) -> None:
        try:
            with self._run as run:
                self._go_on(run)
        except BaseException as error:
            self._error = error
        self._has_stopped.set()
        self._put(None)

    def _go_on(self, run: InlineRun) -> None:
        """Make fragments until the driver is closed, or no more come."""
        try:
            while not (self._is_closed or run.has_ended):
                while self._commands:
                    self._commands.popleft()()
                for _, fragment in run.next_outputs_unmetered():
                    self._put(fragment)
                    del fragment  # which this frame would hold, in the traceback of an error
        finally:
            self._has_stopped.set()


class PortalDriver:
    """Runs the ring on an event loop in another thread, so that it can go on while the reader is at work."""

    def __init__(self, ring: Graph, credits: FragmentCredits, rules: StallRules) -> None:
        self._credits = credits
        self._stack = ExitStack()
        self.ring, self._rules = ring, rules
        self._run: Any = None
        self._is_open = False

    def start(self) -> None:
        """Start the thread and its event loop."""
        self.ring.validate()
        with ExitStack() as opening:
            self._portal = opening.enter_context(anyio.from_thread.start_blocking_portal())
            opening.enter_context(self._portal.wrap_async_context_manager(self._running()))
            self._stack = opening.pop_all()
        self._is_open = True

    @asynccontextmanager
    async def _running(self) -> AsyncIterator[None]:
        """Run the ring, of which there is a report from before its nodes begin on."""
        async with RunHandle(self.ring, rules=self._rules) as self._run:
            yield

    def next(self) -> Any:
        """The next fragment; None when no more come, or it was closed. Raises what a node raised."""
        try:
            return self._portal.call(self._run["fragments"].receive)
        except anyio.EndOfStream:
            return None
        except Exception:
            self.close(None, None, None)  # raises what was raised there
            raise

    @property
    def traceable(self) -> Traceable:
        """Graph, meters and chains of the ring, as far as it has begun, for a trace."""
        return Traceable(self.ring, (), ()) if self._run is None else self._run.doctor.traceable

    def release(self, lanes: Sequence[int]) -> None:
        """Give back the credits of fragments, by their lanes."""
        self._portal.call(self._credits.release, lanes)

    def drain(self) -> None:
        """Stop the environments; `next` gives what is left."""
        self._portal.call(self._run.stop)

    def look(self) -> Look | None:
        """What every stage does right now, for the stall doctor; None: it does not run. From any thread."""
        return None if self._run is None else self._run.doctor.look()

    def end_stalled(self, error: StallError) -> None:
        """Have `next` raise this error, as soon as it can. From any thread."""
        if self._run is not None:
            self._run.doctor.end_stalled(error)

    def report(self) -> Report:
        """A report of what has been counted so far."""
        if self._run is None:
            raise RunError("the rollout's event loop has not started yet: nothing to report")
        report: Report = self._run.report()
        return report

    def close(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Cancel what still runs, close the nodes, and end the event loop and its thread."""
        if self._is_open:
            self._is_open = False
            self._stack.__exit__(kind, error, traceback)


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
