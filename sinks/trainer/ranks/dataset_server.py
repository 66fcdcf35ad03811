"""Server of a stream's dataset: gives items to a DataLoader's workers, and to the trainer's other ranks.

A client sends HELLO: rank, worker, number of workers (0: it is the loop itself, which asks for no items), prefetch
factor (0: none), whether the loop is followed, and two numbers that identify the loop. A worker's hello is answered by
a pickled `StreamSetup`. Then requests follow, a kind and two numbers:

    NEXT         number of shares that are done with, where the loop is not followed; steps masked since the last
                 request. Answer: a `DatasetAnswer`, None at the end of the stream
    TAKE_UP      number of a share of which the loop is given an item; whether that is its last. Answer: a list of
                 `BatchItem`, None where the stream has been left and nothing more is for this rank
    MOVE_ON      number of a share that the loop has moved on from, and 0. No answer
    GIVE_BACK    number of a share that the loop took up last, and was not given after all, and 0. No answer

An exception as an answer is to be raised.
"""

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

from rollflow.nodes.env.remote.remote_envs import close_sockets, listen_on
from rollflow.nodes.modules.weights_codec import Arrays
from rollflow.sinks.trainer.messages.item_message import AnyFragment, arrays_of
from rollflow.sinks.trainer.ranks import pickle_channel
from rollflow.sinks.trainer.ranks.rank_dispatch import RankDispatch, RankShare
from rollflow.sinks.trainer.trainer_side.forks import keep_from_forked
from rollflow.sinks.trainer.trainer_side.intake import Intake
from rollflow.sinks.trainer.trainer_side.item_maker import NO_WORKERS, LearnerConnector, StreamReturns, Yields
from rollflow.sinks.trainer.trainer_side.rollout_peer import ArrivedItem
from rollflow.sinks.trainer.trainer_side.staleness import OnExcess
from rollflow.sinks.trainer.trainer_side.state import BatchItem
from rollflow.stream.data.errors import RollflowError, RunError
from rollflow.stream.graph.wakeup import Wakeup
from rollflow.stream.net.backoff import WaitReminder
from rollflow.stream.wire import UnixAddress

logger = logging.getLogger(__name__)

HELLO, REQUEST = struct.Struct("<5I2Q"), struct.Struct("<B2Q")
NEXT, TAKE_UP, MOVE_ON, GIVE_BACK = range(4)
_INTRODUCED = ("name", "spaces", "action_space", "is_stateful", "is_by_module", "agents")  # of a rollout, to a client
_SLOWEST_S = 60.0  # that a client may take to read an answer


class StreamSetup(NamedTuple):
    """Arguments of a `TrainerStream` that a process needs to make its batches."""

    yields: Yields
    learner_connector: LearnerConnector | None
    module: Any
    max_lag: int | None
    on_excess: OnExcess


class DatasetAnswer(NamedTuple):
    """Share of items for a worker.

    share            number of the share
    introductions    token -> what a `RolloutPeer` is made of, of rollouts that are new to the client
    items            token, number, fragment or columns of a train batch (name -> any[B, ...]), oldest policy version
    version          newest policy version
    weights          that were published since the last answer, for the client's module; None: none were
    """

    share: int
    introductions: dict[bytes, dict[str, Any]]
    items: list[tuple[bytes, int, Any, int | None]]
    version: int
    weights: Arrays | None


@dataclass(slots=True, eq=False)
class _Client:
    """Connected client.

    worker        -1: it is the loop itself
    waits         True if its request has not been answered
    taken_up      number of the share that it took up last
    introduced    tokens of rollouts that it has got descriptions of
    version       policy version of its weights
    """

    sock: socket.socket
    rank: int = -1
    worker: int = -1
    waits: bool = False
    taken_up: int = 0
    introduced: set[bytes] = field(default_factory=set)
    version: int = -1


