"""LoopTrace: the trace of a trainer's loop: its waits and updates, and the items that came from rollouts."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from os import PathLike
from threading import Lock
from typing import Any

from rollflow.stream.graph.meter import clock
from rollflow.stream.observe.trace import MOST_ARROWS, Record, Trace, open_trace

_LOOP = "loop"
WAITS, MAKES, UPDATE = "waits for a batch", "makes its batch", "update"


class LoopTrace:
    """Writes a trainer's loop to a file, with an arrow from the arrival of an item to the update that used it.

    Until `open`, and after `close`, its methods do nothing.
    """

    def __init__(self) -> None:
        self._trace: Trace | None = None
        self._records: dict[str, Record] = {}
        self._at, self._began = WAITS, 0  # what the span under way is of, and when it began; 0: there is none
        self._used: list[Any] = []  # items in the batch that the loop has
        self._lock = Lock()  # of what follows: items arrive in another thread than they are used in
        self._arrived: dict[tuple[bytes, int], tuple[str, int]] = {}  # session and number -> track, and when
        self._ends: dict[str, int] = {}  # of the last span of each rollout's track
        self._updates = 0

    def open(self, path: str | PathLike[str], title: str) -> None:
        """Begin a trace of this title. Raises OSError if the file can't be written."""
        self._trace = trace = Trace(open_trace(path), title, lambda: None)
        self._records = {name: trace.recorder(_LOOP, name, "waits") for name in (WAITS, MAKES)}

    def close(self) -> None:
        """Write what is left, and close the file."""
        if self._trace is not None:
            self._trace.close()

    def asks(self) -> None:
        """Note that the loop asks for the next batch."""
        self._begin(WAITS)

    @contextmanager
    def making(self) -> Iterator[None]:
        """Note that a batch is being made, by the learner pieces in the loop's thread, while the block lasts."""
        self._begin(MAKES)
        try:
            yield
        finally:
            self._begin(WAITS)

    def gets(self, of: Iterable[Any] = ()) -> None:
        """Note that the loop gets a batch, made of these arrived items; none: they are not known."""
        self._begin(UPDATE)
        self._used = [] if self._trace is None else list(of)

    def leaves(self) -> None:
        """Note that the loop asks for no more."""
        self._begin(WAITS)
        self._began = 0

    def arrives(self, item: Any, began_s: float) -> None:
        """Record an item that was read from a time on, on the clock `monotonic`. In the listener's thread."""
        if self._trace is None:
            return
        track = f"from {item.source.name}"
        with self._lock:
            began = int(began_s * 1e9)
            began = max(began, self._ends.get(track, began))
            end = self._ends[track] = max(began, clock())
            self._arrived[item.source.session.token, item.number] = track, began
            while len(self._arrived) > MOST_ARROWS:
                del self._arrived[next(iter(self._arrived))]
        name = f"item {item.number}, of lane {item.lane}"
        self._trace.span(track, name, began, end, {"steps": item.num_steps})

    def _begin(self, at: str) -> None:
        """Record the span under way, and begin another one."""
        if self._trace is None:
            return
        now, used, self._used = clock(), self._used, []
        if self._began:
            if self._at == UPDATE:
                self._update(self._trace, now, used)
            else:
                self._records[self._at](self._began, now)
        self._at, self._began = at, now

    def _update(self, trace: Trace, end: int, used: list[Any]) -> None:
        begin, items = self._began, [f"{item.source.called}: {item.number}" for item in used]
        trace.span(_LOOP, f"{UPDATE} {self._updates}", begin, end, {"items": items})
        self._updates += 1
        for item in used:
            with self._lock:
                came = self._arrived.pop((item.source.session.token, item.number), None)
            if came is not None:
                number = next(trace.arrows)
                trace.flow("s", came[0], number, came[1])
                trace.flow("f", _LOOP, number, min(begin + 1, end))  # at its begin the wait may not have ended
