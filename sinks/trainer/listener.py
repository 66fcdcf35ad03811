"""Listener of a trainer: it takes in rollouts and what they send, in a thread of its own."""

import logging
import secrets
import select
import socket
import threading
from collections.abc import Collection, Iterable, Iterator, Sequence
from time import monotonic, sleep
from typing import Any

from rollflow.nodes.offloaded.fragment_message import refusing
from rollflow.sinks.trainer.lending import FragmentBorrower
from rollflow.sinks.trainer.messages import LANE_NEWS, RolloutDescription
from rollflow.sinks.trainer.newest_weights import NewestWeights, check_fits, frame_size
from rollflow.sinks.trainer.rollout_peer import ArrivedItem, PeerLife, RolloutConnection, RolloutPeer
from rollflow.sinks.trainer.rounds import Rounds
from rollflow.sinks.trainer.uplink import NOTHING
from rollflow.stream import wire
from rollflow.stream.data.errors import WireError, error_text, shown
from rollflow.stream.graph.wakeup import Wakeup
from rollflow.stream.net.descriptor_transport import DescriptorTransport
from rollflow.stream.net.endpoint import Endpoint
from rollflow.stream.net.socket_loop import COMES_BACK, SocketLoop, look_s, quoted

logger = logging.getLogger(__name__)

_TICK_S = 0.25
_ALL_S = 1.0  # after which all are told again, whoever has news
_STANDS_BACK_S = 2e-2  # from the last time that another thread has served
_GRACE_S = 2e-3  # that the other thread has to see by itself that it is woken, as one that publishes and asks for more
_MOST_STRANGERS = 256  # connections that have not proved themselves yet
_MUCH = 1 << 16  # bytes that wait for a rollout
_GOODBYE_S = 1.0
_COME_BACK_S = 5.0  # in which rollouts that have lived on dial again
_GONE = PeerLife.AWAY, PeerLife.LOST


