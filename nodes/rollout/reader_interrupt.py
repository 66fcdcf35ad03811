"""Interruption of a reader that stands still within a run in its own thread."""

import signal
import threading
from types import TracebackType
from typing import Self

from rollflow.stream.data.errors import StallError
from rollflow.stream.graph.inline_run import InlineRun
from rollflow.stream.graph.interrupts import can_interrupt

_UNWOUND_S = 1.0  # for which a call that was broken off may take to unwind


class ReaderInterrupt:
    """A block of the reader in which `end`, from another thread, raises an error.

    run    that the reader drives within the block

    A wait for threads, workers or hosts ends at once. A call in the main thread is broken off as Ctrl-C would, where
    that has Python's own handler. Any other call can't be broken off: the error is raised once it comes back.
    """

    def __init__(self, run: InlineRun) -> None:
        self._run = run
        self._error: StallError | None = None
        self._thread = 0
        self._left = threading.Event()

    def __enter__(self) -> Self:
        self._left.clear()
        self._thread = threading.get_ident()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._thread = 0
        self._left.set()
        stalled, self._error = self._error, None
        if stalled is not None and (error is None or isinstance(error, KeyboardInterrupt)):
            raise stalled from None

    def end(self, error: StallError) -> None:
        """Have the block raise this error. From any thread."""
        if not self._thread:
            return
        self._error = error
        self._run.interrupt()
        for _ in range(2):  # a first one is held back where an item might be lost
            thread = self._thread
            if thread == threading.main_thread().ident and self._run.is_in_call and can_interrupt():
                signal.pthread_kill(thread, signal.SIGINT)
                self._left.wait(_UNWOUND_S)
