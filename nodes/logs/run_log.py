"""RunLog: makes rows of a run's figures, and has them written by threads of their own."""

import abc
import logging
import math
import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any

from rollflow.nodes.logs.destinations import LogOptions, destination_of
from rollflow.nodes.logs.figures import Counts, Row, check_own_name, figures_of
from rollflow.nodes.metrics.metrics_logger import number_of
from rollflow.stream.data.errors import RunError

logger = logging.getLogger(__name__)

_MOST_ROWS = 64  # that wait for a destination
_CLOSE_S = 30.0  # that a destination has for its last rows


class RunLog(abc.ABC):
    """Writes what a run has counted to destinations, and what a program logs by calling it.

    options    where to, how often, and by which x axis

    is_made_again    whether an earlier run's rows behind the place that this one goes on from are made again: they go

    A thread makes a row every so often, if anything has moved since the row before. Each destination has a thread that
    writes the rows; one that is too slow loses its oldest, which are counted. The threads hold the log weakly, and end
    when it is gone.
    """

    def __init__(self, options: LogOptions) -> None:
        self._options = options
        self.is_made_again = False
        self.writers = [RowWriter(text) for text in options.texts]
        self._own: dict[str, tuple[float, int]] = {}  # name -> sum and number of the values since the row before
        self._own_lock, self._row_lock = threading.Lock(), threading.Lock()
        self._first = self._before = Counts()
        self._began, self._has_begun = 0.0, False
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._is_closed = False

    @property
    def dropped_rows(self) -> int:
        """Rows that a destination was too slow for, or that came after it had failed."""
        return sum(writer.dropped for writer in self.writers)

    def figures(self) -> dict[str, float]:
        """Every figure of the table that is known and finite, but for those since the row before. From any thread."""
        figures = figures_of(self._counts_now(), Counts())
        return {
            name: value
            for name, value in figures.items()
            if math.isfinite(value) and name != "time/fps_now" and not name.startswith(("busy/", "calls/"))
        }

    def _counts_now(self) -> Counts:
        elapsed_s = time.monotonic() - self._began if self._has_begun else 0.0
        return replace(self.counts(), elapsed_s=elapsed_s, first_steps=self._first.steps)

    def go_on_from(self, steps: int, updates: int) -> None:
        """Count on from the environment steps and the updates of an earlier run. Before it begins."""
        self._first = self._before = Counts(steps=steps, updates=updates, first_steps=steps)

    @abc.abstractmethod
    def counts(self) -> Counts:
        """What the run has counted, but for `elapsed_s`. From any thread."""

    def __call__(self, name: str, value: Any) -> None:
        """Log one number: a Python one, or the only element of an array or tensor. From any thread.

        The next row has the mean of all that were logged under the name since the row before. Without destinations
        nothing comes of it. Raises MetricsError, a ValueError, for what is no number and for a name that rollflow logs
        itself, RunError after the end of the run.
        """
        if not isinstance(name, str) or name not in self._own:
            check_own_name(name)
        number = number_of((name,), value)
        with self._own_lock:
            if self._is_closed:
                raise RunError(f"'{name}' was to be logged after the end of the run, expected it before")
            if self.writers:
                total, count = self._own.get(name, (0.0, 0))
                self._own[name] = total + number, count + 1

    def begin(self) -> None:
        """Open the destinations and start the threads. Raises what a destination can't be opened for."""
        if self._has_begun:
            return
        with ExitStack() as opened:
            for writer in self.writers:
                writer.destination.open(self._last_row())
                opened.callback(writer.destination.close)
            opened.pop_all()
        self._began, self._has_begun = time.monotonic(), True  # in this order: others look meanwhile
        for writer in self.writers:
            writer.start()
        self._make_rows()

    def add(self, text: str) -> None:
        """Have one more destination written, which `log=text` would name; one that is written already changes nothing.

        From the program's thread, before the run or while it lasts; after its end it does nothing. Raises MetricsError
        for what can't be logged to.
        """
        if self._is_closed or any(writer.text == text for writer in self.writers):
            return
        writer = RowWriter(text)
        if self._has_begun:
            writer.destination.open(self._last_row())
            writer.start()
        self.writers.append(writer)
        if self._has_begun:
            self._make_rows()

    def _last_row(self) -> Row | None:
        first = self._first
        return Row(first.steps, first.updates, 0.0, 0.0, {}, axis=self._options.axis) if self.is_made_again else None

    def _make_rows(self) -> None:
        """Start the thread that makes rows, if there is a destination for them."""
        if not self.writers or self._thread is not None:
            return
        arguments = (weakref.ref(self), self.writers, self._stopping, self._options.every)
        self._thread = threading.Thread(target=_make_rows, args=arguments, name="rollflow log", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Write the last row, and close the destinations; again does nothing. From any thread."""
        with self._own_lock:
            was_closed, self._is_closed = self._is_closed, True
        if was_closed or self._thread is None:
            return
        self._stopping.set()
        try:
            self.make_row()
        finally:
            until = time.monotonic() + _CLOSE_S
            for writer in self.writers:
                writer.stop()
            for writer in self.writers:
                writer.wait(until)
            self._thread.join(max(0.0, until - time.monotonic()))

    def make_row(self) -> None:
        """Have a row written, unless nothing has moved since the one before."""
        try:
            with self._row_lock:
                self._put_row(self._counts_now())
        except Exception:  # the run goes on without this row
            logger.exception("a row of the log could not be made")

    def _put_row(self, now: Counts) -> None:
        before = self._before
        if not self._own and _moving(now) == _moving(before):
            return
        values = figures_of(now, before) | {"log/dropped_rows": self.dropped_rows}
        with self._own_lock:
            own, self._own = self._own, {}
        self._before = now
        values |= {name: total / count for name, (total, count) in own.items()}
        options = self._options
        of_updates = None if options.of_updates is None else self._first.updates + options.of_updates
        nodes = () if now.report is None else now.report.nodes
        pieces = {node.name: node.slowest_piece for node in nodes if node.slowest_piece}
        row = Row(now.steps, now.updates, time.time(), now.elapsed_s, values, of_updates, options.axis, pieces)
        for writer in self.writers:
            writer.put(row)


class RowWriter:
    """Thread that writes rows to one destination.

    text           as the destination was asked for
    dropped        rows that it was not given
    """

    def __init__(self, text: str) -> None:
        self.text, self.destination = text, destination_of(text)
        self.dropped = 0
        self._rows: queue.Queue[Row | None] = queue.Queue()  # the last is None
        self._has_failed = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread."""
        self._thread = threading.Thread(target=self._work, name=f"rollflow log {self.text}", daemon=True)
        self._thread.start()

    def put(self, row: Row) -> None:
        """Have a row written; the oldest that waits is dropped if there are too many."""
        self._rows.put(row)
        if self._rows.qsize() > _MOST_ROWS:
            with suppress(queue.Empty):  # it has been taken just now
                self._rows.get_nowait()
                self.dropped += 1

    def stop(self) -> None:
        """Have it write what waits, and close the destination."""
        self._rows.put(None)

    def wait(self, until: float) -> None:
        """Wait until it has closed the destination, or until a time of `time.monotonic`; what is lost is logged."""
        if self._thread is None:
            return
        self._thread.join(max(0.0, until - time.monotonic()))
        if self._thread.is_alive():
            waiting = max(0, self._rows.qsize() - 1)  # but for the None behind them
            logger.warning("the log %s is left behind, with %d rows: it has not closed in time", self.text, waiting)
        elif self.dropped:
            logger.warning("the log %s was too slow, or had failed: %d rows are lost", self.text, self.dropped)

    def _work(self) -> None:
        while (row := self._rows.get()) is not None:
            if self._has_failed:
                self.dropped += 1
            else:
                self._try(self.destination.write, row)
        self._try(self.destination.close)

    def _try(self, function: Callable[..., None], *args: Any) -> None:
        try:
            function(*args)
        except Exception as error:  # the run goes on without this log
            self.dropped += len(args)
            if not self._has_failed:
                reason = f"{type(error).__name__}: {error}"
                logger.warning("the log %s has failed, and gets no more rows: %s", self.text, reason)
            self._has_failed = True


def _moving(counts: Counts) -> tuple[object, ...]:
    """What has to change for a row to be worth writing."""
    return counts.steps, counts.updates, counts.returns.count, dict(counts.versions), dict(counts.lost)


def _make_rows(
    log: "weakref.ref[RunLog]", writers: Sequence[RowWriter], stopping: threading.Event, every: float
) -> None:
    while not stopping.wait(every):
        own = log()
        if own is None:
            for writer in writers:
                writer.stop()
            return
        own.make_row()
        del own
