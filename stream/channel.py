"""Bounded channels, and the two ends that asynchronous nodes see.

An end tries the way without waiting first. After CHECKPOINT_EVERY such operations, or CHECKPOINT_NS, whichever comes
first, it passes through the event loop all the same, so that a task that never has to wait can still be cancelled and
does not starve the others.
"""

from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any, Generic, Literal, Self, TypeVar

import anyio
import anyio.lowlevel

from rollflow.stream.meter import EdgeMeter, NodeMeter, clock

T = TypeVar("T")
Overflow = Literal["block", "drop_oldest", "latest"]

CHECKPOINT_EVERY = 64
CHECKPOINT_NS = 1_000_000


class Channel(Generic[T]):
    """A bounded first-in, first-out queue between one outlet and one inlet.

        capacity    items held at most
        overflow    what a full channel does with one more: "block" refuses it until there is room, "drop_oldest"
                    throws its oldest away, "latest" likewise, with the meaning that only the newest counts

    Of one event loop; not thread-safe.
    """

    def __init__(self, name: str, capacity: int, overflow: Overflow = "block") -> None:
        self.meter = EdgeMeter(name, capacity)
        self.capacity = capacity
        self.overflow: Overflow = overflow
        self.closed = False  # no more will come
        self.abandoned = False  # nobody will take what comes
        self.error: Exception | None = None  # why it ended before its time
        self.on_item: Callable[[], None] = _nothing
        self._items: deque[T] = deque()
        self._room: anyio.Event | None = None

    def __len__(self) -> int:
        return len(self._items)

    def offer(self, item: T) -> bool:
        """Take the item without waiting; False when the channel is full and must not drop any."""
        items, meter = self._items, self.meter
        if self.abandoned:
            meter.items += 1
            meter.dropped += 1
            return True
        if len(items) >= self.capacity:
            if self.overflow == "block":
                return False
            items.popleft()
            meter.dropped += 1
        items.append(item)
        meter.items += 1
        meter.holds(len(items))
        self.on_item()
        return True

    async def send(self, item: T) -> None:
        """Take the item as soon as there is room. When cancelled, the item has not been taken."""
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
        """Give the oldest item without waiting. Raises WouldBlock, EndOfStream when no more will come, or `error`."""
        if not self._items:
            if self.error is not None:
                raise self.error
            raise anyio.EndOfStream if self.closed else anyio.WouldBlock
        item = self._items.popleft()
        self.meter.holds(len(self._items))
        self._wake_senders()
        return item

    def close(self) -> None:
        """Say that no more will come."""
        self.closed = True
        self.on_item()

    def fail(self, error: Exception) -> None:
        """Say that no more will come because of an error, which is raised after the last item; not if it is closed."""
        if not self.closed:
            self.error = error
            self.close()

    def abandon(self) -> None:
        """Say that nobody will take what is held or comes yet: it counts as dropped, and senders go on."""
        self.abandoned = True
        self.meter.dropped += len(self._items)
        self._items.clear()
        self.meter.holds(0)
        self._wake_senders()

    def _wake_senders(self) -> None:
        room, self._room = self._room, None
        if room is not None:
            room.set()


class Inlet(Generic[T]):
    """Where an asynchronous node takes items from: `async for item in inlet`. Ends when all that feeds it has ended."""

    def __init__(self, channels: list[Channel[T]], meter: NodeMeter) -> None:
        self._channels = channels
        self._meter = meter
        self._next = 0
        self._unchecked = 0  # operations since it last passed through the event loop
        self._checked_at = clock()  # when that was
        self._arrived: anyio.Event | None = None
        for channel in channels:
            channel.on_item = self._wake

    def receive_nowait(self) -> T:
        """The next item. Raises anyio.WouldBlock when there is none yet, anyio.EndOfStream when none will come."""
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
            return item
        if ended == count:
            raise anyio.EndOfStream
        raise anyio.WouldBlock

    async def receive(self) -> T:
        """The next item, as soon as there is one. Raises anyio.EndOfStream. When cancelled, no item is lost."""
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
            self._meter.begin_wait()
            try:
                await self._arrived.wait()
            finally:
                self._meter.end_wait()
            self._unchecked, self._checked_at = 0, clock()

    def __aiter__(self) -> AsyncIterator[T]:
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
    """Stops a source between two sends: those that are under way, on any of its outlets, are done first.

    sending    how many are under way; whoever ends one calls `end_send`, which counts it off
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
        """One send less is under way."""
        self.sending -= 1
        if self.requested:
            self._cancel_if_idle()

    async def wait(self) -> None:
        """Wait to be cancelled."""
        await self._idle.wait()
        await anyio.lowlevel.checkpoint()

    def _cancel_if_idle(self) -> None:
        if not self.sending:
            self._scope.cancel()
            self._idle.set()


class Outlet(Generic[T]):
    """Where an asynchronous node gives items to: every channel of a fan-out gets the same object."""

    def __init__(self, channels: list[Channel[T]], meter: NodeMeter, stop: SourceStop | None = None) -> None:
        self._channels = channels
        self._meter = meter
        self._stop = stop  # of a source, which counts what it gives
        self._unchecked = 0  # operations since it last passed through the event loop
        self._checked_at = clock()  # when that was

    async def send(self, item: T) -> None:
        """Give an item, waiting for room. When cancelled, those channels that were full do not have it."""
        stop = self._stop
        if stop is not None:
            stop.sending += 1
        try:
            self._unchecked += 1
            if self._unchecked >= CHECKPOINT_EVERY or clock() - self._checked_at >= CHECKPOINT_NS:
                await anyio.lowlevel.checkpoint()
                self._unchecked, self._checked_at = 0, clock()
            for channel in self._channels:
                if not channel.offer(item):
                    await self._send_waiting(channel, item)
        finally:
            if stop is not None:
                stop.end_send()
        if stop is not None:
            self._meter.items += 1
            if stop.requested:
                await stop.wait()

    def send_nowait(self, item: T) -> None:
        """Give an item at once. Raises anyio.WouldBlock, having given it to nobody, when a channel is full."""
        if any(len(c) >= c.capacity and c.overflow == "block" and not c.abandoned for c in self._channels):
            raise anyio.WouldBlock
        for channel in self._channels:
            channel.offer(item)
        self._meter.items += self._stop is not None

    def close(self) -> None:
        """Say that no more will come."""
        for channel in self._channels:
            channel.close()

    async def _send_waiting(self, channel: Channel[T], item: T) -> None:
        self._meter.begin_block()
        try:
            await channel.send(item)
        finally:
            self._meter.end_block()
        self._unchecked, self._checked_at = 0, clock()


class Output(Inlet[T]):
    """An output of a running graph: `async for item in run["name"]`.

    From its first item on, its reader is busy whenever it does not wait for another, on any output: `caller`'s work.
    """

    def __init__(self, channel: Channel[T], caller: NodeMeter) -> None:
        super().__init__([channel], NodeMeter(channel.meter.name))
        self._caller = caller

    def receive_nowait(self) -> T:
        item = super().receive_nowait()
        self._caller.items += 1
        self._caller.begin_life()
        return item

    async def receive(self) -> T:
        self._caller.begin_wait()
        try:
            return await super().receive()
        finally:
            self._caller.end_wait()

    def __aiter__(self) -> Self:
        return self


def _nothing() -> Any:
    pass
