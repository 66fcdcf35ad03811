"""What runs a rollout's ring for a plain loop: the loop's own thread, or an event loop in a thread beside it."""

from contextlib import ExitStack
from types import TracebackType

import anyio
import anyio.from_thread

from rollflow.nodes.pace import FragmentCredits
from rollflow.stream.fragment import Fragment
from rollflow.stream.graph import Graph
from rollflow.stream.inline_run import InlineRun
from rollflow.stream.report import Report


class InlineDrive:
    """Runs the ring in the reader's thread, whenever it asks for a fragment."""

    def __init__(self, ring: Graph, credits: FragmentCredits) -> None:
        self._credits = credits
        self._waiting: list[Fragment] = []
        self._run = InlineRun(ring)
        self._run.__enter__()

    def next(self) -> Fragment | None:
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

    def next(self) -> Fragment | None:
        """The next fragment; None when no more come. Raises what a node raised."""
        try:
            fragment: Fragment = self._portal.call(self._run["fragments"].receive)
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
