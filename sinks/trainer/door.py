"""Where rollouts come in that feed a trainer: sockets and connections, in a thread of their own."""

import logging
import select
import socket
import ssl
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from time import monotonic, sleep

from rollflow.nodes.policy_weights import Shapes
from rollflow.nodes.remote.lines import Entrance, Lines, quoted
from rollflow.sinks.trainer.forked import keep_from_forked
from rollflow.sinks.trainer.meeting import check_shares, check_together, replace_lost
from rollflow.sinks.trainer.newest_weights import NewestWeights, Published
from rollflow.sinks.trainer.peer import Peer, peer_on
from rollflow.sinks.trainer.shared.borrower import checked, fragments_in
from rollflow.sinks.trainer.source import Arrived, Source
from rollflow.sinks.trainer.windows import Windows
from rollflow.stream.bell import Bell
from rollflow.stream.errors import RollflowError, WireError
from rollflow.stream.wire import (
    FAILED,
    Aside,
    Block,
    Broken,
    Come,
    Done,
    Event,
    Finished,
    Forget,
    Fragment,
    Free,
    Goodbye,
    Hello,
    Lent,
    Limits,
    Phase,
    Receipt,
    Series,
    Settings,
    TrainerSession,
)

logger = logging.getLogger(__name__)

_TICK_S = 0.25
_STANDS_BACK_S = 2e-2  # from the last time that another thread has served
_GRACE_S = 2e-3  # that it has to see by itself that it is woken, as who publishes and asks for the next
_MOST_STRANGERS = 256  # connections that have not proved themselves yet
_MUCH = 1 << 16  # bytes that wait for a source
_GOODBYE_S = 1.0
_COMES_BACK = ("lost", "silent", "undelivered")  # codes of errors after which a source is waited for


