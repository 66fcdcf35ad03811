"""Log of a trainer's stream, and the trace of its loop."""

from collections.abc import Callable, Iterable
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


def _name_of(item: Any) -> tuple[bytes, int]:
    return item.source.session.token, item.number


class StreamLog(RunLog):
    """The log of a `TrainerStream`, to be called for one's own values: `stream.log("train/loss", loss)`.

    stream     the stream, whose counts are logged
    options    where to, how often, and by which x axis; and the file for a trace of the stream's loop, with an arrow
               from the arrival of an item to the update that used it

    holder     kind of what has the stream, and a function that gives a sentence on how it stands; None: the stream's
               own loop has it

    `time/total_timesteps` are the steps that were handed over, `time/iterations` the items of the loop; there is no
    `busy/…`, which the rollouts' own logs have.
    """

    def __init__(self, stream: Any, options: LogOptions) -> None:
        super().__init__(options)
        self._trace_to = options.trace
        self._trace: Trace | None = None  # until it begins, and if there is no file for it
        self._traced: FragmentTrace  # the items in it, and what the loop is at, once there is one
        self._records: dict[str, Record]
        self._at: str | None = None  # what the span under way is of; None: there is none
        self._span_began, self._used = 0, list[Any]()  # when it began, and items in the batch that the loop has
        self._ends: dict[str, int] = {}  # of the last span of each rollout's track
        self._stream = stream
        self.holder: tuple[str, Callable[[], str]] | None = None
        self._steps = self._items = 0
        self._lag: int | None = None
        self._socket = RunSocket(self.snapshot)

    def begin(self) -> None:
        """Open the destinations, the trace, and the socket through which the stream is looked at."""
        if self._trace_to is not None:  # first: where it can't be opened, there is nothing to be ended
            title = f"rollflow {type(self._stream).__name__} {self._stream.address}"
            self._trace = trace = Trace(open_trace(self._trace_to), title, lambda: None)
            self._traced = FragmentTrace(trace)
            self._records = {name: trace.recorder(_LOOP, name, "waits") for name in (WAITS, MAKES)}
        with closing_on_error(self._close_trace):
            super().begin()
        self._socket.start()

    def end(self) -> None:
        """Close the socket, the trace, and the destinations after their last row."""
        self._socket.stop()
        self._close_trace()
        super().end()

    def _close_trace(self) -> None:
        if self._trace is not None:
            self._trace.close()

    def be_at(self, at: str | None, used: Iterable[Any] = ()) -> None:
        """Trace what the loop was at, and begin what it is at from now on; None: it asks for no more.

        at      WAITS for a batch, MAKES one by the learner pieces, or UPDATE
        used    arrived items that the batch of an update is made of
        """
        if self._trace is None:
            return
        now = clock()
        if self._at == UPDATE:
            args = {"items": [f"{item.source.called}: {item.number}" for item in self._used]}
            self._traced.update_of(map(_name_of, self._used), _LOOP, self._span_began, now, args)
        elif self._at is not None:
            self._records[self._at](self._span_began, now)
        self._at, self._span_began, self._used = at, now, list(used)

    def arrives(self, item: Any, began_s: float) -> None:
        """Trace an item that was read from a time on, on the clock `monotonic`. In the listener's thread."""
        if self._trace is None:
            return
        track, began = f"from {item.source.name}", int(began_s * 1e9)
        began = max(began, self._ends.get(track, 0) + 1)
        name = f"item {item.number}, of lane {item.lane}"
        self._ends[track] = self._traced.made(_name_of(item), track, name, began, {"steps": item.num_steps})

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