class TrainerListener:
    """Takes in rollouts that feed a trainer, its sources, and what they send, once it is open.

    endpoint    that sources dial
    rounds      say how far sources may run ahead

    sockets    listened on, of the owner, who sets them before `open` and closes them
    lock       of the sources and of arrived items
    sources    sources that are there, may come back, or have ended, by the tokens of their sessions
    come       tokens of all that have ever come
    arrived    items that have come and were not taken, oldest first
    bell       rings when any of these has changed
    error      error that has ended this; None: there is none
    weights    newest weights, for all sources
    goes_on    whether the trainer goes on from the state of another
    states     token -> name and state of rollouts that were saved together last: see `_state_for`
    """

    def __init__(self, endpoint: Endpoint, rounds: Rounds) -> None:
        self._loop: SocketLoop[RolloutConnection] = SocketLoop(self, RolloutConnection, max_strangers=_MOST_STRANGERS)
        self.lock = self._loop.lock
        self.sources: dict[bytes, RolloutPeer] = {}
        self.arrived: list[ArrivedItem] = []
        self.sockets: Sequence[socket.socket] = ()
        self.bell = Wakeup()
        self.error: Exception | None = None
        self.come: set[bytes] = set()
        self.states: dict[bytes, tuple[str, Any]] = {}
        self._given: dict[bytes, RolloutPeer] = {}  # token of a rollout -> the one whose state it is being given
        self._opened_at, self.goes_on = 0.0, False
        self.refusals = self._loop.refusals
        self._endpoint, self.limits, self._shares = endpoint, endpoint.limits, endpoint.shares
        self._rounds = rounds
        self.weights = NewestWeights(self.wake)
        self._behind: set[RolloutPeer] = set()  # sources with news of their own
        self._has_news, self._tells_all_at = False, 0.0  # news of all, and when all are told at the latest
        self._woken = select.poll()
        self._woken.register(self._loop.wakeup.fileno(), select.POLLIN)
        self._serving = threading.Lock()  # held by the thread that serves
        self._stands_back_until = self._looks_at = 0.0
        self._is_closing = False
        self._parting: str | None = None
        self._failure: str | None = None
        self._thread: threading.Thread | None = None

    @property
    def is_open(self) -> bool:
        """True while sources are taken in."""
        return self._thread is not None

    def present(self) -> Iterator[RolloutPeer]:
        """Sources of which more may come; a trainer of thousands asks for the first of them for each item."""
        return (source for source in self.sources.values() if source.is_present)

    @property
    def connected(self) -> list[RolloutPeer]:
        """Sources that have an open connection."""
        return [source for source in list(self.sources.values()) if source.is_connected]  # also without the lock

    def open(self) -> None:
        """Take in what connects to the sockets; again does nothing."""
        if self.is_open:
            return
        self._opened_at = monotonic()
        self._loop.listen(self.sockets, self._endpoint.tls, shares=self._shares)
        self._thread = threading.Thread(target=self._run, name="rollflow trainer", daemon=True)
        self._thread.start()

    def publish(self, weights: wire.Weights) -> int:
        """Send weights to every source; their policy version. Does not wait, nor for the lock.

        Raises ModuleError if they can't be sent, are not those of a source's module, or more than it takes.
        """
        size = frame_size(weights)
        for source in self.connected:
            if source.connection is not None:
                check_fits(weights, size, source, source.connection.peer_max_frame, self.limits.undelivered)
        return self.weights.publish(weights, size)

    def ask_for_states(self) -> list[RolloutPeer]:
        """Ask the rollouts of which more may come, or has come, for their states; those that `owe_state` until then."""
        cut = secrets.randbits(48)  # answers to another trainer are none to this one
        with self.lock:
            asked = [
                each for each in self.sources.values() if each.is_present or each.session.done < each.session.taken
            ]
            for source in self.sources.values():
                source.asked, source.answer = (cut if source in asked else None), {}
        self.wake()
        return asked

    def wake(self) -> None:
        """Tell all sources what is new. From any thread."""
        self._has_news = True
        self._loop.wakeup.ring()

    def tell_done(self, sources: Collection[RolloutPeer]) -> None:
        """Tell sources what is done: at once if they wait for it, or may soon have to."""
        with self.lock:
            self._behind.update(sources)
        stands_back = monotonic() < self._stands_back_until  # and tells them afterwards
        waits = self._rounds.ahead is not None or not stands_back
        if waits or any(source.waits_soon and source.is_connected for source in sources):
            self.serve(0)

    def serve(self, patience: float) -> bool:
        """Tell sources what is new, and take what comes within so many seconds, in the thread that calls.

        The listener's own thread stands back for a while after this: two that hand every item to each other are slower
        than one. False: it is at it, and is woken to look at what is new.
        """
        self._stands_back_until = monotonic() + _STANDS_BACK_S
        if not self.is_open or not self._serving.acquire(blocking=False):
            self._loop.wakeup.ring()
            return False
        try:
            if not self._is_closing:  # its own thread tells the rest
                self._turn(min(patience, _TICK_S))
        finally:
            self._serving.release()
        return True

    def close(self, reason: str | None, failure: str | None = None) -> None:
        """Say goodbye to all for a reason, or what this end has failed by; close every connection."""
        self._parting, self._failure, self._is_closing = reason, failure, True
        self.wake()
        if self._thread is not None:
            self._thread.join()
        self._loop.close()
        self.bell.close()

    # In the thread

    def _run(self) -> None:
        try:
            while not self._is_closing:
                self._stand_back()
                with self._serving:
                    self._turn(_TICK_S)
            if self._parting is not None:
                with self._serving:
                    self._say_goodbye(self._parting)
        except Exception as error:
            self.error = error
        finally:
            for peer in self._loop.peers:
                if self._failure is not None and peer.source is not None:  # it waits for another trainer
                    peer.connection.refuse(wire.FAILED, self._failure)
                self._loop.drop(peer)
        self.bell.ring()

    def _stand_back(self) -> None:
        """Let another thread serve, as long as it does so again and again, and soon if this one is woken."""
        while not self._is_closing and (left := self._stands_back_until - monotonic()) > 0:
            if self._woken.poll(left * 1e3):
                sleep(_GRACE_S)
                if self._woken.poll(0):
                    return

    def _turn(self, patience: float) -> None:
        """Tell what is new, and do what there is to do once there is something, or after so many seconds."""
        now = monotonic()
        with self.lock:
            tells_all = self._has_news or self._shares or now >= self._tells_all_at
            behind, self._behind = self._behind, set()
            if tells_all:
                self._has_news, self._tells_all_at = False, now + _ALL_S
            connections = [source.connection for source in behind if source.connection is not None]
            peers = [peer for each in connections if (peer := self._loop.peer_of(each)) is not None]
            self._loop.send(self._tell, None if tells_all else peers)
        ready = self._loop.wait(patience)
        now = monotonic()
        with self.lock:
            self._loop.serve(ready, now)
            self._loop.tick(now)
            self._leave_overdue(now)

    def _tell(self, peer: RolloutConnection) -> None:
        """Tell a source what is new: its weights first, so that it begins nothing with older ones."""
        source, connection = peer.source, peer.connection
        is_running = connection.phase is wire.ConnectionPhase.RUNNING
        if source is None or source.connection is not connection or not is_running:
            return
        wanted = source.session.window, source.is_awaited, source.asked
        if peer.wanted != wanted and not source.sends_nothing:
            peer.wanted = wanted
            version = 0 if self.weights.published is None else self.weights.published.version
            connection.tell(wire.Settings(self._rounds.order(source, version)))
        is_last = self._is_closing and self._parting is not None  # rollouts begin nothing more
        self._behind.add(source)
        if connection.undelivered > _MUCH and not is_last:
            return
        newest = self.weights.published
        if newest is not None and peer.version < newest.version and not is_last:
            connection.tell(newest)  # before what is done, which may belong to these
            peer.version = newest.version
        done = source.session.done, source.session.kept
        freed = () if peer.borrower is None else peer.borrower.freed()
        if source.told_done != done or freed:
            connection.tell(wire.Done(*done, freed))
            source.told_done = done
        self._behind.discard(source)

    # What the loop asks for

    def connection(self, now: float) -> wire.ReceiverConnection:
        """This end of a connection with a rollout, which has to prove itself."""
        return wire.ReceiverConnection(accepts="source", secret=self._endpoint.secret, limits=self.limits, now=now)

    def handle(self, peer: RolloutConnection, event: wire.Message, now: float) -> None:
        """Take a message of a rollout."""
        source = peer.source
        match event:
            case wire.Hello():
                self._take_in(peer, event)
                if peer.source is not None:
                    self._behind.add(peer.source)
            case _ if source is None:
                pass
            case wire.Goodbye():
                self._loop.drop(peer)
                self._given.pop(source.session.token, None)
                if source.connection is peer.connection:
                    logger.info("rollout %s said goodbye: %s", source.name, quoted(event.reason))
                    source.life = PeerLife.LEFT
            case wire.Fragment():
                with refusing("it is no item for a trainer"):
                    arrived = source.read(event if peer.borrower is None else peer.borrower.fragment(event))
                self.weights.raise_to(arrived.policy_version or 0)
                self.arrived.append(arrived)
            case wire.Metrics():
                told = LANE_NEWS(event.metrics, "metrics")
                if told["lanes"] is not None:
                    source.take_lanes(told["lanes"])
                    self._rounds.widen(source)
                    self._behind.add(source)
                elif told["left"]:
                    source.set_aside(*told["left"])
                elif told["last"] is not None:
                    source.finish(told["last"])
                elif told["cut"] is not None and told["cut"] == source.asked:
                    source.asked, source.answer = None, told
        self.bell.ring()

    def fail(self, peer: RolloutConnection, error: Exception, now: float) -> None:
        """Refuse a rollout that something has failed for, and note why: whatever it is, the others go on."""
        code = error.code if isinstance(error, WireError) else "message"
        reason = error_text(error)
        peer.connection.refuse(code, reason)
        source, reason = peer.source, quoted(reason)
        if source is not None and (given := self._given.pop(source.session.token, None)) is not None:
            given.life, given.born = PeerLife.LOST, None  # others may be given its state
        if source is None:
            self._loop.turn_away(peer, reason)
        elif source.connection is peer.connection:
            source.lose(now, reason, comes_back=code in COMES_BACK)
            logger.warning("%s %s is lost: %s", "follower" if source.sends_nothing else "rollout", source.name, reason)
        self.bell.ring()

    def _take_in(self, peer: RolloutConnection, hello: wire.Hello) -> None:
        """Take in a rollout that has proved itself: a new one, or one that comes back."""
        name, where = quoted(hello.name), peer.where
        peer.where = f"rollout {name} at {where}"
        if isinstance(sends := hello.metadata.get("sends"), str) and sends == NOTHING:
            self._take_in_taker(peer, hello, f"{name} ({where})")
            logger.info("follower %s has come", f"{name} ({where})")
            return
        given = None if hello.session in self.sources else self._state_for(hello)
        if given is not None:  # with which it comes again
            self._take_in_taker(peer, hello, f"{name} ({where})")
            peer.connection.tell(wire.Settings(given))
            return
        source = self.sources.get(hello.session)
        if source is None:
            source = RolloutPeer(wire.ReceiverSession(hello.session, goes_on=self.goes_on))
        with refusing("hello.metadata is of no rollout", "message"):
            source.introduce(RolloutDescription.of(hello.metadata), len(hello.slots))
        if source.born not in (None, source.rollout.born):  # they would hand over the same fragments
            raise WireError("another rollout goes on from the state of this one, which was not there", "session")
        source.called, source.name, source.born = hello.name, f"{name} ({where})", source.rollout.born
        if source.rollout.shares_memory != self._shares:
            listens, dials = ("shm:", "another address") if self._shares else ("another address", "shm:")
            raise WireError(
                f"the trainer listens on {listens} and the rollout dials {dials}, expected 'shm:/path' at both or "
                "neither",
                "memory",
            )
        self._rounds.widen(source)
        check_together(source, self.sources.values())
        version = self.weights.version
        self.weights.meet(source, peer.connection.peer_max_frame, self.limits.undelivered)
        if self.weights.version > version:  # what others have begun is older by more than what is published
            for other in self.sources.values():
                other.joined_at = self.weights.version
        peer.connection.welcome(source.session)
        announce(source, self.sources.values())
        if isinstance(peer.transport, DescriptorTransport):
            peer.borrower = FragmentBorrower(peer.transport)
        older, peer.source = source.connection, source
        source.come(peer.connection, self.weights.version)
        self.come.add(hello.session)
        self.sources[hello.session] = source
        if older is not None:
            self._loop.drop(self._loop.peer_of(older))

    def may_still_come(self, token: bytes) -> bool:
        """True for a rollout that is known from a state, and has not come to this trainer."""
        source = self.sources.get(token)
        return source is not None and source.connection is None

    def _state_for(self, hello: wire.Hello) -> dict[str, Any] | None:
        """The state that a rollout which has not begun is to go on from, by a message's fields; None: there is none.

        It is that of a rollout which was saved and has not come to this trainer, best of the same name. Else it is that
        of a lost one of its name: then its environments begin anew, for more has come of that one since. Raises
        WireError while those that have lived on may still come: it dials again.
        """
        if hello.metadata.get("takes_state") is not True:
            return None
        there = [(self.sources[token], *each) for token, each in self.states.items() if token in self.sources]
        there.sort(key=lambda each: each[1] != hello.name)
        has_own_name = [name for _, name, _ in there].count(hello.name) == 1
        for source, name, data in there:
            if source.connection is None and source.life is not PeerLife.AWAY:
                if monotonic() < self._opened_at + _COME_BACK_S and not (has_own_name and name == hello.name):
                    raise WireError(
                        "rollouts that have lived on are waited for, before others go on from states", "lost"
                    )
                source.called, source.name, source.born = hello.name, quoted(hello.name), hello.session
                source.lose(monotonic(), "it was given the state to go on from", comes_back=True)
                self._given[hello.session] = source
                return {"state": data, "anew": False}
            if source.connection is not None and source.life in _GONE and name == hello.name:
                return {"state": data, "anew": True}
        return None

    def _take_in_taker(self, peer: RolloutConnection, hello: wire.Hello, name: str) -> None:
        """Take in an end that gets weights, or a state, and that no batch waits for: it is none of the sources."""
        session = wire.ReceiverSession(hello.session, window=0)
        peer.connection.welcome(session)
        peer.source = RolloutPeer(session, connection=peer.connection, called=hello.name, name=name, sends_nothing=True)

    def _leave_overdue(self, now: float) -> None:
        """Wait no more for sources that have had their time to come back; of many, not in every turn."""
        if now < self._looks_at:
            return
        self._looks_at = now + look_s(len(self.sources))
        for token, source in list(self.sources.items()):
            if source.life is PeerLife.AWAY and now - source.lost_at >= self.limits.grace_s:
                source.life = PeerLife.LOST
                self.bell.ring()
                logger.warning("rollout %s is not back within %g s", source.name, self.limits.grace_s)
            elif source.life is PeerLife.AWAY and source.reminder.is_long:
                logger.warning("waiting: rollout %s: %s", source.whereabouts(self.limits.grace_s), source.reason)
            if source.life is PeerLife.LEFT and source.session.done == source.session.taken:  # it never comes again
                del self.sources[token]

    def _say_goodbye(self, reason: str) -> None:
        """Tell what there is to tell, and wait for the other ends to close, so that nothing of it is lost."""
        self._loop.stop_listening()  # who comes now would wait for nothing

        def part_with(peer: RolloutConnection) -> None:
            self._tell(peer)
            peer.connection.goodbye(reason)

        self._loop.send(part_with)
        until = monotonic() + _GOODBYE_S
        while (left := until - monotonic()) > 0 and any(peer.source is not None for peer in self._loop.peers):
            self._turn(left)


