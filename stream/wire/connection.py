"""Connection: the common part of both ends of a connection: bytes in and out, deadlines, and how it ends.

There is no I/O here and no clock. The owner of the socket passes in the received bytes and the time, and sends the
buffers of `outgoing`. Subclasses define which message may come when.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from enum import Enum, auto

from rollflow.stream.data.errors import WireError
from rollflow.stream.wire.codec.frame import Buffer, Frame, FrameDecoder
from rollflow.stream.wire.codec.limits import Limits
from rollflow.stream.wire.codec.message import Message, decode, encode
from rollflow.stream.wire.codec.messages import Goodbye, Ping, Pong, Refused

_HANDSHAKE_INBOX = 4 << 10  # bytes of the receive buffer until the handshake is over
_MOST_PINGS = 2  # without an answer before the peer is given up


class ConnectionPhase(Enum):
    """Phase of a connection."""

    HANDSHAKE = auto()
    RUNNING = auto()
    LEAVING = auto()  # a Goodbye has been sent, none has come
    ENDED = auto()  # a Goodbye has come
    BROKEN = auto()


# The last one is an error where the other end broke the protocol, refused, or is gone: the connection is unusable. Its
# `code` is "lost" if the connection ended without a goodbye, "silent" if nothing came.
Event = Message | WireError
FAILED = "failed"  # code of a Refused from an end that has failed itself


class Connection:
    """One end of a connection.

    limits    limits of this end
    now       seconds on a monotonic clock, as in every method below

    roles             names of this end and the other one
    takes             kinds of messages that the other end may send once the connection is running
    peer              name of the other end in errors
    peer_max_frame    largest frame that the other end takes, in bytes, without its length field
    phase             current phase
    error             why the connection is broken; None: it is not
    undelivered       number of bytes that were not yet reported as sent
    queued            returns how many sent bytes are still in the system's buffer; set by the owner of the socket
    may_use_tls       False for a socket of this machine alone, likewise
    is_new            whether nothing has come from the other end, not even bytes that the owner of the socket keeps

    Received bytes become events: the other end's messages, without those that are answered here, and at last `error`,
    if it breaks. The owner of the socket must send the buffers of `outgoing`, also after the last event, since
    they may hold a refusal.
    """

    roles: tuple[str, str]
    takes: tuple[type[Message], ...] = ()

    def __init__(self, limits: Limits, now: float, max_frame: int) -> None:
        self.limits = limits
        self.peer = self.roles[1]
        self.phase = ConnectionPhase.HANDSHAKE
        self.error: WireError | None = None
        self.is_new = True
        self._decoder = FrameDecoder(max_frame, _HANDSHAKE_INBOX)
        self.peer_max_frame = limits.max_frame  # until the peer's is known
        self._outbox: list[Buffer] = []
        self.undelivered = 0
        self._under_way: deque[tuple[int, int | None]] = deque()  # (bytes, lane or None) of each frame to be sent
        self._lanes_queued: set[int] = set()  # lanes with a frame to be sent that the session keeps
        self._loose = 0  # bytes to be sent of frames that no session keeps
        self._heartbeat_s = limits.heartbeat_s
        self._handshake_until = now + limits.handshake_s
        self._quiet_since = now  # since then nothing has come, and no ping was sent
        self._now = now
        self._pings = self._unanswered = 0
        self._sent_bytes = 0
        self._taken_before: int | None = None  # bytes taken by the peer at the last heartbeat; None: bytes came since
        self.queued: Callable[[], int] = int  # 0
        self.may_use_tls = True

    @property
    def is_open(self) -> bool:
        """True if messages may still come."""
        return self.phase not in (ConnectionPhase.ENDED, ConnectionPhase.BROKEN)

    # Receiving

    def receive(self, data: bytes | bytearray | memoryview, now: float) -> list[Event]:
        """Take received bytes; return their events. Empty data mean nothing: see `ended`."""
        return self._events(self._decoder.feed(data), len(data), now)

    def buffer(self) -> memoryview:
        """Memory to receive into, instead of `receive`; invalid once `filled` is called."""
        return self._decoder.buffer()

    def filled(self, count: int, now: float) -> list[Event]:
        """Take `count` bytes that were received into the last `buffer()`; return their events."""
        return self._events(self._decoder.filled(count), count, now)

    def ended(self) -> list[Event]:
        """Record that the connection was closed or lost; return the events."""
        half = self._decoder.half
        if not self.is_open:
            return []
        if self.phase is ConnectionPhase.LEAVING and not half:
            self.phase = ConnectionPhase.ENDED
            return []
        how = f"in the middle of a frame, {half} bytes of which had come" if half else "without a goodbye"
        return [self._break(WireError(f"connection lost {how}{self._doubt()}", "lost"), tell=False)]

    # Time

    def next_deadline(self) -> float | None:
        """The time at which `tick` must be called at the latest; None: never again."""
        if not self.is_open:
            return None
        return (
            self._handshake_until if self.phase is ConnectionPhase.HANDSHAKE else self._quiet_since + self._heartbeat_s
        )

    def tick(self, now: float) -> list[Event]:
        """Send a ping or give the other end up, if that is due; return the events."""
        self._now = max(self._now, now)
        deadline = self.next_deadline()
        if deadline is None or self._now < deadline:
            return []
        if self.phase is ConnectionPhase.HANDSHAKE:
            late = f"the handshake is not over after {self.limits.handshake_s:g} s{self._doubt()}"
            return [self._break(WireError(late, "handshake"))]
        if self._takes_more():  # the bytes before the ping are still being read
            self._quiet_since, self._unanswered = self._now, 0
            return []
        if self.phase is ConnectionPhase.LEAVING or self._unanswered == _MOST_PINGS:
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

    # Sending

    def outgoing(self) -> list[Buffer]:
        """Remove and return the buffers to be sent, in order. Report their bytes by `sent`."""
        outbox, self._outbox = self._outbox, []
        return outbox

    def sent(self, count: int) -> None:
        """Record that `count` more bytes of the buffers from `outgoing` were sent."""
        self.undelivered -= count
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
                self._lanes_queued.remove(lane)

    def tell(self, news: Message) -> None:
        """Send a message, whose arrays must not change until sent. Raises WireError on a connection not running."""
        self._check_running(news.kind)
        self._send(news)

    def goodbye(self, reason: str, *, drained: bool = False) -> None:
        """Send a Goodbye, and nothing after it; events may still come. Does nothing on a closed connection."""
        if self.phase in (ConnectionPhase.HANDSHAKE, ConnectionPhase.RUNNING):
            self._send(Goodbye(reason, drained))
            self.phase = ConnectionPhase.LEAVING
            self._quiet_since = self._now
            self._taken_before = self._sent_bytes - self.queued()

    def refuse(self, code: str, text: str) -> None:
        """Send the other end a refusal, and break the connection. Does nothing on a closed connection."""
        if self.is_open:
            self._break(WireError(text, code))

    # Inside

    def _take(self, message: Message, frame: Frame) -> list[Event]:
        """The events of a message that the ends treat differently. Raises WireError if it must not come now."""
        if self.phase is ConnectionPhase.HANDSHAKE:
            return self._take_handshake(message, frame)
        return self._take_running(message)

    def _take_handshake(self, message: Message, frame: Frame) -> list[Event]:
        raise WireError(f"{message.kind} in the handshake, expected nothing", "order")

    def _take_running(self, message: Message) -> list[Event]:
        if isinstance(message, self.takes):
            return [message]
        expected = ", ".join(kind.kind for kind in self.takes)
        raise WireError(f"{message.kind} from a {self.roles[1]}, expected one of {expected}", "order")

    def _events(self, frames: Iterator[Frame], count: int, now: float) -> list[Event]:
        if self.phase is ConnectionPhase.BROKEN or not count:
            return []
        if self.phase is ConnectionPhase.ENDED:
            return [self._break(WireError("more bytes after its goodbye, expected none", "order"), tell=False)]
        self._now = self._quiet_since = max(self._now, now)
        self._unanswered, self._taken_before = 0, None
        self.is_new = False
        events: list[Event] = []
        try:
            for frame in frames:
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
            has_failed = message.code == FAILED  # the fault is its own
            error = WireError(message.text if has_failed else f"refuses: {message.text}", message.code)
            return [self._break(error, tell=False)]
        if isinstance(message, Goodbye):
            self.phase = ConnectionPhase.ENDED
            return [message]
        if isinstance(message, Ping | Pong):
            if self.phase is ConnectionPhase.HANDSHAKE:
                raise WireError(f"{message.kind} in the handshake", "order")
            if isinstance(message, Pong) and message.number > self._pings:
                raise WireError(f"pong {message.number}, expected at most {self._pings}", "order")
            if isinstance(message, Ping) and self.phase is ConnectionPhase.RUNNING:
                self._send(Pong(message.number))
            return []
        return self._take(message, frame)

    def _send(self, message: Message, lane: int | None = None) -> None:
        self._queue(encoded(message, self.peer_max_frame, self.peer), lane)

    def _queue(self, buffers: Sequence[Buffer], lane: int | None = None) -> None:
        """Queue a frame. Raises WireError if it is too large; also breaks the connection if too many bytes wait.

        The first waiting request or answer of a lane does not count, since the session keeps it anyway. The next
        connection would have to send those of all lanes at once, and would break again.
        """
        size = sum(map(len, buffers))
        if lane in self._lanes_queued:
            lane = None
        if lane is None and size > self.limits.undelivered:  # nor could another connection send it
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
            raise self._break(error, tell=False)
        self._append(buffers, size, lane)

    def _queue_if_running(self, buffers: Sequence[Buffer], lane: int) -> None:
        if self.phase is ConnectionPhase.RUNNING:
            self._queue(buffers, lane)

    def _append(self, buffers: Sequence[Buffer], size: int, lane: int | None) -> None:
        self._outbox += buffers
        self._under_way.append((size, lane))
        self.undelivered += size
        if lane is None:
            self._loose += size
        else:
            self._lanes_queued.add(lane)

    def _takes_more(self) -> bool:
        """True if the other end has taken some of the bytes on their way since the last call, but not all."""
        queued, before = self.queued(), self._taken_before
        self._taken_before = self._sent_bytes - queued
        is_on_its_way = self.undelivered + queued > 0
        return is_on_its_way and before is not None and self._taken_before > before

    def _check_running(self, what: str) -> None:
        """Raise WireError unless the connection is running; `what` names the message to be sent."""
        if self.phase is not ConnectionPhase.RUNNING:
            raise WireError(f"{what}: the connection is {self.phase.name.lower()}, expected running", "order")

    def _doubt(self) -> str:
        """The end of an error's text if nothing has come from the other end: a likely cause."""
        if not self.is_new:
            return ""
        both = ", and both to use TLS, or neither" if self.may_use_tls else ""
        return f", and nothing has come: expected the other end to be at work{both}"

    def _break(self, error: WireError, *, tell: bool = True) -> WireError:
        """Break the connection, and send a refusal if `tell`; the error that it has broken with."""
        if self.error is None:
            self.error = WireError(f"{self.peer}: {error}", error.code)
            if tell and self.phase is not ConnectionPhase.LEAVING:
                refusal = encode(Refused.of(error))
                self._append(refusal, sum(map(len, refusal)), None)
            self.phase = ConnectionPhase.BROKEN
        return self.error


def encoded(message: Message, most: int, peer: str) -> list[Buffer]:
    """The buffers of a message's frame. Raises WireError if it has more than `most` bytes, the peer's limit."""
    buffers = encode(message)
    size = sum(map(len, buffers)) - 4
    if size > most:
        raise WireError(
            f"{message.kind}: frame of {size} bytes, expected at most {most}: {peer} takes no more, unless its "
            f"limits=Limits(max_frame={size} or more)",
            "frame",
        )
    return buffers
