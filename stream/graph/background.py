"""Background nodes, which work in other threads, processes or hosts, and the two ways to wait for them.

`wait_for_any` blocks a thread without an event loop. `BackgroundWatch` wakes a chain that is a task of an event loop.
"""

from collections.abc import Iterable, Sequence
from functools import partial

import anyio
import anyio.abc

from rollflow.stream.data.system import POLLIN, make_poll
from rollflow.stream.graph.meter import NodeMeter, clock
from rollflow.stream.graph.node import Background, ending_quietly
from rollflow.stream.graph.wakeup import Wakeup


class AtWork:
    """Block in which this thread only waits for background nodes: the time counts as busy for their meters.

    Meters of nodes that count their own work are left out.
    """

    __slots__ = ("_meters",)

    def __init__(self, meters: Sequence[NodeMeter]) -> None:
        self._meters = [meter for meter in meters if not meter.counts_itself]

    def __enter__(self) -> None:
        now = clock()
        for meter in self._meters:
            meter.begin_work(now)

    def __exit__(self, *error: object) -> None:
        now = clock()
        for meter in self._meters:
            meter.end_work(now)


def wait_for_any(nodes: Iterable[tuple[Background, NodeMeter]], bell: Wakeup) -> None:
    """Block until a node that has items in flight has completed something, its patience is over, or a bell rings.

    nodes    nodes and their meters; the time counts for those that are waited for
    bell     is silenced
    """
    # Nobody reads the descriptors of the other nodes now, so every wait would end.
    awaited, poll = [(node, meter) for node, meter in nodes if node.in_flight], make_poll()
    poll.register(bell.fileno(), POLLIN)
    for node, _ in awaited:
        if (fd := node.fileno()) >= 0:
            poll.register(fd, POLLIN)
    least = least_patience(node for node, _ in awaited)
    with AtWork([meter for _, meter in awaited]):
        poll.poll(None if least is None else least * 1e3)
    bell.silence()


def least_patience(nodes: Iterable[Background]) -> float | None:
    """Seconds after which the first of the nodes is to be asked for outputs; None: no time ends a wait for them."""
    return min((seconds for node in nodes if (seconds := node.patience) is not None), default=None)


class ChainWakeup:
    """An event that a chain in an event loop waits on while it can't go on; `wait` resets it."""

    def __init__(self) -> None:
        self._event: anyio.Event | None = None
        self._is_set = False

    def set(self) -> None:
        """Let the chain go on, now or when it next waits."""
        self._is_set = True
        if self._event is not None:
            self._event.set()

    async def wait(self) -> None:
        """Wait until `set` has been called since the last wait."""
        if not self._is_set:
            self._event = anyio.Event()
            await self._event.wait()
            self._event = None
        self._is_set = False


class BackgroundWatch:
    """Wakes a chain in an event loop when one of its background nodes has completed something."""

    def __init__(self, nodes: Sequence[Background], wake: ChainWakeup, tasks: anyio.abc.TaskGroup | None) -> None:
        assert tasks is not None
        self._wake = wake
        self._scopes: list[anyio.CancelScope] = []
        self._begins: list[ChainWakeup] = []
        for node in nodes:
            if node.fileno() >= 0:
                self._scopes.append(anyio.CancelScope())
                self._begins.append(ChainWakeup())
                watch = partial(self._watch, node, self._scopes[-1], self._begins[-1])
                tasks.start_soon(ending_quietly, watch)

    def begin(self) -> None:
        """Watch every node until it has woken the chain once."""
        for begin in self._begins:
            begin.set()

    def end(self) -> None:
        """Stop watching."""
        for scope in self._scopes:
            scope.cancel()

    async def _watch(self, node: Background, scope: anyio.CancelScope, begin: ChainWakeup) -> None:
        with scope:
            while True:
                await begin.wait()
                await anyio.wait_readable(node.fileno())
                self._wake.set()
