"""Background nodes, which work in other threads, processes or hosts, and the two ways to wait for them.

`wait_for_any` blocks a thread without an event loop. `wake_chain` wakes one that is a task of an event loop.
"""

from collections.abc import Iterable, Sequence

import anyio

from rollflow.stream.data.system import POLLIN, make_poll
from rollflow.stream.graph.meter import NodeMeter, clock
from rollflow.stream.graph.node import Background
from rollflow.stream.graph.wakeup import Wakeup

INTERRUPT_S = 0.5  # a signal that comes just before a wait, or in another thread, does not end it: look for one


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

    Returns after INTERRUPT_S in any case, so that the interpreter handles signals.

    nodes    nodes and their meters; the time counts for those that are waited for
    bell     is silenced
    """
    # Nobody reads the descriptors of the other nodes now, so every wait would end.
    awaited, poll = [each for each in nodes if each[0].in_flight], make_poll()
    poll.register(bell.fileno(), POLLIN)
    for node, _ in awaited:
        if (fd := node.fileno()) >= 0:
            poll.register(fd, POLLIN)
    least = least_patience(awaited)
    with AtWork([meter for _, meter in awaited]):
        ready = poll.poll(1e3 * (INTERRUPT_S if least is None or least > INTERRUPT_S else least))
    if bell.fileno() in dict(ready):
        bell.silence()


def least_patience(nodes: Iterable[tuple[Background, NodeMeter]]) -> float | None:
    """Seconds after which the first of the nodes is to be asked for outputs; None: no time ends a wait for them."""
    least: float | None = None  # without `min`, which takes twice as long
    for node, _ in nodes:
        seconds = node.patience
        if seconds is not None and (least is None or seconds < least):
            least = seconds
    return least


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


async def wake_chain(node: Background, wake: ChainWakeup, begin: ChainWakeup, scope: anyio.CancelScope) -> None:
    """Wake a chain in an event loop when one of its background nodes has completed something, until it is cancelled.

    begin    has it done once
    """
    with scope:
        while True:
            await begin.wait()
            await anyio.wait_readable(node.fileno())
            wake.set()
