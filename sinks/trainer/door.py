"""Where rollouts come in that feed a trainer: sockets and connections, in a thread of their own."""

import logging
import secrets
import select
import socket
import ssl
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import monotonic

from rollflow.nodes.remote.lines import Entrance, Line, Lines, quoted
from rollflow.nodes.remote.software import software
from rollflow.nodes.remote.transport import transport_for
from rollflow.sinks.trainer.pace_gate import Wanted
from rollflow.sinks.trainer.source import Arrived, Source
from rollflow.stream.bell import Bell
from rollflow.stream.errors import RollflowError, WireError
from rollflow.stream.wire import (
    NONCE_BYTES,
    Broken,
    Done,
    Event,
    Finished,
    Fragment,
    Goodbye,
    Hello,
    Limits,
    Receipt,
    Settings,
    TrainerConnection,
    TrainerSession,
    Weights,
)

logger = logging.getLogger(__name__)

_TICK_S = 0.25
_MOST_STRANGERS = 256  # connections that have not proved themselves yet
_MUCH = 1 << 16  # bytes that wait for a source
_GOODBYE_S = 1.0
_COMES_BACK = ("lost", "silent", "undelivered")  # codes of errors after which a source is waited for


@dataclass(slots=True, eq=False)
class _Peer(Line[TrainerConnection]):
    """A connection, and whose it is."""

    source: Source | None = None


