"""Nodes whose work goes on elsewhere: in threads, in processes, on other hosts."""

import select
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from rollflow.stream.meter import NodeMeter, clock


class Background(Protocol):
    """A synchronous node that is handed items and gives what comes of them later.

    It is called with an item, as every synchronous node is, and gives nothing then. All of this happens in the thread
    that the graph runs in; what other threads or processes have done is told by the descriptor.
    """

    @property
    def in_flight(self) -> int:
        """Items handed over of which nothing has come yet."""
        ...

    @property
    def patience(self) -> float | None:
        """Seconds after which `completed` wants to be called though nothing was told; None: no need."""
        ...

    def fileno(self) -> int:
        """A descriptor that can be read once something is completed; -1 where that is so whenever items are there."""
        ...

    def completed(self) -> Iterable[Any]:
        """What has come of items since, without waiting for more. Raises what went wrong."""
        ...


def is_background(node: Any) -> bool:
    """Whether a node is such a one."""
    return hasattr(node, "completed") and hasattr(node, "in_flight")


def wait_for(nodes: Sequence[tuple[Background, NodeMeter]]) -> None:
    """Block until one of the nodes has something to say; the time is theirs who have items in flight."""
    waiting = [(node, meter) for node, meter in nodes if node.in_flight]
    poll = select.poll()
    patience: list[float] = []
    for node, _ in waiting:
        if node.fileno() >= 0:
            poll.register(node.fileno(), select.POLLIN)
        if node.patience is not None:
            patience.append(node.patience)
    began = clock()
    poll.poll(min(patience) * 1e3 if patience else None)
    waited = clock() - began
    for _, meter in waiting:
        meter.busy_ns += waited