class DatasetServer:
    """Listens on a Unix socket, and answers in a thread of its own, until it is closed.

    intake     of the stream, where items come from
    setup      sent to each worker first
    begin      called before an item is taken: lets rollouts connect
    returns    counts the episodes in what is handed over
    handed     called with the records of what rank 0's loop is given, if that loop is followed
    """

    def __init__(
        self,
        address: UnixAddress,
        world_size: int,
        intake: Intake,
        setup: StreamSetup,
        *,
        begin: Callable[[], object],
        returns: StreamReturns,
        handed: Callable[[list[BatchItem]], object],
        join_timeout: float | None,
    ) -> None:
        self._listeners = listen_on(address)
        self._intake, self._listener, self._staleness = intake, intake.listener, intake.age
        self._setup, self._begin, self._returns, self._handed = setup, begin, returns, handed
        self._lock = threading.Lock()  # of the dispatch
        self._dispatch = RankDispatch(world_size, intake.be_done_with)
        self._clients: dict[int, _Client] = {}
        self._join_timeout, self._patience = join_timeout, WaitReminder(join_timeout)
        self._absence: WaitReminder | None = None  # of a rank that others wait for
        self._error: RollflowError | None = None  # that ends the stream
        self._has_ended = self._is_closing = False
        self._wake = Wakeup()
        keep_from_forked(self)
        self._thread = threading.Thread(target=self._run, name="rollflow dataset", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop answering; shares of loops that have ended are done with."""
        self._is_closing = True
        self._wake.ring()
        self._thread.join()
        self._dispatch.finish()
        self._wake.close()

    def taken(self) -> list[ArrivedItem]:
        """Items that loops have been given and are not done with. From any thread."""
        with self._lock:
            return self._dispatch.taken()

    def move_on(self) -> None:
        """Move on from the shares that followed loops were given last. From any thread."""
        with self._lock:
            self._dispatch.move_on()

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
        """Wait for requests and items, read them, and answer."""
        poll = select.poll()
        waits = any(client.waits for client in self._clients.values())
        for fd in (self._wake.fileno(), self._listeners[0].fileno(), *self._clients):
            poll.register(fd, select.POLLIN)
        if waits:
            poll.register(self._listener.bell.fileno(), select.POLLIN)
        else:
            self._absence = None
        ready = {fd for fd, _ in poll.poll(self._patience.left * 1e3 if waits else None)}
        with self._lock:
            self._attend(ready)

    def _attend(self, ready: set[int]) -> None:
        """Read from the sockets that are ready, and answer."""
        for fd in ready & self._clients.keys():  # before accepting, since a client that left may come again
            self._with(self._clients[fd], self._read)
        if self._listeners[0].fileno() in ready:
            self._accept()
        try:
            self._answer()
        except Exception as error:
            self._error = error if isinstance(error, RollflowError) else RunError(f"{type(error).__name__}: {error}")
            self._answer()

    def _accept(self) -> None:
        sock, _ = self._listeners[0].accept()
        sock.settimeout(_SLOWEST_S)
        client = self._clients[sock.fileno()] = _Client(sock)
        self._with(client, self._greet)

    def _greet(self, client: _Client) -> None:
        pickle_channel.check_same_user(client.sock, "a process that asks for batches")
        hello = pickle_channel.receive_exactly(client.sock, HELLO.size)
        rank, worker, workers, prefetch, is_followed, *loop = HELLO.unpack(hello)
        queues = self._dispatch.queues
        if rank >= len(queues):
            raise RunError(
                f"rank is {rank}, expected 0 to {len(queues) - 1}: the stream's dataset has world_size={len(queues)}"
            )
        client.rank = rank
        if not workers:
            return
        if prefetch and self._staleness.ahead is not None:
            raise RunError(NO_WORKERS)
        if queues[rank].begin(tuple(loop), workers, is_followed=bool(is_followed)):
            for other in [other for other in self._clients.values() if other.rank == rank and other.worker >= 0]:
                self._drop(other, leaves=False)
        client.worker = worker
        self._intake.hold(len(queues) * workers * (prefetch + 1))
        pickle_channel.send(client.sock, cloudpickle.dumps(self._setup))

    def _read(self, client: _Client) -> None:
        kind, first, second = REQUEST.unpack(pickle_channel.receive_exactly(client.sock, REQUEST.size))
        queue = self._dispatch.queues[client.rank]
        if kind == MOVE_ON:
            queue.move_on(first)
        elif kind == GIVE_BACK:
            if client.taken_up == first:  # it may be another loop's
                queue.give_back(first)
        elif kind == TAKE_UP:
            share = queue.take_up(first, is_last=bool(second))
            client.taken_up = first
            batch_items = [BatchItem.of(arrived, self._listener.weights.version) for arrived in share.items]
            if not client.rank:
                self._handed(batch_items)
            pickle_channel.send(client.sock, batch_items)
        else:
            queue.be_done_with(client.worker, first)
            if second:
                self._staleness.lost["masked"] += second
            client.waits = True

    def _with(self, client: _Client, work: Callable[[_Client], None]) -> None:
        """Call `work` with a client; one that is gone meanwhile, or refused, is dropped."""
        try:
            try:
                work(client)
            except RollflowError as error:
                pickle_channel.send(client.sock, error)
                self._drop(client)
        except (OSError, EOFError):
            self._drop(client)

    def _drop(self, client: _Client, *, leaves: bool = True) -> None:
        self._clients.pop(client.sock.fileno(), None)
        client.sock.close()
        if client.worker >= 0 and leaves:
            self._dispatch.queues[client.rank].leave(client.worker)

    def _dismiss(self, client: _Client) -> None:
        """Close a connection, with a last answer if nothing more is for the client: it may not have moved on yet."""
        with closing(client.sock), suppress(OSError):
            if self._has_ended and client.rank >= 0 and self._dispatch.queues[client.rank].is_empty:
                pickle_channel.send(client.sock, None)

    # Answers

    def _answer(self) -> None:
        """Give shares to all clients that wait, as long as there are some."""
        while waiting := [client for client in self._clients.values() if client.waits]:
            if self._error is None:
                served = [client for client in waiting if self._serve(client)]
                if len(served) == len(waiting):
                    return
                if served:
                    continue
                if not self._has_ended:
                    if self._take_more():
                        continue
                    self._check_ranks()
                    return
            for client in waiting:
                self._with(client, self._send_end)

    def _serve(self, client: _Client) -> bool:
        """Give a client its next share; False if there is none."""
        share = self._dispatch.queues[client.rank].take(client.worker)
        if share is None:
            return False
        client.waits = False
        self._with(client, lambda client: self._give(client, share))
        return True

    def _take_more(self) -> bool:
        """Take items from the intake; False if they have to be waited for."""
        self._begin()
        dispatch = self._dispatch
        if not dispatch.is_done and not dispatch.is_forming and self._intake.has_newcomers:
            return False  # new lanes take part once no rank has a batch
        taken = self._intake.try_take(self._patience, may_begin=dispatch.is_done)
        if taken is None:
            self._has_ended = True
            for items in dispatch.left_over():
                self._staleness.lost["uneven"] += sum(arrived.num_steps for arrived in items)
        elif taken:
            dispatch.add(taken, self._intake.forget(taken))
        return taken != []

    def _give(self, client: _Client, share: RankShare) -> None:
        self._patience.restart()
        introductions: dict[bytes, dict[str, Any]] = {}
        items = []
        for arrived in share.items:
            token, item = arrived.source.session.token, arrived.item
            if token not in client.introduced:
                introductions[token] = {name: getattr(arrived.source, name) for name in _INTRODUCED}
                client.introduced.add(token)
            if not share.was_sent:
                self._returns.add_item(arrived)
            item = item if isinstance(item, AnyFragment) else arrays_of(item)
            items.append((token, arrived.number, item, arrived.policy_version))
        share.was_sent = True
        version, weights = self._listener.weights.version, self._weights_for(client)
        pickle_channel.send(client.sock, DatasetAnswer(share.number, introductions, items, version, weights))

    def _weights_for(self, client: _Client) -> Arrays | None:
        published = self._listener.weights.published
        if self._setup.module is None or published is None or published.version <= client.version:
            return None
        client.version, weights = published.version, published.message
        return Arrays(dict(weights.tensors), dict(weights.dtypes), dict(weights.others))

    def _send_end(self, client: _Client) -> None:
        """Answer by the error that ended the stream, or by None for its regular end."""
        client.waits = False
        if self._error is None:
            self._dispatch.queues[client.rank].has_ended = True
        pickle_channel.send(client.sock, self._error)

    def _check_ranks(self) -> None:
        """Raise RunError if ranks have waited too long for one that is not there."""
        present = {client.rank for client in self._clients.values() if client.worker >= 0}
        absent = [rank for rank in range(len(self._dispatch.queues)) if rank not in present]
        if not absent:
            self._absence = None
        elif self._absence is None:
            self._absence = WaitReminder(self._join_timeout)
        elif self._absence.is_over:
            raise RunError(
                f"rank {absent[0]} of {len(self._dispatch.queues)} has not asked for batches for "
                f"{self._absence.limit:g} s, expected it to: each gets as many"
            )
