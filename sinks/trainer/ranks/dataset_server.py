"""Server of a stream's dataset: gives items to a DataLoader's workers, and to the trainer's other ranks.

`dataset_protocol` has the calls of its clients.
"""

import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from math import inf
from time import monotonic
from typing import Any

from rollflow.nodes.env.remote.remote_envs import address_of, close_sockets, listen_on
from rollflow.nodes.env.remote.software import software
from rollflow.nodes.offloaded.fragment_checks import check_whole
from rollflow.sinks.trainer.ranks.dataset_protocol import (
    DatasetPlace,
    StreamSetup,
    message_of_item,
    part_of_share,
    refusal,
)
from rollflow.sinks.trainer.ranks.rank_dispatch import RankDispatch, RankShare
from rollflow.sinks.trainer.trainer_side.forks import keep_from_forked
from rollflow.sinks.trainer.trainer_side.intake import Intake
from rollflow.sinks.trainer.trainer_side.item_maker import NO_WORKERS, StreamReturns
from rollflow.sinks.trainer.trainer_side.rollout_peer import ArrivedItem, RolloutPeer
from rollflow.sinks.trainer.trainer_side.state import BatchItem
from rollflow.stream import wire
from rollflow.stream.data.errors import RollflowError, RunError, error_text
from rollflow.stream.net.backoff import WaitReminder
from rollflow.stream.net.request_clients import MOST_STRANGERS, ClientPeer, RequestClient, RequestClients, ServerOptions
from rollflow.stream.net.socket_loop import SocketLoop
from rollflow.stream.wire.codec.handshake import MOST_NUMBER

_MOST_CLIENTS, _MOST_WORKERS = 4096, 1024
_WINDOW = 8  # calls that a client may have under way
_MOST_ITEMS, _MOST_BYTES = 64, 64 << 20  # of a part of a share; but one item may have more
_GOODBYE_S = 1.0
_REPLACED = "another loop over this rank's dataset has begun, expected one at a time"


@dataclass(slots=True, eq=False)
class _Reader:
    """Worker or loop of a rank.

    worker        -1: it is the loop itself
    asked         number of its call for a share that has not been answered; 0: there is none
    share, rest   what it was given last, and the items of that which have not been sent
    taken_up      number of the share that it took up last
    introduced    tokens of rollouts that it knows
    version       policy version of its weights; None: it wants none
    is_replaced   True once another loop of the rank has begun
    """

    client: RequestClient
    rank: int
    worker: int = -1
    asked: int = 0
    share: RankShare | None = None
    rest: deque[ArrivedItem] = field(default_factory=deque)
    taken_up: int = 0
    introduced: set[bytes] = field(default_factory=set)
    version: int | None = None
    is_replaced: bool = False


