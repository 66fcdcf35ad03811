"""StreamLog and LoopTrace: what a trainer's stream logs, and the trace of its loop."""

from collections.abc import Callable, Iterable
from os import PathLike
from typing import Any

from rollflow.nodes.logs.destinations import LogOptions
from rollflow.nodes.logs.figures import Counts
from rollflow.nodes.logs.run_log import RunLog
from rollflow.sinks.trainer.rollout_peer import BatchItem
from rollflow.stream.data.closing import closing_on_error
from rollflow.stream.graph.meter import clock
from rollflow.stream.observe.run_socket import RunSocket
from rollflow.stream.observe.trace import FragmentTrace, Record, Trace, open_trace

_LOOP = "loop"
WAITS, MAKES, UPDATE = "waits for a batch", "makes its batch", "update"


class LoopTrace:
    """Writes a trainer's loop to a file, with an arrow from the arrival of an item to the update that used it.

    Until `open`, and after `close`, its methods do nothing.
    """

    def __init__(self) -> None:
        self._trace: Trace | None = None
        self._items: FragmentTrace | None = None
        self._records: dict[str, Record] = {}
        self._at: str | None = None  # what the span under way is of; None: there is none
        self._began, self._used = 0, list[Any]()  # when it began, and items in the batch that the loop has
        self._ends: dict[str, int] = {}  # of the last span of each rollout's track

    def open(self, path: str | PathLike[str], title: str) -> None:
        """Begin a trace of this title. Raises OSError if the file can't be written."""
        self._trace = trace = Trace(open_trace(path), title, lambda: None)
        self._items = FragmentTrace(trace)
        self._records = {name: trace.recorder(_LOOP, name, "waits") for name in (WAITS, MAKES)}

    def close(self) -> None:
        """Write what is left, and close the file."""
        if self._trace is not None:
            self._trace.close()

    def begin(self, at: str | None, used: Iterable[Any] = ()) -> None:
        """Record what the loop was at, and begin what it is at from now on; None: it asks for no more.

        at      WAITS for a batch, MAKES one by the learner pieces, or UPDATE
        used    arrived items that the batch of an update is made of
        """
        if self._items is None:
            return
        now = clock()
        if self._at == UPDATE:
            args = {"items": [f"{item.source.called}: {item.number}" for item in self._used]}
            self._items.update_of(map(_name_of, self._used), _LOOP, self._began, now, args)
        elif self._at is not None:
            self._records[self._at](self._began, now)
        self._at, self._began, self._used = at, now, list(used)

    def arrives(self, item: Any, began_s: float) -> None:
        """Record an item that was read from a time on, on the clock `monotonic`. In the listener's thread."""
        if self._items is None:
            return
        track, began = f"from {item.source.name}", int(began_s * 1e9)
        began = max(began, self._ends.get(track, 0) + 1)
        name = f"item {item.number}, of lane {item.lane}"
        self._ends[track] = self._items.made(_name_of(item), track, name, began, {"steps": item.num_steps})


def _name_of(item: Any) -> tuple[bytes, int]:
    return item.source.session.token, item.number


class StreamLog(RunLog):
    """The log of a `TrainerStream`, to be called for one's own values: `stream.log("train/loss", loss)`.

    stream     the stream, whose counts are logged
    options    where to, how often, and by which x axis; and the file for a trace
    trace      of the stream's loop

    holder     kind of what has the stream, and a function that gives a sentence on how it stands; None: the stream's
               own loop has it

    `time/total_timesteps` are the steps that were handed over, `time/iterations` the items of the loop; there is no
    `busy/…`, which the rollouts' own logs have.
    """

    def __init__(self, stream: Any, options: LogOptions, trace: LoopTrace) -> None:
        super().__init__(options)
        self._trace, self._trace_to = trace, options.trace
        self._stream = stream
        self.holder: tuple[str, Callable[[], str]] | None = None
        self._steps = self._items = 0
        self._lag: int | None = None
        self._socket = RunSocket(self.snapshot)

    def begin(self) -> None:
        """Open the destinations, the trace, and the socket through which the stream is looked at."""
        if self._trace_to is not None:  # first: where it can't be opened, there is nothing to be ended
            self._trace.open(self._trace_to, f"rollflow {type(self._stream).__name__} {self._stream.address}")
        with closing_on_error(self._trace.close):
            super().begin()
        self._socket.start()

    def end(self) -> None:
        """Close the socket, the trace, and the destinations after their last row."""
        self._socket.stop()
        self._trace.close()
        super().end()

    def snapshot(self) -> dict[str, Any]:
        """What `rollflow top` shows of the stream, as plain values."""
        told = {
            "kind": type(self._stream).__name__,
            "name": str(self._stream.address),
            "figures": self.figures(),
            "sources": list(self._stream.sources),
        }
        return told if self.holder is None else {**told, "kind": self.holder[0], "conclusion": self.holder[1]()}

    def take(self, handed: list[BatchItem]) -> None:
        """Count an item of the loop, by what it was made of."""
        self._steps += sum(item.num_steps for item in handed)
        self._items += 1
        self._lag = max((item.lag for item in handed if item.lag is not None), default=None)

    @property
    def counted(self) -> tuple[int, int]:
        """Steps, and items of the loop, that were handed over."""
        return self._steps, self._items

    def go_on_from(self, steps: int, updates: int) -> None:
        """Count on from the steps and the items that an earlier trainer was handed. Before it begins."""
        super().go_on_from(steps, updates)
        self._steps, self._items = steps, updates

    def counts(self) -> Counts:
        """What the stream has counted."""
        stream = self._stream
        return Counts(
            steps=self._steps,
            updates=self._items,
            versions={"": stream.version},
            lag=self._lag,
            lost=stream.lost,
            returns=stream.returns,
            metrics=stream.metrics,
        )
