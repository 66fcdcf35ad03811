"""Bounded channels, and the inlets and outlets through which asynchronous nodes use them.

Inlets and outlets first try without waiting. After CHECKPOINT_EVERY operations or CHECKPOINT_NS they pass through the
event loop all the same. So a task that never has to wait can still be cancelled, and does not starve the others.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, Literal, Self, TypeVar

import anyio
import anyio.lowlevel

from rollflow.stream.graph.meter import EdgeMeter, NodeMeter, clock, waiting_for

T = TypeVar("T")
Overflow = Literal["block", "drop_oldest", "latest"]

CHECKPOINT_EVERY = 64
CHECKPOINT_NS = 1_000_000


class Channel(Generic[T]):
    """A bounded first-in, first-out queue between one outlet and one inlet.

        capacity    items held at most
        overflow    policy of a full channel: "block" refuses an item until there is room, "drop_oldest" drops the
                    oldest item, "latest" does the same and says that only the newest counts
        lose        called with every dropped item

    A channel belongs to one event loop and is not thread-safe.
    """

    def __init__(
        self, name: str, capacity: int, overflow: Overflow = "block", lose: Callable[[T], None] | None = None
    ) -> None:
        self.meter = EdgeMeter(name, capacity)
        self.capacity = capacity
        self.overflow: Overflow = overflow
        self.closed = False  # no more items will come
        self.abandoned = False  # no more items will be taken
        self.error: Exception | None = None  # that ended the channel early
        self.on_item: Callable[[], None] = _nothing
        self._lose = _nothing if lose is None else lose
        self._items: deque[T] = deque()
        self._room: anyio.Event | None = None

    def __len__(self) -> int:
        return len(self._items)

    @property
    def has_no_room(self) -> bool:
        """True if a sender has to wait."""
        return len(self._items) >= self.capacity and self.overflow == "block" and not self.abandoned

    def offer(self, item: T) -> bool:
        """Take the item without waiting; return False if the channel is full and blocks."""
        items, meter = self._items, self.meter
        if self.abandoned:
            meter.items += 1
            meter.dropped += 1
            self._lose(item)
            return True
        if len(items) >= self.capacity:
            if self.overflow == "block":
                return False
            meter.dropped += 1
            self._lose(items.popleft())
        items.append(item)
        meter.items += 1
        meter.holds(len(items))
        self.on_item()
        return True

    async def send(self, item: T) -> None:
        """Take the item as soon as there is room. A cancelled call has not taken it."""
        if self.offer(item):
            return
        self.meter.blocked_count += 1
        while True:
            if self._room is None:
                self._room = anyio.Event()
            await self._room.wait()
            if self.offer(item):
                return

    def take(self) -> T:
        """Return the oldest item without waiting. Raises WouldBlock, EndOfStream when no more will come, or `error`."""
        if not self._items:
            if self.error is not None:
                raise self.error
            raise anyio.EndOfStream if self.closed else anyio.WouldBlock
        item = self._items.popleft()
        self.meter.holds(len(self._items))
        self._wake_senders()
        return item

    def close(self) -> None:
        """Declare that no more items will come."""
        self.closed = True
        self.on_item()

    def fail(self, error: Exception) -> None:
        """Close the channel with an error, which `take` raises after the last item. A closed channel ignores this."""
        if not self.closed:
            self.error = error
            self.close()

    def abandon(self) -> None:
        """Declare that no more items will be taken: those held or still to come are dropped, and senders go on."""
        self.abandoned = True
        self.meter.dropped += len(self._items)
        while self._items:
            self._lose(self._items.popleft())
        self.meter.holds(0)
        self._wake_senders()

    def let_go(self, error: Exception | None) -> None:
        """Let go of all items and of what the channel calls, once its run is over.

        error    takes the place of the one that ended the channel, which refers to the run by its traceback
        """
        self._items.clear()
        self._lose = self.on_item = _nothing
        if self.error is not None and error is not None:
            self.error = error

    def held(self) -> list[T]:
        """The items that wait to be taken."""
        return list(self._items)

    def _wake_senders(self) -> None:
        room, self._room = self._room, None
        if room is not None:
            room.set()


class Inlet(Generic[T]):
    """Receiving end for an asynchronous node: `async for item in inlet`, until all channels into it have ended.

    A node is done with an item when it asks for the next one. The item that it has when it is cancelled or raises is
    lost.
    """

    def __init__(
        self, channels: list[Channel[T]], meter: NodeMeter, holders: dict[str, NodeMeter] | None = None
    ) -> None:
        self._channels = channels
        self._meter = meter
        self._holders = {} if holders is None else holders
        self._next = 0
        self._unchecked = 0  # operations since it last passed through the event loop
        self._checked_at = clock()  # when that was
        self._arrived: anyio.Event | None = None
        self._current: T | None = None  # the item that the node works on
        for channel in channels:
            channel.on_item = self._wake

    def receive_nowait(self) -> T:
        """The next item, from the channels in turn. Raises anyio.WouldBlock, or anyio.EndOfStream after the last."""
        self._current = None
        ended, count = 0, len(self._channels)
        for i in range(count):
            which = (self._next + i) % count
            try:
                item = self._channels[which].take()
            except anyio.WouldBlock:
                continue
            except anyio.EndOfStream:
                ended += 1
                continue
            self._next = which + 1
            self._meter.items += 1
            self._current = item
            return item
        if ended == count:
            raise anyio.EndOfStream
        raise anyio.WouldBlock

    async def receive(self) -> T:
        """Wait for the next item. Raises anyio.EndOfStream after the last. A cancelled call loses no item."""
        self._current = None
        self._unchecked += 1
        if self._unchecked >= CHECKPOINT_EVERY or clock() - self._checked_at >= CHECKPOINT_NS:
            await anyio.lowlevel.checkpoint()
            self._unchecked, self._checked_at = 0, clock()
        while True:
            try:
                return self.receive_nowait()
            except anyio.WouldBlock:
                pass
            if self._arrived is None:
                self._arrived = anyio.Event()
            with self._meter.waits():
                await self._arrived.wait()
            self._unchecked, self._checked_at = 0, clock()

    @contextmanager
    def blocked_by(self, holder: str) -> Iterator[None]:
        """Block in which the node waits for somebody outside of the graph: `holder` is a stage of the report then."""
        with self._meter.blocks(), waiting_for(self._holders, holder):
            yield

    def held(self) -> list[T]:
        """The item that the node is not done with."""
        return [] if self._current is None else [self._current]

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        try:
            return await self.receive()
        except anyio.EndOfStream:
            raise StopAsyncIteration from None

    def _wake(self) -> None:
        arrived, self._arrived = self._arrived, None
        if arrived is not None:
            arrived.set()


class SourceStop:
    """Stops a source between two sends: sends under way, on any of its outlets, are completed first.

    sending      number of sends under way; the sender adds 1, and calls `end_send` after each
    requested    whether the source is to stop
    """

    def __init__(self, scope: anyio.CancelScope) -> None:
        self.requested = False
        self._scope = scope
        self.sending = 0
        self._idle = anyio.Event()

    def request(self) -> None:
        """Cancel the source, at once or as soon as no send is under way."""
        self.requested = True
        self._cancel_if_idle()

    def end_send(self) -> None:
        """Count a send as done, and cancel the source if that was requested."""
        self.sending -= 1
        if self.requested:
            self._cancel_if_idle()

    async def wait(self) -> None:
        """Wait until the source is cancelled."""
        await self._idle.wait()
        await anyio.lowlevel.checkpoint()

    def _cancel_if_idle(self) -> None:
        if not self.sending:
            self._scope.cancel()
            self._idle.set()


class Outlet(Generic[T]):
    """Sending end for an asynchronous node: every channel of a fan-out gets the same object."""

    def __init__(self, channels: list[Channel[T]], meter: NodeMeter, stop: SourceStop | None = None) -> None:
        self._channels = channels
        self._meter = meter
        self._stop = stop  # only of a source, whose sent items are counted
        self._current: T | None = None  # the item that is being sent
        self._unchecked = 0  # operations since it last passed through the event loop
        self._checked_at = clock()  # when that was

    async def send(self, item: T) -> None:
        """Send an item, waiting for room. After a cancelled call the channels that were full do not have it."""
        self._current, stop = item, self._stop
        if stop is not None:
            stop.sending += 1
        try:
            self._unchecked += 1
            if self._unchecked >= CHECKPOINT_EVERY or clock() - self._checked_at >= CHECKPOINT_NS:
                await anyio.lowlevel.checkpoint()
                self._unchecked, self._checked_at = 0, clock()
            for channel in self._channels:
                if not channel.offer(item):
                    with self._meter.blocks():
                        await channel.send(item)
                    self._unchecked, self._checked_at = 0, clock()
            self._current = None
        finally:
            if stop is not None:
                stop.end_send()
        if stop is not None:
            self._meter.items += 1
            if stop.requested:
                await stop.wait()

    def held(self) -> list[T]:
        """The item that is not in every channel yet."""
        return [] if self._current is None else [self._current]


class Output(Inlet[T]):
    """An output of a running graph: `async for item in run["name"]`.

    caller     measures those who read: from the first item on they are busy whenever one of their tasks does not wait
               on an output
    readers    output -> id of the task that reads it, of the outputs of the graph that have been read and go on
    """

    def __init__(self, channel: Channel[T], caller: NodeMeter, readers: "dict[Output[Any], int]") -> None:
        super().__init__([channel], NodeMeter(channel.meter.name))
        self._caller, self._readers = caller, readers

    def receive_nowait(self) -> T:
        item = super().receive_nowait()
        self._current = None  # an item with the reader is not lost
        self._caller.items += 1
        self._caller.begin_life()
        return item

    async def receive(self) -> T:
        self._readers[self] = anyio.get_current_task().id
        self._caller.tasks = len(set(self._readers.values()))
        try:
            with self._caller.waits():
                return await super().receive()
        except anyio.EndOfStream:
            self._readers.pop(self, None)
            self._caller.tasks = max(1, len(set(self._readers.values())))
            if self._readers:
                self._caller.begin_life()
            else:
                self._caller.end_life()
            raise

    @property
    def is_awaited(self) -> bool:
        """True while the reader waits on this output."""
        return self._meter.is_waiting


def _nothing(*items: Any) -> None:
    """Do nothing: the default of callbacks."""