class DatasetServer:
    """Listens for clients, and answers in a thread of its own, until it is closed.

    places     to listen at
    intake     of the stream, where items come from
    setup      how each worker makes its items
    begin      called before an item is taken: lets rollouts connect
    returns    counts the episodes in what is handed over
    handed     called with the records of what rank 0's loop is given, if that loop is followed

    shared    address of the second place, with its port; None: there is none

    Raises EnvError where an address can't be listened on.
    """

    def __init__(
        self,
        places: Sequence[DatasetPlace],
        world_size: int,
        intake: Intake,
        setup: StreamSetup,
        *,
        begin: Callable[[], object],
        returns: StreamReturns,
        handed: Callable[[list[BatchItem]], object],
        join_timeout: float | None,
    ) -> None:
        self._intake, self._listener, self._staleness = intake, intake.listener, intake.age
        self._setup, self._begin, self._returns, self._handed = setup, begin, returns, handed
        self._lock = threading.Lock()  # of the dispatch
        self._dispatch = RankDispatch(world_size, intake.be_done_with)
        self._readers: dict[RequestClient, _Reader] = {}
        self._join_timeout, self._patience = join_timeout, WaitReminder(join_timeout)
        self._absence: WaitReminder | None = None  # of a rank that others wait for
        self._error: RollflowError | None = None  # that ends the stream
        self._has_ended = self._is_closing = self._heeds_bell = False
        self._loop: SocketLoop[ClientPeer] = SocketLoop(self, max_strangers=MOST_STRANGERS)
        self.shared = self._listen(places)
        keep_from_forked(self)
        self._thread = threading.Thread(target=self._run, name="rollflow dataset", daemon=True)
        self._thread.start()

    def _listen(self, places: Sequence[DatasetPlace]) -> str | None:
        self._sockets: list[socket.socket] = []
        with ExitStack() as failing:
            failing.callback(self._loop.close)
            for place in places:
                sockets = listen_on(place.address)
                failing.callback(close_sockets, sockets)
                options = ServerOptions(
                    place.secret, place.tls, place.limits, software(), wire.DatasetConnection, _MOST_CLIENTS, _WINDOW
                )
                self._loop.listen(sockets, options)
                self._sockets += sockets
            failing.pop_all()
        self._clients = RequestClients(
            self._loop, options, self._forget, inf if self._join_timeout is None else self._join_timeout
        )
        return str(address_of(sockets[0])) if len(places) > 1 else None

    def close(self) -> None:
        """Stop answering; shares of loops that have ended are done with."""
        self._is_closing = True
        self._loop.wakeup.ring()
        self._thread.join()
        self._dispatch.finish()

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
        yield from [each.fileno() for each in (*self._sockets, *self._loop.peers)]

    # In the thread

    def _run(self) -> None:
        try:
            while not self._is_closing:
                self._turn(None)
            self._say_goodbye()
        finally:
            for peer in self._loop.peers:
                self._loop.drop(peer)
            self._loop.close()
            close_sockets(self._sockets)

    def _turn(self, until: float | None) -> None:
        """Wait for calls and items, take them, and answer; at the latest at this time."""
        waits = until is None and any(reader.asked for reader in self._readers.values())
        if waits != self._heeds_bell:
            self._loop.heed(self._listener.bell.fileno(), is_heeded=waits)
            self._heeds_bell = waits
        if not waits:
            self._absence = None
        patience = monotonic() + self._patience.left if waits else None
        ready = self._loop.wait_until(until, patience, self._clients.due)
        now = monotonic()
        with self._lock:
            try:
                self._loop.serve(ready, now)
                self._loop.tick(now)
                self._clients.tick(now)
                self._answer() if until is None else None
            except Exception as error:
                self._error = error if isinstance(error, RollflowError) else RunError(error_text(error))
                self._answer()

    def _say_goodbye(self) -> None:
        """Say goodbye, and whether nothing more is for a client: it may not have moved on yet, or have to come back."""
        told, until = set[RequestClient](), monotonic() + _GOODBYE_S
        while True:
            with self._lock:
                for peer in self._loop.peers:
                    if peer.client is not None and peer.connection.phase is wire.ConnectionPhase.RUNNING:
                        reader = self._readers.get(peer.client)
                        is_over = self._has_ended and reader and self._dispatch.queues[reader.rank].is_empty
                        peer.connection.goodbye("the stream was left", drained=bool(is_over))
                        self._loop.peers.write(peer)
                        told.add(peer.client)
                is_awaited = any(not (each.is_replaced or each.client in told) for each in self._readers.values())
            if monotonic() >= until or not (is_awaited or any(peer.client for peer in self._loop.peers)):
                return
            self._turn(until)

    # What the loop asks for

    def handle(self, peer: ClientPeer, event: wire.Message, now: float) -> None:
        """Take a message of a client."""
        client = self._clients.take(peer, event)
        if client is None or not isinstance(event, wire.Query):
            return
        try:
            values = self._called(client, event)
        except RollflowError as error:
            self._send(client, refusal(event.number, error))
        else:
            if values is not None:
                self._send(client, wire.Result(event.number, {}, values, None))

    def fail(self, peer: ClientPeer, error: Exception, now: float) -> None:
        """Refuse a client that something has failed for; it may come back."""
        self._clients.fail(peer, error, now)

    def _forget(self, client: RequestClient) -> None:
        """Let others of its rank have what a client that is gone had."""
        reader = self._readers.pop(client, None)
        if reader is not None and reader.worker >= 0 and not reader.is_replaced:
            self._dispatch.queues[reader.rank].leave(reader.worker)

    # Calls

    def _called(self, client: RequestClient, query: wire.Query) -> dict[str, Any] | None:
        """Values of the answer to a call; None: it is answered later."""
        if query.name == "begin":
            return self._begin_reader(client, query.values)
        reader = self._readers.get(client)
        if reader is None:
            raise RunError(f"{query.name} before begin, expected begin first")
        queue = self._dispatch.queues[reader.rank]
        if query.name == "next":
            if reader.is_replaced or reader.worker < 0:
                raise RunError(_REPLACED)
            queue.be_done_with(reader.worker, _whole(query.values, "done"))
            if masked := _whole(query.values, "masked"):
                self._staleness.lost["masked"] += masked
            reader.asked = query.number
            return None
        number = _whole(query.values, "share")
        if query.name == "take_up":
            share = queue.take_up(number, is_last=query.values.get("is_last") is True)
            reader.taken_up = number
            batch_items = [BatchItem.of(arrived, self._listener.weights.version) for arrived in share.items]
            if not reader.rank:
                self._handed(batch_items)
            return {"items": list(map(list, batch_items))}
        if query.name == "move_on":
            queue.move_on(number)
        elif reader.taken_up == number:  # else it is another loop's
            queue.give_back(number)
        return {}

    def _begin_reader(self, client: RequestClient, values: Mapping[str, Any]) -> dict[str, Any]:
        """Take in a loop, or a worker of one; how its items are made."""
        rank, workers, queues = _whole(values, "rank"), _whole(values, "workers", _MOST_WORKERS), self._dispatch.queues
        if rank >= len(queues):
            raise RunError(
                f"rank is {rank}, expected 0 to {len(queues) - 1}: the stream's dataset has world_size={len(queues)}"
            )
        self._readers[client] = reader = _Reader(client, rank)
        if not workers:
            return {}
        worker, prefetch = _whole(values, "worker", workers - 1), _whole(values, "prefetch", _MOST_WORKERS)
        if prefetch and self._staleness.ahead is not None:
            raise RunError(NO_WORKERS)
        for name, own in self._setup.parts._asdict().items():
            if (has := values.get(f"has_{name}")) is not (own is not None):
                theirs, ours = ("one" if each else "none" for each in (has, own is not None))
                raise RunError(f"{name}: rank {rank} has {theirs}, and rank 0 {ours}, expected the same in all ranks")
        if queues[rank].begin(values.get("loop"), workers, is_followed=values.get("is_followed") is True):
            self._replace(rank)
        reader.worker, reader.version = worker, None if self._setup.parts.module is None else -1
        self._intake.hold(len(queues) * workers * (prefetch + 1))
        setup = self._setup
        return {"yields": setup.yields, "max_lag": setup.max_lag, "on_excess": setup.on_excess}

    def _replace(self, rank: int) -> None:
        """Give workers of the rank's loop before nothing more."""
        for reader in self._readers.values():
            if reader.rank == rank and reader.worker >= 0:
                reader.is_replaced = True
                if reader.asked:
                    self._send(reader.client, refusal(reader.asked, RunError(_REPLACED)))
                    reader.asked = 0

    # Answers

    def _send(self, client: RequestClient, result: wire.Result) -> None:
        self._clients.answer(client, result, partial(refusal, result.number))

    def _answer(self) -> None:
        """Give shares to all workers that wait, as long as there are some."""
        while waiting := [reader for reader in self._readers.values() if reader.asked]:
            if self._error is None:
                served = [reader for reader in waiting if self._serve(reader)]
                if len(served) == len(waiting):
                    return
                if served:
                    continue
                if not self._has_ended:
                    if self._take_more():
                        continue
                    self._check_ranks()
                    return
            for reader in waiting:
                self._send_end(reader)

    def _serve(self, reader: _Reader) -> bool:
        """Give a worker its next share, or the next part of the one that it has; False if there is none."""
        if not reader.rest:
            share = self._dispatch.queues[reader.rank].take(reader.worker)
            if share is None:
                return False
            self._patience.restart()
            reader.share, reader.rest = share, deque(share.items)
            for arrived in () if share.was_sent else share.items:
                self._returns.add_item(arrived)
            share.was_sent = True
        self._give(reader)
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

    def _give(self, reader: _Reader) -> None:
        """Send a worker new weights, or as many items of its share as one message is to have."""
        items: list[tuple[ArrivedItem, wire.Fragment]] = []
        newcomers: dict[bytes, RolloutPeer] = {}
        weights, room = self._weights_for(reader), min(_MOST_BYTES, reader.client.peer.connection.peer_max_frame // 2)
        while weights is None and reader.rest and len(items) < _MOST_ITEMS:
            message = message_of_item(arrived := reader.rest[0])
            room -= sum(map(len, wire.encode(message)))
            if items and room < 0:
                break
            items.append((reader.rest.popleft(), message))
            if (token := arrived.source.session.token) not in reader.introduced:
                newcomers[token] = arrived.source
                reader.introduced.add(token)
        assert reader.share is not None
        head = {"share": reader.share.number, "left": len(reader.rest), "version": self._listener.weights.version}
        number, reader.asked = reader.asked, 0
        self._send(reader.client, part_of_share(number, head, items, newcomers, weights))

    def _weights_for(self, reader: _Reader) -> wire.Weights | None:
        published = self._listener.weights.published
        if reader.version is None or published is None or published.version <= reader.version:
            return None
        reader.version = published.version
        return published.message

    def _send_end(self, reader: _Reader) -> None:
        """Answer by the error that ended the stream, or by its regular end."""
        number, reader.asked = reader.asked, 0
        if self._error is None:
            self._dispatch.queues[reader.rank].has_ended = True
            self._send(reader.client, wire.Result(number, {}, {"share": None}, None))
        else:
            self._send(reader.client, refusal(number, self._error))

    def _check_ranks(self) -> None:
        """Raise RunError if ranks have waited too long for one that is not there."""
        there = [reader for reader in self._readers.values() if reader.client.lost_at is None]
        present = {reader.rank for reader in there if reader.worker >= 0 and not reader.is_replaced}
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


def _whole(values: Mapping[str, Any], name: str, most: int = MOST_NUMBER) -> int:
    """A whole number of a call. Raises WireError where it is none."""
    check_whole(name, values.get(name), 0, most)
    number: int = values[name]
    return number