class Door:
    """Takes sources in, and what they send, once it is open.

    ahead        fragments that a lane may have begun beyond what is done; None: any number, within the window
    compression  of observations, for sources that can do it; None: none
    window_of    how many fragments a source may send beyond what is done; raises WireError where it can't be taken
                 in

    lock       of the sources and of what has arrived
    sources    that are there or may come back, by the tokens of their sessions; those that have ended as well
    arrived    what has come and was not taken, oldest first
    bell       rings when anything has changed
    error      why there is no going on; None: there is
    refusals   why strangers were turned away, for errors
    weights    the newest, for all sources; None: none have been published
    version    their policy version, or a newer one that a source came with
    """

    def __init__(
        self,
        *,
        secret: bytes | None,
        tls: ssl.SSLContext | None,
        limits: Limits,
        ahead: int | None,
        compression: str | None,
        window_of: Callable[[Source], int],
    ) -> None:
        self.lock = threading.RLock()
        self.sources: dict[bytes, Source] = {}
        self.arrived: deque[Arrived] = deque()
        self.bell = Bell()
        self.error: Exception | None = None
        self.refusals: deque[str] = deque(maxlen=8)
        self.weights: Weights | None = None
        self.version = 0
        self._secret, self._tls, self._limits = secret, tls, limits
        self._ahead, self._compression, self._window_of = ahead, compression, window_of
        self._wake = Bell()
        self._poll = select.poll()
        self._poll.register(self._wake.fileno(), select.POLLIN)
        self._peers: Lines[_Peer] = Lines(self._poll)
        self._is_closing = False
        self._parting: str | None = None
        self._thread: threading.Thread | None = None

    @property
    def is_open(self) -> bool:
        """Whether sources are taken in."""
        return self._thread is not None

    @property
    def present(self) -> list[Source]:
        """Sources of which more may come."""
        return [source for source in self.sources.values() if source.is_present]

    @property
    def connected(self) -> list[Source]:
        """Sources that can be told something."""
        return [source for source in self.sources.values() if source.is_connected]

    def open(self, sockets: Sequence[socket.socket]) -> None:
        """Take in who comes by sockets that are listened on."""
        self._entrance = Entrance(sockets, self._poll)
        self._thread = threading.Thread(target=self._run, name="rollflow trainer", daemon=True)
        self._thread.start()

    def publish(self, weights: Weights) -> None:
        """Have every source told of weights, whose arrays must stay as they are."""
        with self.lock:
            self.weights, self.version = weights, weights.version
        self.wake()

    def wake(self) -> None:
        """Have sources told what is new."""
        self._wake.ring()

    def close(self, reason: str | None) -> None:
        """Say goodbye to all for a reason, or just go; close every connection."""
        self._parting, self._is_closing = reason, True
        self._wake.ring()
        if self._thread is not None:
            self._thread.join()
        self._wake.close()
        self.bell.close()

    # In the thread

    def _run(self) -> None:
        try:
            while not self._is_closing:
                self._turn(_TICK_S)
            if self._parting is not None:
                self._say_goodbye(self._parting)
        except Exception as error:
            self.error = error
        finally:
            for peer in self._peers:
                self._peers.drop(peer)
        self.bell.ring()

    def _turn(self, patience: float) -> None:
        """Do what there is to do, once there is something."""
        with self.lock:
            for peer in self._peers:
                self._tell(peer)
                self._peers.write(peer)
        events = self._poll.poll(patience * 1e3)
        now = monotonic()
        with self.lock:
            for fd, _ in events:
                self._serve(fd, now)
            for peer in self._peers:
                self._take(peer, peer.connection.tick(now), now)
            self._leave_overdue(now)
            self._entrance.listen_again(now)

    def _serve(self, fd: int, now: float) -> None:
        peer = self._peers.at(fd)
        if peer is not None:
            self._take(peer, peer.transport.read(now), now)
        elif fd in self._entrance:
            self._accept(fd, now)
        elif fd == self._wake.fileno():
            self._wake.silence()

    def _accept(self, fd: int, now: float) -> None:
        arrived = self._entrance.accept(fd, now)
        if arrived is None:
            return
        crowded_out = self._peers.crowd_out(_MOST_STRANGERS)
        if crowded_out is not None:
            self._peers.drop(crowded_out)
        sock, where = arrived
        connection = TrainerConnection(
            software=software(),
            nonce=secrets.token_bytes(NONCE_BYTES),
            secret=self._secret,
            limits=self._limits,
            now=now,
        )
        self._peers.add(_Peer(transport_for(sock, connection, self._tls, dialled=None), connection, where))

    def _tell(self, peer: _Peer) -> None:
        """Tell a source what is new: its weights first, so that it begins nothing with older ones."""
        source, connection = peer.source, peer.connection
        if source is None or source.connection is not connection or not connection.is_open:
            return
        told = source.told
        if told.connection is not connection:
            told.connection, told.version, told.done = connection, -1, (-1, -1)
            compression = self._compression if self._compression in source.compressions else None
            wanted = Wanted(source.session.window or 1, self._ahead, self.version, compression)
            connection.tell(Settings(wanted.told()))
        if connection.undelivered > _MUCH:
            return
        if self.weights is not None and told.version < self.weights.version:
            connection.tell(self.weights)
            told.version = self.weights.version
        done = source.session.done, source.session.kept
        if told.done != done:
            connection.tell(Done(*done))
            told.done = done

    def _take(self, peer: _Peer, events: list[Event], now: float) -> None:
        for event in events:
            try:
                self._handle(peer, event, now)
            except RollflowError as error:
                code = error.code if isinstance(error, WireError) else "message"
                peer.connection.refuse(code, str(error))
                self._broken(peer, WireError(str(error), code), now)
                return
        if not peer.connection.is_open and self._peers.of(peer.connection) is not None:
            if peer.connection.error is not None:
                self._broken(peer, peer.connection.error, now)
            self._peers.drop(peer)

    def _handle(self, peer: _Peer, event: Event, now: float) -> None:
        source = peer.source
        match event:
            case Hello():
                self._take_in(peer, event)
            case Broken():
                self._broken(peer, event.error, now)
            case _ if source is None:
                pass
            case Goodbye():
                self._peers.drop(peer)
                if source.connection is peer.connection:
                    logger.info("rollout %s said goodbye: %s", source.name, quoted(event.reason))
                    source.has_ended = True
            case Fragment():
                arrived = source.read(event)
                if source.is_known(arrived.number) or arrived.is_empty:
                    source.move_on(arrived.number)
                    self.wake()
                else:
                    self.arrived.append(arrived)
            case Finished():
                source.has_ended = source.session.taken >= event.number
            case Receipt():
                source.receipts[event.node] = event
        self.bell.ring()

    def _take_in(self, peer: _Peer, hello: Hello) -> None:
        """A rollout has proved itself: it comes back, or is new."""
        source = self.sources.get(hello.session) or Source(TrainerSession(hello.session))
        source.introduce(hello, peer.where)
        source.session.window = self._window_of(source)
        self.version = max(self.version, source.version)
        peer.connection.welcome(source.session)
        older, source.connection = source.connection, peer.connection
        peer.source, source.lost_at, source.has_ended, source.is_lost = source, None, False, False
        self.sources[hello.session] = source
        logger.info("rollout %s has come", source.name)
        if self._compression is not None and self._compression not in source.compressions:
            logger.warning("rollout %s can't compress by %s: it sends all as it is", source.name, self._compression)
        old = None if older is None else self._peers.of(older)
        if old is not None:
            self._peers.drop(old)

    def _broken(self, peer: _Peer, error: WireError, now: float) -> None:
        self._peers.drop(peer)
        source = peer.source
        if source is None:
            if (told := f"{peer.where.rpartition(':')[0] or peer.where}: {quoted(error)}") not in self.refusals:
                self.refusals.append(told)
            logger.warning("a connection from %s is refused: %s", peer.where, quoted(error))
        elif source.connection is peer.connection:
            source.lost_at = now
            source.has_ended = source.is_lost = error.code not in _COMES_BACK
            logger.warning("rollout %s is lost: %s", source.name, quoted(error))
        self.bell.ring()

    def _leave_overdue(self, now: float) -> None:
        """Wait no more for those that have had their time to come back."""
        for source in self.sources.values():
            if source.lost_at is not None and not source.has_ended:
                if now - source.lost_at >= self._limits.grace_s:
                    source.has_ended = source.is_lost = True
                    logger.warning("rollout %s is not back within %g s", source.name, self._limits.grace_s)
                    self.bell.ring()

    def _say_goodbye(self, reason: str) -> None:
        """Tell what there is to tell, and wait for the other ends to close, so that nothing of it is lost."""
        with self.lock:
            for peer in self._peers:
                self._tell(peer)
                peer.connection.goodbye(reason)
                self._peers.write(peer)
        until = monotonic() + _GOODBYE_S
        while (left := until - monotonic()) > 0 and any(peer.source is not None for peer in self._peers):
            self._turn(left)
