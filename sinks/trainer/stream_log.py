"""Log of a trainer's stream."""

from collections.abc import Callable
from typing import Any

from rollflow.nodes.logs.destinations import LogOptions
from rollflow.nodes.logs.figures import Counts
from rollflow.nodes.logs.run_log import RunLog
from rollflow.sinks.trainer.rollout_peer import BatchItem
from rollflow.stream.observe.run_socket import RunSocket


class StreamLog(RunLog):
    """The log of a `TrainerStream`, to be called for one's own values: `stream.log("train/loss", loss)`.

    stream     the stream, whose counts are logged
    options    where to, how often, and by which x axis

    holder     kind of what has the stream, and a function that gives a sentence on how it stands; None: the stream's
               own loop has it

    `time/total_timesteps` are the steps that were handed over, `time/iterations` the items of the loop; there is no
    `busy/…`, which the rollouts' own logs have.
    """

    def __init__(self, stream: Any, options: LogOptions) -> None:
        super().__init__(options)
        self._stream = stream
        self.holder: tuple[str, Callable[[], str]] | None = None
        self._steps = self._items = 0
        self._lag: int | None = None
        self._socket = RunSocket(self.snapshot)

    def begin(self) -> None:
        """Open the destinations, and the socket through which the stream is looked at."""
        super().begin()
        self._socket.start()

    def end(self) -> None:
        """Close the socket, and the destinations after their last row."""
        self._socket.stop()
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