class Door:
    """Takes sources in, and what they send, once it is open.

    ahead        fragments that a lane may have begun beyond what is done; None: any number, within the window
    compression  of observations, for sources that can do it; None: none
    windows      how many items a source may send beyond what is done, and how many are needed
    shares       whether sources lend what they send
    own          shapes of the trainer's own weights, for `NewestWeights`

    lock       of the sources and of what has arrived
    sources    that are there or may come back, by the tokens of their sessions; those that have ended as well
    come       tokens of all that have ever come
    arrived    what has come and was not taken, oldest first
    bell       rings when anything has changed
    error      why there is no going on; None: there is
    refusals   why strangers were turned away, for errors
    weights    for all sources
    """

    def __init__(
        self,
        *,
        secret: bytes | None,
        tls: ssl.SSLContext | None,
        limits: Limits,
        ahead: int | None,
        compression: str | None,
        windows: Windows,
        shares: bool = False,
        own: Shapes | None = None,
    ) -> None:
        self.lock = threading.RLock()
        self.sources: dict[bytes, Source] = {}
        self.arrived: list[Arrived] = []
        self.bell = Bell()
        self.error: Exception | None = None
        self.come: set[bytes] = set()
        self.refusals: deque[str] = deque(maxlen=8)
        self.weights = NewestWeights(self.wake, own)
        self._secret, self._tls, self.limits = secret, tls, limits
        self.ahead, self._compression, self._windows = ahead, compression, windows
        self._shares = shares
        self._wake = Bell()
        self._poll = select.poll()
        self._poll.register(self._wake.fileno(), select.POLLIN)
        self._woken = select.poll()
        self._woken.register(self._wake.fileno(), select.POLLIN)
        self._peers: Lines[Peer] = Lines(self._poll)
        self._serving = threading.Lock()  # held by the thread that serves
        self._stands_back_until = 0.0
        self._is_closing = False
        self._parting: str | None = None
        self._failure: str | None = None
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
        return [source for source in list(self.sources.values()) if source.is_connected]  # also without the lock

    def open(self, sockets: Sequence[socket.socket]) -> None:
        """Take in who comes by sockets that are listened on."""
        self._entrance = Entrance(sockets, self._poll)
        self._sockets = sockets
        keep_from_forked(self)
        self._thread = threading.Thread(target=self._run, name="rollflow trainer", daemon=True)
        self._thread.start()

    def publish(self, weights: Published) -> int:
        """Have every source told of weights; their policy version. Waits for nobody, nor for the lock.

        Raises ModuleError where they are not those of a source's module, or more than it takes.
        """
        for source in self.connected:
            if source.connection is not None:
                weights.check_fits(source, source.connection.peer_max_frame, self.limits.undelivered)
        return self.weights.publish(weights)

    def widen(self, held: int) -> None:
        """Have every source send as many more where it was told fewer: they may be on their way to other loops."""
        with self.lock:
            if held <= self._windows.held:
                return
            self._windows.held = held
            for source in self.sources.values():
                if source.connection is not None:
                    self._windows.widen(source)
        self.wake()

    def wake(self) -> None:
        """Have sources told what is new."""
        self._wake.ring()

    def tell_done(self, sources: Collection[Source]) -> None:
        """Have these told what is done: at once where they wait for it, or may soon have to."""
        stands_back = monotonic() < self._stands_back_until  # and tells all afterwards
        if (
            self.ahead is not None
            or not stands_back
            or any(source.waits_soon and source.is_connected for source in sources)
        ):
            self.serve(0)

    def serve(self, patience: float) -> bool:
        """Tell sources what is new, and take what comes within so many seconds, in the thread that calls.

        The door's own thread stands back for a while after this: two that hand every item to each other are slower
        than one. False: it is at it, and is told to look at what is new.
        """
        self._stands_back_until = monotonic() + _STANDS_BACK_S
        if not self.is_open or not self._serving.acquire(blocking=False):
            self.wake()
            return False
        try:
            self._turn(min(patience, _TICK_S))
        finally:
            self._serving.release()
        return True

    def close(self, reason: str | None, failure: str | None = None) -> None:
        """Say goodbye to all for a reason, or what this end has failed by; close every connection."""
        self._parting, self._failure, self._is_closing = reason, failure, True
        self._wake.ring()
        if self._thread is not None:
            self._thread.join()
        self.weights.close()
        self._wake.close()
        self.bell.close()

    def filenos(self) -> Iterator[int]:
        """Descriptors of what it listens on, and of its connections."""
        yield from [each.fileno() for each in (*self._sockets, *self._peers)]

    # In the thread

    def _run(self) -> None:
        try:
            while not self._is_closing:
                self._stand_back()
                with self._serving:
                    self._turn(_TICK_S)
            if self._parting is not None:
                self._say_goodbye(self._parting)
        except Exception as error:
            self.error = error
        finally:
            for peer in self._peers:
                if self._failure is not None and peer.source is not None:  # it waits for another trainer
                    peer.connection.refuse(FAILED, self._failure)
                self._peers.drop(peer)
        self.bell.ring()

    def _stand_back(self) -> None:
        """Let another thread serve, as long as it does so again and again, and soon where somebody is woken."""
        while not self._is_closing and (left := self._stands_back_until - monotonic()) > 0:
            if self._woken.poll(left * 1e3):
                sleep(_GRACE_S)
                if self._woken.poll(0):
                    return

    def _turn(self, patience: float) -> None:
        """Do what there is to do, once there is something."""
        with self.lock:
            for peer in self._peers:
                self._guarded(peer, lambda peer=peer: self._tell(peer))  # type: ignore[misc]
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
        limits, secret = self.limits, self._secret
        self._peers.add(peer_on(sock, where, secret=secret, tls=self._tls, limits=limits, shares=self._shares, now=now))

    def _tell(self, peer: Peer) -> None:
        """Tell a source what is new: its weights first, so that it begins nothing with older ones."""
        source, connection = peer.source, peer.connection
        if source is None or source.connection is not connection or connection.phase is not Phase.RUNNING:
            return
        told = source.told_through(connection)
        if told.wanted != (wanted := (source.session.window, source.awaited)):
            told.wanted = wanted
            compression = self._compression if self._compression in source.compressions else None
            version = 0 if self.weights.published is None else self.weights.published.version
            connection.tell(Settings(self._windows.wanted(source, version, compression).told()))
        is_last = self._is_closing and self._parting is not None  # rollouts begin nothing more
        if connection.undelivered > _MUCH and not is_last:
            return
        newest, sendable = self.weights.published, self.weights.sendable
        if sendable is not None and told.version < sendable.version and not is_last:
            connection.tell(sendable.message)
            told.version = sendable.version
        if self.ahead is not None and newest is not None and told.version < newest.version and not is_last:
            return  # what is done may belong to these
        done = source.session.done, source.session.kept
        if told.done != done:
            connection.tell(Done(*done))
            told.done = done
        if peer.borrower is not None and (freed := peer.borrower.freed()):
            connection.tell(Free(freed))

    def _take(self, peer: Peer, events: list[Event], now: float) -> None:
        for event in events:
            if not self._guarded(peer, lambda event=event: self._handle(peer, event, now)):  # type: ignore[misc]
                return
        if not peer.connection.is_open and self._peers.of(peer.connection) is not None:
            if peer.connection.error is not None:
                self._broken(peer, peer.connection.error, now)
            self._peers.drop(peer)

    def _guarded(self, peer: Peer, work: Callable[[], None]) -> bool:
        """Do something for a peer; one that it fails for is refused: whatever it is, the others go on."""
        try:
            work()
        except Exception as error:
            code = error.code if isinstance(error, WireError) else "message"
            told = str(error) if isinstance(error, RollflowError) else f"{type(error).__name__}: {error}"
            peer.connection.refuse(code, told)
            self._broken(peer, WireError(told, code), monotonic())
            return False
        return True

    def _handle(self, peer: Peer, event: Event, now: float) -> None:
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
                    source.has_ended = source.has_left = True
            case Block() | Forget():
                checked(peer.borrower, event).take(event)
            case Fragment() | Lent() | Series():
                for arrived in source.read(fragments_in(event, peer.borrower)):
                    self.weights.raise_to(arrived.policy_version or 0)
                    self.arrived.append(arrived)
            case Finished():
                source.session.miss(event.number)
                source.has_finished = source.has_ended = True
            case Receipt() | Come() | Aside():
                source.take_news(event)
                if isinstance(event, Come):
                    self._windows.widen(source)
        self.bell.ring()

    def _take_in(self, peer: Peer, hello: Hello) -> None:
        """A rollout has proved itself: it comes back, or is new."""
        peer.called = hello.name
        check_shares(hello, shares=self._shares)
        source = self.sources.get(hello.session) or Source(TrainerSession(hello.session))
        source.introduce(hello, peer.where)
        source.session.window, source.needs = self._windows.of(source)
        check_together(source, self.connected)
        self.weights.meet(source, peer.connection.peer_max_frame, self.limits.undelivered)
        peer.connection.welcome(source.session)
        older, source.connection = source.connection, peer.connection
        peer.source, source.lost_at, source.has_ended, source.is_lost = source, None, source.has_finished, False
        source.joined_at = self.weights.version
        self.come.add(hello.session)
        self.sources[hello.session] = source
        logger.info("rollout %s has come", source.name)
        if older is None:
            replace_lost(source, self.sources.values())
        if self._compression is not None and self._compression not in source.compressions:
            logger.warning("rollout %s can't compress by %s: it sends all as it is", source.name, self._compression)
        old = None if older is None else self._peers.of(older)
        if old is not None:
            self._peers.drop(old)

    def _broken(self, peer: Peer, error: WireError, now: float) -> None:
        """Take down why a connection is over, and then let the other end know."""
        source = peer.source
        if source is None:
            if (told := f"{peer.told.rpartition(':')[0] or peer.told}: {quoted(error)}") not in self.refusals:
                self.refusals.append(told)
            logger.warning("a connection from %s is refused: %s", peer.told, quoted(error))
        elif source.connection is peer.connection:
            source.lost_at, source.reason = now, quoted(error)
            source.is_lost = not source.has_finished and error.code not in _COMES_BACK
            source.has_ended = source.has_finished or source.is_lost
            logger.warning("rollout %s is lost: %s", source.name, quoted(error))
        self._peers.drop(peer)
        self.bell.ring()

    def _leave_overdue(self, now: float) -> None:
        """Wait no more for those that have had their time to come back."""
        for token, source in list(self.sources.items()):
            since = None if source.has_ended else source.lost_at
            if since is not None and now - since >= self.limits.grace_s:
                source.has_ended = source.is_lost = True
                logger.warning("rollout %s is not back within %g s", source.name, self.limits.grace_s)
                self.bell.ring()
            if source.has_left and source.session.done == source.session.taken:  # it never comes again
                del self.sources[token]

    def _say_goodbye(self, reason: str) -> None:
        """Tell what there is to tell, and wait for the other ends to close, so that nothing of it is lost."""
        self._entrance.close()  # who comes now would wait for nothing
        with self.lock:
            for peer in self._peers:
                self._tell(peer)
                peer.connection.goodbye(reason)
                self._peers.write(peer)
        until = monotonic() + _GOODBYE_S
        while (left := until - monotonic()) > 0 and any(peer.source is not None for peer in self._peers):
            self._turn(left)
