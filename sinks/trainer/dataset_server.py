"""Gives what comes to a trainer to processes that ask for it: a DataLoader's workers, and the trainer's other ranks."""

import logging
import select
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import cloudpickle

from rollflow.nodes.remote.remote_envs import close_sockets, listen_on
from rollflow.nodes.weights_codec import Arrays
from rollflow.sinks.trainer import parcel
from rollflow.sinks.trainer.age import OnExcess
from rollflow.sinks.trainer.choices import NO_WORKERS
from rollflow.sinks.trainer.deal import Deal, Share
from rollflow.sinks.trainer.forked import keep_from_forked
from rollflow.sinks.trainer.handing_over import LearnerConnector, Yields
from rollflow.sinks.trainer.intake import Intake
from rollflow.sinks.trainer.item_message import arrays_of
from rollflow.sinks.trainer.patience import Patience
from rollflow.sinks.trainer.source import Arrived, Source
from rollflow.sinks.trainer.stream_returns import StreamReturns
from rollflow.sinks.trainer.told import Handed, handed
from rollflow.stream.bell import Bell
from rollflow.stream.errors import RollflowError, RunError
from rollflow.stream.fragment import Fragment
from rollflow.stream.wire import UnixAddress

logger = logging.getLogger(__name__)

# Who asks: rank, worker, number of workers (0: the loop itself, which asks for nothing), prefetch factor (0: none),
# whether the loop is followed, and two numbers that are the loop's.
HELLO = struct.Struct("<5I2Q")
# What is said: what it is, and two numbers.
SAID = struct.Struct("<B2Q")
# The next item is asked for: how many of those before are done with, where the loop is not followed, and how many steps
# of theirs were masked since the last.
ASK = 0
# The loop is given something of a share: its number, and whether it is the last of it. The answer is what it was made
# of; None where the stream has been left, and nothing more is for this rank.
TAKE_UP = 1
# The loop has moved on from a share: its number, and 0. There is no answer.
MOVE_ON = 2
# The loop was not given after all what was taken up for it last: a share's number, and 0. There is no answer.
GIVE_BACK = 3
_SLOWEST_S = 60.0  # that a process may take to read what it has asked for


class Setup(NamedTuple):
    """How a stream hands over: what a process that makes train batches of its items has to know."""

    yields: Yields
    learner_connector: LearnerConnector | None
    module: Any
    max_lag: int | None
    on_excess: OnExcess


class Introduction(NamedTuple):
    """What is to be known of a rollout to make train batches of its fragments."""

    name: str
    spaces: list[Any]
    action_space: Any
    is_stateful: bool
    is_by_module: bool


class Given(NamedTuple):
    """An answer: an item.

    share            its number
    introductions    of rollouts that are new to who asked, by token
    items            token, number, fragment or columns of a train batch, oldest policy version
    version          policy version that is the newest
    weights          that were published since the last answer, for the module of who asked; None: none were
    """

    share: int
    introductions: dict[bytes, Introduction]
    items: list[tuple[bytes, int, Any, int | None]]
    version: int
    weights: Arrays | None


@dataclass(slots=True, eq=False)
class _Client:
    """A process that asks.

    worker   -1: it is the loop itself
    waits    whether it has asked and was not answered
    taken    number of the share that it has taken up last
    known    tokens of rollouts that it has been introduced to
    version  of the weights that it has
    """

    sock: socket.socket
    rank: int = -1
    worker: int = -1
    waits: bool = False
    taken: int = 0
    known: set[bytes] = field(default_factory=set)
    version: int = -1


