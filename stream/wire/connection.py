"""What both ends of a connection have in common: bytes in and out, time, and how a connection ends.

There is no I/O here and no clock: whoever owns the socket hands in what was received and what time it is, and sends
what `outgoing` gives. `host` and `gateway` say which message may come when.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from rollflow.stream.errors import WireError
from rollflow.stream.wire.frame import Buffer, Frame, FrameDecoder
from rollflow.stream.wire.limits import Limits
from rollflow.stream.wire.message import Message, decode, encode
from rollflow.stream.wire.running import Goodbye, Ping, Pong, Refused

_MOST_PINGS = 2  # that stay without an answer before a peer is given up


class Phase(Enum):
    """What a connection is at."""

    HANDSHAKE = auto()
    RUNNING = auto()
    LEAVING = auto()  # a Goodbye has been sent, none has come
    ENDED = auto()  # a Goodbye has come
    BROKEN = auto()


@dataclass(frozen=True, slots=True)
class Broken:
    """The connection is of no use any more: the other end broke the protocol, refused, or has gone.

    error    why; its `code` is "lost" where the connection ended without a word, "silent" where nothing came
    """

    error: WireError


Event = Message | Broken


FAILED = "failed"  # code of an end's last word that there is no going on with


class Connection:
    """One end of a connection.

    limits    what this end asks of the other
    now       seconds on any clock that does not go back, as in every method below
    roles     what this end is, and what the other one is
    peer      what the other end is called in errors
    phase     what it is at
    error     why it is broken; None: it is not
    queued    gives how many of the bytes that were sent the system still has; for whoever owns the socket to set
    is_new    whether nothing has come from the other end at all, not even something that whoever owns the socket keeps

    What is received comes back as events: the other end's messages but for those that this one answers by itself, and
    `Broken` as the last of all. What is sent must be taken from `outgoing` and sent, also after the last event: it may
    be a refusal.
    """

    roles: tuple[str, str]

    def __init__(self, limits: Limits, now: float, max_frame: int) -> None:
        self.limits = limits
        self.peer = self.roles[1]
        self.phase = Phase.HANDSHAKE
        self.error: WireError | None = None
        self.is_new = True
        self._decoder = FrameDecoder(max_frame)
        self._peer_max_frame = limits.max_frame  # until the peer says
        self._outbox: list[Buffer] = []
        self._undelivered = 0
        self._under_way: deque[tuple[int, int | None]] = deque()  # bytes of each frame to be sent, and whose it is
        self._kept: set[int] = set()  # lanes that have one among them which the session keeps
        self._loose = 0  # bytes of the others
        self._heartbeat_s = limits.heartbeat_s
        self._handshake_until = now + limits.handshake_s
        self._quiet_since = now  # nothing has come, and nothing was asked
        self._now = now
        self._pings = self._unanswered = 0
        self._sent_bytes = 0
        self._taken_before: int | None = None  # by the other end when a heartbeat went by; None: something came since
        self.queued: Callable[[], int] = _nothing

    @property
    def is_open(self) -> bool:
        """Whether anything may still come."""
        return self.phase not in (Phase.ENDED, Phase.BROKEN)

    @property
    def undelivered(self) -> int:
        """Bytes to be sent that have not been reported as sent."""
        return self._undelivered

    @property
    def peer_max_frame(self) -> int:
        """Bytes of a frame that the other end takes, behind the length itself."""
        return self._peer_max_frame

    # What is received

    def receive(self, data: bytes | bytearray | memoryview, now: float) -> list[Event]:
        """Take what was received; what it comes to. No bytes are no news: see `ended`."""
        return self._events(lambda: self._decoder.feed(data), len(data), now)

    def buffer(self) -> memoryview:
        """Where to receive to, instead of `receive`; not to be held on to once `filled` is called."""
        return self._decoder.buffer()

    def filled(self, count: int, now: float) -> list[Event]:
        """So many bytes have been received into the last `buffer()`; what they come to."""
        return self._events(lambda: self._decoder.filled(count), count, now)

    def ended(self) -> list[Event]:
        """The other end has closed the connection, or it has been lost."""
        half = self._decoder.half
        if not self.is_open:
            return []
        if self.phase is Phase.LEAVING and not half:
            self.phase = Phase.ENDED
            return []
        how = f"in the middle of a frame, {half} bytes of which had come" if half else "without a goodbye"
        return [self._break(WireError(f"connection lost {how}{self._doubt()}", "lost"), tell=False)]

    # Time

    def next_deadline(self) -> float | None:
        """When `tick` is to be called at the latest; None: never again."""
        if not self.is_open:
            return None
        return self._handshake_until if self.phase is Phase.HANDSHAKE else self._quiet_since + self._heartbeat_s

    def tick(self, now: float) -> list[Event]:
        """Do what is due: ask whether the other end is there, or give it up."""
        self._now = max(self._now, now)
        deadline = self.next_deadline()
        if deadline is None or self._now < deadline:
            return []
        if self.phase is Phase.HANDSHAKE:
            late = f"the handshake is not over after {self.limits.handshake_s:g} s{self._doubt()}"
            return [self._break(WireError(late, "handshake"))]
        if self._takes_more():  # and answers behind that
            self._quiet_since, self._unanswered = self._now, 0
            return []
        if self.phase is Phase.LEAVING or self._unanswered == _MOST_PINGS:
            silent = (self._unanswered + 1) * self._heartbeat_s
            return [self._break(WireError(f"silent for {silent:g} s or more", "silent"))]
        self._quiet_since = self._now
        self._unanswered += 1
        self._pings += 1
        try:
            self._send(Ping(self._pings))
        except WireError as error:
            return [self._break(error)]
        return []

    # What is sent

    def outgoing(self) -> list[Buffer]:
        """Take what is to be sent, in this order. Each buffer is to be sent whole, then reported with `sent`."""
        outbox, self._outbox = self._outbox, []
        return outbox

    def sent(self, count: int) -> None:
        """So many bytes of what `outgoing` gave have been sent."""
        self._undelivered -= count
        self._sent_bytes += count
        while count:
            size, lane = self._under_way.popleft()
            part = min(size, count)
            count -= part
            if lane is None:
                self._loose -= part
            if part < size:
                self._under_way.appendleft((size - part, lane))
            elif lane is not None:
                self._kept.remove(lane)

    def goodbye(self, reason: str) -> None:
        """Send nothing more after this; what the other end still says comes as events. Does nothing when closed."""
        if self.phase in (Phase.HANDSHAKE, Phase.RUNNING):
            self._send(Goodbye(reason))
            self.phase = Phase.LEAVING
            self._quiet_since = self._now
            self._taken_before = self._sent_bytes - self.queued()

    def refuse(self, code: str, text: str) -> None:
        """Tell the other end what is wrong with it, and be done with it. Does nothing when closed."""
        if self.is_open:
            self._break(WireError(text, code))

    # Inside

    def _take(self, message: Message, frame: Frame) -> list[Event]:
        """What a message comes to that is not the same for both ends. Raises WireError where it must not come."""
        raise WireError(f"{message.kind}: expected nothing", "order")

    def _events(self, frames: Callable[[], Iterator[Frame]], count: int, now: float) -> list[Event]:
        if self.phase is Phase.BROKEN or not count:
            return []
        if self.phase is Phase.ENDED:
            return [self._break(WireError("more bytes after its goodbye, expected none", "order"), tell=False)]
        self._now = self._quiet_since = max(self._now, now)
        self._unanswered, self._taken_before = 0, None
        self.is_new = False
        events: list[Event] = []
        try:
            for frame in frames():
                if not self.is_open:
                    raise WireError("more bytes after its goodbye, expected none", "order")
                events += self._message_events(decode(frame), frame)
                if self.error is not None:
                    break
        except WireError as error:
            events.append(self._break(error))
        return events

    def _message_events(self, message: Message, frame: Frame) -> list[Event]:
        if isinstance(message, Refused):
            has_failed = message.code == FAILED  # by itself: it has nothing against this end
            error = WireError(message.text if has_failed else f"refuses: {message.text}", message.code)
            return [self._break(error, tell=False)]
        if isinstance(message, Goodbye):
            self.phase = Phase.ENDED
            return [message]
        if isinstance(message, Ping | Pong):
            if self.phase is Phase.HANDSHAKE:
                raise WireError(f"{message.kind} in the handshake", "order")
            if isinstance(message, Pong) and message.number > self._pings:
                raise WireError(f"pong {message.number}, expected at most {self._pings}", "order")
            if isinstance(message, Ping) and self.phase is Phase.RUNNING:
                self._send(Pong(message.number))
            return []
        return self._take(message, frame)

    def _send(self, message: Message, lane: int | None = None) -> None:
        self._queue(encoded(message, self._peer_max_frame, self.peer), lane)

    def _queue(self, buffers: Sequence[Buffer], lane: int | None = None) -> None:
        """Have a frame sent. Raises WireError where it is too large, and breaks the connection where too much waits.

        A lane's request or answer does not count, where there is no other of it: the session keeps it, so it takes no
        more room by waiting here, and the next connection would have all lanes' to send at once, and break again.
        """
        size = sum(map(len, buffers))
        if lane in self._kept:
            lane = None
        if lane is None and size > self.limits.undelivered:  # no other connection could send it, either
            raise WireError(
                f"frame of {size} bytes, and at most {self.limits.undelivered} may wait to be sent, expected "
                f"limits=Limits(undelivered={size} or more) where it is sent from",
                "frame",
            )
        if lane is None and self._loose + size > self.limits.undelivered:
            self._outbox.clear()
            error = WireError(
                f"{self._loose} bytes not delivered yet and {size} more, expected at most {self.limits.undelivered}",
                "undelivered",
            )
            raise self._break(error, tell=False).error
        self._append(buffers, size, lane)

    def _queue_if_running(self, buffers: Sequence[Buffer], lane: int) -> None:
        if self.phase is Phase.RUNNING:
            self._queue(buffers, lane)

    def _append(self, buffers: Sequence[Buffer], size: int, lane: int | None) -> None:
        self._outbox += buffers
        self._under_way.append((size, lane))
        self._undelivered += size
        if lane is None:
            self._loose += size
        else:
            self._kept.add(lane)

    def _takes_more(self) -> bool:
        """Whether the other end has taken some of what is on its way to it since this was asked last, and not all."""
        queued, before = self.queued(), self._taken_before
        self._taken_before = self._sent_bytes - queued
        is_on_its_way = self._undelivered + queued > 0
        return is_on_its_way and before is not None and self._taken_before > before

    def _check_running(self, what: str) -> None:
        """Raise WireError where nothing can be sent that belongs to a running connection."""
        if self.phase is not Phase.RUNNING:
            raise WireError(f"{what}: the connection is {self.phase.name.lower()}, expected running", "order")

    def _doubt(self) -> str:
        """What may be wrong where the other end has not said a word."""
        return (
            ", and nothing has come: expected the other end to be at work, and both to use TLS, or neither"
            if self.is_new
            else ""
        )

    def _break(self, error: WireError, *, tell: bool = True) -> Broken:
        """Be done with the connection, and say why where that helps."""
        if self.error is None:
            self.error = WireError(f"{self.peer}: {error}", error.code)
            if tell and self.phase is not Phase.LEAVING:
                refusal = encode(Refused.of(error))
                self._append(refusal, sum(map(len, refusal)), None)
            self.phase = Phase.BROKEN
        return Broken(self.error)


def _nothing() -> int:
    return 0


def encoded(message: Message, most: int, peer: str) -> list[Buffer]:
    """A message's frame. Raises WireError where the peer takes frames of at most `most` bytes, and it is larger."""
    buffers = encode(message)
    size = sum(map(len, buffers)) - 4
    if size > most:
        raise WireError(
            f"{message.kind}: frame of {size} bytes, expected at most {most}: {peer} takes no more, unless its "
            f"limits=Limits(max_frame={size} or more)",
            "frame",
        )
    return buffers
