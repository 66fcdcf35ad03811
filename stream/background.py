"""Nodes whose work goes on elsewhere: in threads, in processes, on other hosts."""

import select
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from rollflow.stream.bell import Bell
from rollflow.stream.meter import NodeMeter, clock


class Background(Protocol):
    """A synchronous node that is handed items and gives what comes of them later.

    It is called with an item, as every synchronous node is, and gives nothing then. It may have a method `hasten()`,
    called when no more will be asked for: what is under way may then come back as it is.

    All of this happens in the thread that the graph runs in; what other threads or processes have done is told by the
    descriptor.
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


class Waiter:
    """Waits for background nodes that have items in flight, in a thread that has nothing else to do.

    nodes    the nodes and their meters: the time is theirs who have items in flight
    bell     ends a wait as well, and is silenced
    """

    def __init__(self, nodes: Sequence[tuple[Background, NodeMeter]], bell: Bell | None = None) -> None:
        self._nodes = nodes
        self._bell = bell
        self._poll = select.poll()
        self._listens = {node.fileno(): False for node, _ in nodes if node.fileno() >= 0}
        if bell is not None:
            self._poll.register(bell.fileno(), select.POLLIN)

    def wait(self) -> None:
        """Block until one of the nodes has something to say, or the bell rings."""
        # What the others have to say nobody asks for now: their descriptors would only end every wait at once.
        for node, _ in self._nodes:
            self._listen(node.fileno(), bool(node.in_flight))
        patience = [node.patience for node, _ in self._nodes if node.in_flight]
        least = min((seconds for seconds in patience if seconds is not None), default=None)
        began = clock()
        told = self._poll.poll(None if least is None else least * 1e3)
        waited = clock() - began
        for node, meter in self._nodes:
            if node.in_flight:
                meter.busy_ns += waited
        if self._bell is not None and any(fd == self._bell.fileno() for fd, _ in told):
            self._bell.silence()

    def _listen(self, fd: int, listens: bool) -> None:
        if self._listens.get(fd, listens) == listens:
            return
        self._listens[fd] = listens
        if listens:
            self._poll.register(fd, select.POLLIN)
        else:
            self._poll.unregister(fd)