def check_together(source: RolloutPeer, others: Collection[RolloutPeer]) -> None:
    """Raise WireError for a rollout whose items don't go into one batch with others'; warn of two with one seed.

    Others count while they are connected. They go together: what fits one of them fits all.
    """
    one = next((other for other in others if other is not source and other.is_connected), source)
    if reason := difference(source, one):
        raise WireError(
            f"{reason}, as {one.rollout.module} of rollout {one.name} has, which is here as well; that of this one is "
            f"{source.rollout.module}",
            "spaces",
        )
    if source.rollout.seed is None or source.connection is not None:
        return
    for other in others:
        if other.rollout.seed == source.rollout.seed and other.is_connected:
            logger.warning(
                "rollouts %s and %s both have seed=%d: their environments are seeded alike, and their episodes have "
                "the same ids; expected another seed for each, or none",
                other.name,
                source.name,
                source.rollout.seed,
            )


def announce(source: RolloutPeer, others: Iterable[RolloutPeer]) -> None:
    """Log that a rollout is connected: again, or newly, when it may take the place of a lost one."""
    if source.connection is None:
        logger.info("rollout %s has come", source.name)
        _replace_lost(source, others)
    else:
        gone = f" after {monotonic() - source.lost_at:.1f} s" if source.life in _GONE else ""
        logger.warning("rollout %s is connected again%s", source.name, gone)


