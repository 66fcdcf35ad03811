"""LoopTrace: the trace of a trainer's loop: its waits and updates, and the items that came from rollouts."""

from os import PathLike
from threading import Lock
from typing import Any

from rollflow.sinks.trainer.trainer_side.stream_reader import UPDATE, UsedItem
from rollflow.stream.traces.trace import MOST_ARROWS, Record, Trace, open_trace

_LOOP = "loop"


class LoopTrace:
    """Writes a trainer's loop to a file, with an arrow from the arrival of an item to the update that used it.

    path     of the file
    title    name of the trainer

    Raises OSError where the file can't be written.
    """

    def __init__(self, path: str | PathLike[str], title: str) -> None:
        self._trace = Trace(open_trace(path), title, lambda: None)
        self._records: dict[str, Record] = {}
        self._lock = Lock()  # of what follows: items arrive in another thread than they are used in
        self._arrived: dict[tuple[bytes, int], tuple[str, int]] = {}  # session and number -> track, and when
        self._ends: dict[str, int] = {}  # of the last span of each rollout's track
        self._updates = 0

    def record(self, name: str, begin: int, end: int, used: list[UsedItem]) -> None:
        """Record a span of the loop, with times in ns, and the items that it used."""
        if name != UPDATE:
            if name not in self._records:
                self._records[name] = self._trace.recorder(_LOOP, name, "waits")
            self._records[name](begin, end)
            return
        items = [f"{item.source.called}: {item.number}" for item in used]
        self._trace.span(_LOOP, f"{UPDATE} {self._updates}", begin, end, {"items": items})
        self._updates += 1
        for item in used:
            with self._lock:
                came = self._arrived.pop((item.source.session.token, item.number), None)
            if came is not None:
                number = next(self._trace.arrows)
                self._trace.flow("s", came[0], number, came[1])
                self._trace.flow("f", _LOOP, number, min(begin + 1, end))  # at its begin the wait may not have ended

    def arrives(self, item: Any, began: int, end: int) -> None:
        """Record that an item has come from a rollout, and was read in this time, in ns."""
        track = f"from {item.source.name}"
        with self._lock:
            began = max(began, self._ends.get(track, began))
            end = self._ends[track] = max(began, end)
            self._arrived[item.source.session.token, item.number] = track, began
            while len(self._arrived) > MOST_ARROWS:
                del self._arrived[next(iter(self._arrived))]
        name = f"item {item.number}, of lane {item.lane}"
        self._trace.span(track, name, began, end, {"steps": item.num_steps})

    def end(self) -> None:
        """Write what is left, and close the file."""
        self._trace.close()
