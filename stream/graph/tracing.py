"""Tracing: the trace of a run, which begins with the run, or when somebody asks for one."""

import select
import socket
import weakref
from collections.abc import Callable
from contextlib import suppress
from os import PathLike
from threading import RLock
from typing import BinaryIO

from rollflow.stream.graph.counters import RunCounters
from rollflow.stream.graph.meter import NodeTrace, clock
from rollflow.stream.observe.trace import FragmentTrace, Trace, open_trace


class Tracing:
    """Has the meters and nodes of a run write a trace, one at a time.

    Nodes that have a method `take_trace(name, trace)` are given their name and a `FragmentTrace`, and None at its end.

    counters     of the run

    fragments    the trace of a rollout's own lanes; None: nothing is traced
    """

    def __init__(self, counters: RunCounters) -> None:
        self.fragments: FragmentTrace | None = None
        self._counters = counters
        self._trace: Trace | None = None
        self._file: BinaryIO | None = None  # of the trace that began last
        self._rollouts: dict[str, FragmentTrace] = {}  # by the prefix of their nodes
        self._end: Callable[[], object] | None = None
        self._lock = RLock()  # held while a trace begins, and while it is taken from what writes it

    def begin(self, path: str | PathLike[str] | None) -> None:
        """Begin a trace to a file; None: none. Raises OSError where it can't be written."""
        if path is not None:
            with self._lock:
                self._begin(open_trace(path))

    def serve(self, asker: socket.socket) -> None:
        """Begin a trace that is sent to who asks for it, until that end of the connection says no more.

        Where there is none to be had, the asker gets nothing. From any thread.
        """
        poll = select.poll()
        poll.register(asker, select.POLLIN)
        with self._lock:
            if self._trace is None:
                self._begin(asker.makefile("wb"), lambda: not poll.poll(0), asker)
                return
        _hang_up(asker)

    def _begin(
        self,
        file: BinaryIO,
        goes_on: Callable[[], bool] | None = None,
        asker: socket.socket | None = None,
    ) -> None:
        graph, end = self._counters.graph, weakref.WeakMethod(self.end)
        self._file = file
        self._trace = trace = Trace(file, f"rollflow {graph.name}", lambda: _ended(end(), file, asker), goes_on)
        self._end = weakref.finalize(self, trace.close)  # also where a run is forgotten, or the program ends
        self._rollouts = {}
        self.fragments = self._of("")
        for name, take_trace in graph.having("take_trace"):
            take_trace(name, self._of("".join(name.rpartition("/")[:2])))
        for meter in self._counters.meters:
            meter.take_trace(NodeTrace.of(trace, meter.name))

    def end(self, file: BinaryIO | None = None) -> None:
        """End the trace, written to its end; again does nothing. From any thread.

        file    of the trace that is meant, where another one may have begun; None: whichever there is
        """
        with self._lock:  # the next one begins when this one is taken from all meters
            if file is not None and file is not self._file:
                return
            end = self._end
            self._trace = self.fragments = self._end = None
            if end is not None:
                self._take_from()
        if end is not None:
            end()  # waits for the trace's thread, which may wait for the lock

    def _take_from(self) -> None:
        """Have no meter and no node write any more; what is under way is written as far as it has come."""
        under_way = self._counters.under_way
        for meter in self._counters.meters:
            busy, now = meter.trace, clock()
            meter.take_trace(None)
            if busy is not None and meter.name in under_way:
                busy.busy(now - under_way[meter.name], now)
        for name, take_trace in self._counters.graph.having("take_trace"):
            take_trace(name, None)

    def _of(self, prefix: str) -> FragmentTrace:
        assert self._trace is not None
        return self._rollouts.setdefault(prefix, FragmentTrace(self._trace, prefix))


def _ended(end: Callable[[BinaryIO], object] | None, file: BinaryIO, asker: socket.socket | None) -> None:
    """Tell a run's tracing that a trace was written to its end, and then who asked for it, who may ask for the next.

    end    None: the run has been forgotten
    """
    if end is not None:
        end(file)
    if asker is not None:
        _hang_up(asker)


def _hang_up(asker: socket.socket) -> None:
    """End a connection, also where a process that was forked meanwhile holds it as well."""
    with asker, suppress(OSError):  # who asks may be gone
        asker.shutdown(socket.SHUT_RDWR)