def difference(source: RolloutPeer, other: RolloutPeer) -> str:
    """The trait that keeps two rollouts from being learnt from together, of the first and the other; "": none does."""
    mine, theirs = _traits(source), _traits(other)
    for name in {**mine, **theirs}:
        if name not in theirs:
            return f"{name} is {shown(mine[name])}, expected none of that name"
        if mine.get(name) != theirs[name]:
            return f"{name} is {shown(mine[name]) if name in mine else 'missing'}, expected {shown(theirs[name])}"
    return ""


def _traits(source: RolloutPeer) -> dict[str, Any]:
    """Traits that rollouts must share to be learnt from together, by their names for people."""
    rollout = source.rollout
    traits: dict[str, Any] = {name: getattr(rollout, name) for name in ("is_by_module", "is_stateful")}
    for index, each in enumerate(rollout.parts):
        of_part = f" of part {index} of the agents" if rollout.is_by_module else ""
        traits |= {f"agents{of_part}": each.part.agents, f"action_space{of_part}": each.part.recorded_space}
        traits |= {f"spaces[{number}]{of_part}": space for number, space in enumerate(each.seen)}
    return traits | {f"the shape of weight {name!r}": shape for name, shape in rollout.weights.items()}


def _replace_lost(source: RolloutPeer, others: Iterable[RolloutPeer]) -> None:
    """Stop waiting for a lost rollout of the same name, in whose place a new one has come.

    If the lost one comes back all the same, it is taken in.
    """
    for other in others:
        if other is not source and other.life is PeerLife.AWAY and other.called == source.called:
            other.life = PeerLife.LOST
            logger.warning(
                "rollout %s has come in place of %s, which went away and is waited for no more", source.name, other.name
            )
            return