class DatasetServer:
    """Listens on a Unix socket, and answers in a thread of its own, until it is closed.

    intake     what has come
    setup      what each process that asks is told first
    begin      called before anything is taken: lets rollouts in
    returns    of the episodes in what is handed over
    tell       called with what rank 0's loop is given, where that is followed
    """

    def __init__(
        self,
        address: UnixAddress,
        world_size: int,
        intake: Intake,
        setup: Setup,
        *,
        begin: Callable[[], object],
        returns: StreamReturns,
        tell: Callable[[list[Handed]], object],
        join_timeout: float | None,
    ) -> None:
        self._listeners = listen_on(address)
        self._intake, self._door, self._age = intake, intake.door, intake.age
        self._setup, self._begin, self._returns, self._tell = setup, begin, returns, tell
        self._lock = threading.Lock()  # of the deal
        self._deal = Deal(world_size, intake.be_done_with)
        self._clients: dict[int, _Client] = {}
        self._join_timeout, self._patience = join_timeout, Patience(join_timeout)
        self._absence: Patience | None = None  # of a rank that others wait for
        self._end: RollflowError | None = None
        self._has_ended = self._is_closing = False
        self._wake = Bell()
        keep_from_forked(self)
        self._thread = threading.Thread(target=self._run, name="rollflow dataset", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Answer nobody any more; what loops were given that have ended is done with."""
        self._is_closing = True
        self._wake.ring()
        self._thread.join()
        self._deal.finish()
        self._wake.close()

    def taken(self) -> list[Arrived]:
        """What loops have been given and is not done with. From any thread."""
        with self._lock:
            return self._deal.taken()

    def move_on(self) -> None:
        """Be done with what followed loops are at. From any thread."""
        with self._lock:
            self._deal.move_on()

    def filenos(self) -> Iterator[int]:
        """Descriptors of its sockets."""
        yield from [sock.fileno() for sock in self._listeners]
        yield from [client.sock.fileno() for client in list(self._clients.values())]

    # In the thread

    def _run(self) -> None:
        try:
            while not self._is_closing:
                self._turn()
        finally:
            for client in self._clients.values():
                self._dismiss(client)
            close_sockets(self._listeners)

    def _turn(self) -> None:
        """Do what there is to do, once there is something."""
        poll = select.poll()
        waits = any(client.waits for client in self._clients.values())
        for fd in (self._wake.fileno(), self._listeners[0].fileno(), *self._clients):
            poll.register(fd, select.POLLIN)
        if waits:
            poll.register(self._door.bell.fileno(), select.POLLIN)
        else:
            self._absence = None
        ready = {fd for fd, _ in poll.poll(self._patience.left * 1e3 if waits else None)}
        with self._lock:
            self._attend(ready)

    def _attend(self, ready: set[int]) -> None:
        """Read what has come, and answer."""
        for fd in ready & self._clients.keys():  # before those that come: who left may come again
            self._with(self._clients[fd], self._read)
        if self._listeners[0].fileno() in ready:
            self._accept()
        try:
            self._answer()
        except Exception as error:
            self._end = error if isinstance(error, RollflowError) else RunError(f"{type(error).__name__}: {error}")
            self._answer()

    def _accept(self) -> None:
        sock, _ = self._listeners[0].accept()
        sock.settimeout(_SLOWEST_S)
        client = self._clients[sock.fileno()] = _Client(sock)
        self._with(client, self._greet)

    def _greet(self, client: _Client) -> None:
        parcel.check_same_user(client.sock, "a process that asks for batches")
        hello = parcel.receive_exactly(client.sock, HELLO.size)
        rank, worker, workers, prefetch, is_followed, *loop = HELLO.unpack(hello)
        hands = self._deal.hands
        if rank >= len(hands):
            told = f"rank is {rank}, expected 0 to {len(hands) - 1}: the stream's dataset has world_size={len(hands)}"
            raise RunError(told)
        client.rank = rank
        if not workers:
            return
        if prefetch and self._age.ahead is not None:
            raise RunError(NO_WORKERS)
        if hands[rank].begin(tuple(loop), workers, is_followed=bool(is_followed)):
            for other in [other for other in self._clients.values() if other.rank == rank and other.worker >= 0]:
                self._drop(other, leaves=False)
        client.worker = worker
        self._intake.hold(len(hands) * workers * (prefetch + 1))
        parcel.send(client.sock, cloudpickle.dumps(self._setup))

    def _read(self, client: _Client) -> None:
        kind, first, second = SAID.unpack(parcel.receive_exactly(client.sock, SAID.size))
        hand = self._deal.hands[client.rank]
        if kind == MOVE_ON:
            hand.move_on(first)
        elif kind == GIVE_BACK:
            if client.taken == first:  # it may be another loop's
                hand.give_back(first)
        elif kind == TAKE_UP:
            share = hand.take_up(first, is_last=bool(second))
            client.taken = first
            told = [handed(arrived, self._door.weights.version) for arrived in share.items]
            if not client.rank:
                self._tell(told)
            parcel.send(client.sock, told)
        else:
            hand.be_done_with(client.worker, first)
            if second:
                self._age.lost["masked"] += second
            client.waits = True

    def _with(self, client: _Client, work: Callable[[_Client], None]) -> None:
        """Do something with a client; one that is gone meanwhile, or refused, is dropped."""
        try:
            try:
                work(client)
            except RollflowError as error:
                parcel.send(client.sock, error)
                self._drop(client)
        except (OSError, EOFError):
            self._drop(client)

    def _drop(self, client: _Client, *, leaves: bool = True) -> None:
        self._clients.pop(client.sock.fileno(), None)
        client.sock.close()
        if client.worker >= 0 and leaves:
            self._deal.hands[client.rank].leave(client.worker)

    def _dismiss(self, client: _Client) -> None:
        """Tell a process that there is nothing more for it, where that is so: it may still be at what it has."""
        with closing(client.sock), suppress(OSError):
            if self._has_ended and client.rank >= 0 and self._deal.hands[client.rank].is_empty:
                parcel.send(client.sock, None)

    # What is given

    def _answer(self) -> None:
        """Give everybody who waits what there is."""
        while waiting := [client for client in self._clients.values() if client.waits]:
            if self._end is not None:
                for client in waiting:
                    self._with(client, self._fail)
                continue
            served = [client for client in waiting if self._serve(client)]
            if len(served) == len(waiting):
                return
            if served:
                continue
            if self._has_ended:
                for client in waiting:
                    self._with(client, self._say_end)
                continue
            if not self._take_more():
                self._check_ranks()
                return

    def _serve(self, client: _Client) -> bool:
        """Whether there was something for who waits."""
        share = self._deal.hands[client.rank].take(client.worker)
        if share is None:
            return False
        client.waits = False
        self._with(client, lambda client: self._give(client, share))
        return True

    def _take_more(self) -> bool:
        """Whether there was more, or no more comes."""
        self._begin()
        deal = self._deal
        if not deal.is_done and not deal.is_forming and self._intake.has_newcomers:
            return False  # they are let in when no rank has anything in its hands
        taken = self._intake.try_take(self._patience, may_begin=deal.is_done)
        if taken is None:
            self._has_ended = True
            for items in deal.left_over():
                self._age.lost["uneven"] += sum(arrived.num_steps for arrived in items)
        elif taken:
            deal.add(taken, self._intake.forget(taken))
        return taken != []

    def _give(self, client: _Client, share: Share) -> None:
        self._patience.restart()
        introductions: dict[bytes, Introduction] = {}
        items = []
        for arrived in share.items:
            token, item = arrived.source.session.token, arrived.item
            if token not in client.known:
                introductions[token] = _introduced(arrived.source)
                client.known.add(token)
            if not share.was_handed:
                self._count(arrived)
            item = item if isinstance(item, Fragment) else arrays_of(item)
            items.append((token, arrived.number, item, arrived.policy_version))
        share.was_handed = True
        version = self._door.weights.version
        parcel.send(client.sock, Given(share.number, introductions, items, version, self._news_for(client)))

    def _count(self, arrived: Arrived) -> None:
        """Add the episodes that have ended in an item."""
        if isinstance(arrived.item, Fragment):
            self._returns.add(arrived.item, arrived.source.session.token)
        else:
            self._returns.take_finished(arrived.finished)

    def _news_for(self, client: _Client) -> Arrays | None:
        published = self._door.weights.published
        if self._setup.module is None or published is None or published.version <= client.version:
            return None
        client.version, weights = published.version, published.message
        return Arrays(dict(weights.tensors), dict(weights.dtypes), dict(weights.others))

    def _fail(self, client: _Client) -> None:
        client.waits = False
        parcel.send(client.sock, self._end)

    def _say_end(self, client: _Client) -> None:
        client.waits = False
        self._deal.hands[client.rank].has_ended = True
        parcel.send(client.sock, None)

    def _check_ranks(self) -> None:
        """Raise RunError where others wait for a rank that is not there for too long."""
        there = {client.rank for client in self._clients.values() if client.worker >= 0}
        absent = [rank for rank in range(len(self._deal.hands)) if rank not in there]
        if not absent:
            self._absence = None
        elif self._absence is None:
            self._absence = Patience(self._join_timeout)
        elif self._absence.is_over:
            told = f"rank {absent[0]} of {len(self._deal.hands)} has not asked for batches"
            raise RunError(f"{told} for {self._absence.limit:g} s, expected it to: each gets as many")


def _introduced(source: Source) -> Introduction:
    return Introduction(source.name, source.spaces, source.action_space, source.is_stateful, source.is_by_module)
