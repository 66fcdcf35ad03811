"""What runs a rollout's ring for a plain loop: the loop's own thread, or one beside it, with or without event loop."""

import logging
import threading
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from queue import SimpleQueue
from time import monotonic
from types import TracebackType
from typing import Any, Protocol

import anyio
import anyio.from_thread

from rollflow.nodes.pace import FragmentCredits
from rollflow.nodes.workers.worker_process import CLOSE_TIMEOUT_S
from rollflow.stream.bell import Bell
from rollflow.stream.graph import Graph
from rollflow.stream.inline_run import InlineRun
from rollflow.stream.report import Report

logger = logging.getLogger(__name__)

_NODES_CLOSE_S = 2 * CLOSE_TIMEOUT_S  # which have limits of their own, as for worker processes


class Drive(Protocol):
    """Runs a rollout's ring; told of fragments that are done with, it may go on."""

    def __init__(self, ring: Graph, credits: FragmentCredits) -> None: ...

    def next(self) -> Any:
        """The next fragment; None when no more come. Raises what a node raised."""
        ...

    def release(self, fragments: int) -> None:
        """Say that so many fragments are done with."""
        ...

    def drain(self) -> None:
        """Stop the environments; `next` gives what is left."""
        ...

    def report(self) -> Report:
        """What has been counted so far."""
        ...

    def close(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End, and close the nodes."""
        ...


class InlineDrive:
    """Runs the ring in the reader's thread, whenever it asks for a fragment."""

    def __init__(self, ring: Graph, credits: FragmentCredits) -> None:
        self._credits = credits
        self._waiting: list[Any] = []
        self._run = InlineRun(ring)
        self._run.__enter__()

    def next(self) -> Any:
        """The next fragment; None when no more come."""
        if not self._waiting:
            self._waiting = [fragment for _, fragment in self._run.next_outputs()]
        return self._waiting.pop(0) if self._waiting else None

    def release(self, fragments: int) -> None:
        """Say that so many fragments are done with."""
        self._credits.release(fragments)

    def drain(self) -> None:
        """Stop the environments; `next` gives what is left."""
        self._run.finish()

    def report(self) -> Report:
        """What has been counted so far."""
        return self._run.report()

    def close(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close the nodes."""
        self._run.close()


class ThreadDrive:
    """Runs the ring in a thread of its own, so that it can go on while the reader is at work."""

    def __init__(self, ring: Graph, credits: FragmentCredits) -> None:
        self._credits = credits
        self._bell = Bell()
        self._run = InlineRun(ring, self._bell)
        self._fragments: SimpleQueue[Any] = SimpleQueue()  # None: there are no more
        self._commands: deque[Callable[[], None]] = deque()
        self._error: BaseException | None = None
        self._is_closed = False
        self._has_stopped = threading.Event()
        self._thread = threading.Thread(target=self._work, name="rollflow ring", daemon=True)
        self._thread.start()

    def next(self) -> Any:
        """The next fragment; None when no more come. Raises what a node raised."""
        caller = self._run.caller
        caller.begin_wait()
        try:
            fragment = self._fragments.get()
        finally:
            caller.end_wait()
        caller.begin_life()
        if fragment is None:
            self._fragments.put(None)
            self._raise()
            return None
        caller.items += 1
        return fragment

    def release(self, fragments: int) -> None:
        """Say that so many fragments are done with."""
        self._command(lambda: self._credits.release(fragments))

    def drain(self) -> None:
        """Stop the environments; `next` gives what is left."""
        self._command(self._run.finish)

    def report(self) -> Report:
        """What has been counted so far."""
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
            what = "a node has not closed" if self._has_stopped.is_set() else "an environment or the module hangs"
            logger.warning("the rollout's thread is left behind: %s after %.1f s", what, monotonic() - began)
            return
        self._bell.close()
        if error is None:
            self._raise()

    def _raise(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error

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
        self._fragments.put(None)

    def _go_on(self, run: InlineRun) -> None:
        """Make fragments until told to stop, or no more come."""
        try:
            while not (self._is_closed or run.has_ended):
                while self._commands:
                    self._commands.popleft()()
                for _, fragment in run.next_outputs_unmetered():
                    self._fragments.put(fragment)
        finally:
            self._has_stopped.set()


class PortalDrive:
    """Runs the ring on an event loop in another thread, so that it can go on while the reader is at work."""

    def __init__(self, ring: Graph, credits: FragmentCredits) -> None:
        self._credits = credits
        self._stack = ExitStack()
        with ExitStack() as opening:
            self._portal = opening.enter_context(anyio.from_thread.start_blocking_portal())
            self._run = opening.enter_context(self._portal.wrap_async_context_manager(ring.run()))
            self._stack = opening.pop_all()
        self._is_open = True

    def next(self) -> Any:
        """The next fragment; None when no more come. Raises what a node raised."""
        try:
            fragment: Any = self._portal.call(self._run["fragments"].receive)
        except anyio.EndOfStream:
            return None
        except Exception:
            self.close(None, None, None)  # raises what was raised there
            raise
        return fragment

    def release(self, fragments: int) -> None:
        """Say that so many fragments are done with."""
        self._portal.call(self._credits.release, fragments)

    def drain(self) -> None:
        """Stop the environments; `next` gives what is left."""
        self._portal.call(self._run.stop)

    def report(self) -> Report:
        """What has been counted so far."""
        return self._run.report()

    def close(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Cancel what still runs, close the nodes, and end the event loop and its thread."""
        if self._is_open:
            self._is_open = False
            self._stack.__exit__(kind, error, traceback)
