"""Replay host: a replay that rollouts in other processes write into, and that trainers elsewhere sample from."""

import logging
import secrets
import select
import ssl
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from math import inf
from pathlib import Path
from time import monotonic
from typing import Any, Self

import anyio
import anyio.lowlevel
import anyio.to_thread
import numpy as np
from anyio.abc import TaskStatus
from anyio.from_thread import start_blocking_portal
from numpy.typing import NDArray

from rollflow.nodes.argument_checks import checked_number, is_whole
from rollflow.nodes.modules.policy_weights import Arrays, from_arrays
from rollflow.sinks.replay.checkpoint import CheckpointFolder
from rollflow.sinks.replay.replay import Batch, Replay
from rollflow.sinks.replay.sampled_steps import IDS
from rollflow.sinks.trainer.messages import arrays_of
from rollflow.sinks.trainer.stream import Sources, TrainerStream
from rollflow.stream import wire
from rollflow.stream.data.errors import EnvError, ReplayError, RunError, WireError, error_field, error_text, shown
from rollflow.stream.data.system import require
from rollflow.stream.graph.node import out_of_group
from rollflow.stream.net.backoff import WaitReminder
from rollflow.stream.net.endpoint import Endpoint, Secret, address_of, close_sockets, endpoint_at, listen_on
from rollflow.stream.net.socket_loop import Peer, SocketLoop, quoted

logger = logging.getLogger(__name__)
_LOOK_S = 1.0
_TICK_S = 0.25
_MOST_STRANGERS = 256  # connections that have not proved themselves yet
_WINDOW = 64  # queries that a sampler may have under way
_MOST_WAIT_S = 1e6
_REST = 1 << 14  # bytes of an answer besides its arrays, at most
Answer = tuple[Mapping[str, Any], Mapping[str, Any]]  # its columns, and what else there is to say
_POSITION_BITS = 40  # of an id; above them stands the number of the host that gave it


@dataclass(slots=True, eq=False)
class SamplerPeer(Peer[wire.ReceiverConnection]):
    """Connection of a sampler.

    name       that the sampler gives itself
    session    outlives its connections; None: it has not proved itself
    lost_at    when the connection was lost; None: it is there
    """

    name: str = ""
    session: wire.ReceiverSession | None = None
    lost_at: float | None = None


class SampleServer:
    """Answers the queries of samplers. One that has proved itself may come back by another connection within its grace.

        endpoint    to listen on; with port 0, any that is free
        stream      of the rollouts that write into the replay, and act with the weights that samplers publish

        address         with its port
        most_clients    sessions that there may be at a time

    An id is a step's position and a random number of this server: after a restart a position may be another step's, so
    that priorities of earlier ids are passed over. Raises EnvError if the address can't be listened on.
    """

    most_clients = 1024

    def __init__(self, replay: Replay, endpoint: Endpoint, stream: TrainerStream) -> None:
        require("a replay for other processes", (select, "epoll"))
        self._replay, self._stream, self._endpoint = replay, stream, endpoint
        self._first_id = secrets.randbits(62 - _POSITION_BITS) << _POSITION_BITS
        self._clients: dict[bytes, SamplerPeer] = {}  # newest connections, by the tokens of their sessions
        self._held: list[tuple[wire.ReceiverSession, wire.Fragment]] = []  # samples that wait, in the order they came
        self._sockets = listen_on(endpoint.address)
        self.address = address_of(self._sockets[0])
        self._loop: SocketLoop[SamplerPeer] = SocketLoop(self, SamplerPeer, max_strangers=_MOST_STRANGERS)
        self._loop.listen(self._sockets, endpoint.tls)

    async def run(self) -> None:
        """Serve until this is cancelled, then say goodbye."""
        try:
            async with anyio.create_task_group() as self._waiting:  # samples that the rate holds back
                while True:
                    now = monotonic()
                    self._loop.serve(self._loop.wait(0), now)
                    self._loop.tick(now)
                    self._forget_lost(now)
                    with anyio.move_on_after(_TICK_S):
                        await anyio.wait_readable(self._loop.fileno())
        finally:
            self.close()

    def close(self) -> None:
        """Say goodbye, and close the sockets."""
        for peer in self._loop.peers:
            peer.connection.goodbye("the replay host is closing")
            self._loop.drop(peer)
        self._loop.close()
        close_sockets(self._sockets)

    # What the loop asks for

    def connection(self, now: float) -> wire.ReceiverConnection:
        """This end of a connection with a sampler, which has to prove itself."""
        _, limits, secret, _ = self._endpoint
        return wire.ReceiverConnection(accepts="sampler", secret=secret, limits=limits, now=now)

    def handle(self, peer: SamplerPeer, event: wire.Message, now: float) -> None:
        """Take a message of a sampler."""
        if isinstance(event, wire.Hello):
            self._take_in(peer, event)
        elif peer.session is None or self._peer_of(peer.session) is not peer:
            pass
        elif isinstance(event, wire.Goodbye):
            self._loop.drop(peer)
            del self._clients[peer.session.token]
            self._replay.turns.notify()
        elif isinstance(event, wire.Fragment):
            self._answer_held()
            self._answer(peer.session, event)

    def fail(self, peer: SamplerPeer, error: Exception, now: float) -> None:
        """Refuse a sampler that something has failed for; it may come back."""
        reason = error_text(error)
        peer.connection.refuse(error.code if isinstance(error, WireError) else "message", reason)
        if peer.session is None:
            self._loop.turn_away(peer, quoted(reason))
        elif self._peer_of(peer.session) is peer and peer.lost_at is None:
            peer.lost_at = now
            logger.info("sampler %s at %s is lost: %s", quoted(peer.name), peer.where, quoted(reason))

    # Samplers

    def _take_in(self, peer: SamplerPeer, hello: wire.Hello) -> None:
        """Take in a sampler that has proved itself: a new one, or one that comes back.

        Raises WireError if there are too many.
        """
        older = self._clients.get(hello.session)
        if older is None:
            self._make_room()
        session = wire.ReceiverSession(hello.session, window=_WINDOW) if older is None else older.session
        assert session is not None
        peer.connection.welcome(session, credits=_WINDOW)
        peer.name, peer.session = hello.name, session
        self._clients[hello.session] = peer
        self._loop.drop(older)
        self._replay.turns.notify()

    def _peer_of(self, session: wire.ReceiverSession) -> SamplerPeer | None:
        """The newest connection of a session; None: it is known no longer."""
        peer = self._clients.get(session.token)
        return peer if peer is not None and peer.session is session else None

    def _make_room(self) -> None:
        """Forget the sampler that was lost first, if there are as many as may be. Raises WireError if none is lost."""
        if len(self._clients) < self.most_clients:
            return
        lost = {token: peer.lost_at for token, peer in self._clients.items() if peer.lost_at is not None}
        if not lost:
            raise WireError(f"{self.most_clients} clients are served already, expected fewer", "busy")
        del self._clients[min(lost, key=lambda token: lost[token])]

    def _forget_lost(self, now: float) -> None:
        """Forget samplers that have had their time to come back."""
        for token, peer in list(self._clients.items()):
            if peer.lost_at is not None and now >= peer.lost_at + self._endpoint.limits.grace_s:
                del self._clients[token]
                self._replay.turns.notify()

    # Queries

    def _answer(self, session: wire.ReceiverSession, query: wire.Fragment, *, is_over: bool = False) -> None:
        """Answer a query; a sample that is to wait later, unless its time is over."""
        try:
            result = self._called(session, query, is_over=is_over)
        except Exception as error:
            result = _refusal(error)
        if result is None:
            self._held.append((session, query))
            self._waiting.start_soon(self._answer_later, session, query)
            return
        if (peer := self._peer_of(session)) is None:
            return
        try:
            try:
                peer.connection.answer(query.number, *result)
            except WireError as error:
                if error.code == "undelivered":
                    raise
                peer.connection.answer(query.number, *_refusal(error))
        except WireError as error:
            self._loop.fail(peer, error, monotonic())
        else:
            self._loop.write(peer)

    async def _answer_later(self, *held: Any) -> None:
        """Wait for a sample's turn, or until its time is over."""
        with anyio.move_on_after(held[1].rest["wait_s"]):
            await self._replay.turns.wait_in_loop("sample", lambda: held not in self._answer_held())
        self._answer_held(over=held)

    def _answer_held(self, over: Any = None) -> list[Any]:
        """Answer the samples that need not wait, or whose time is over, in the order they came: those that still wait.

        A task that goes on answers those that came before its own as well.
        """
        for held in [*self._held]:
            if held == over or not self._has_to_wait(*held):
                self._held.remove(held)
                self._answer(*held, is_over=True)
                self._replay.turns.notify()
        return self._held

    def _has_to_wait(self, session: wire.ReceiverSession, query: wire.Fragment) -> bool:
        """True for a sample that the rate holds back, or whose sampler may come back."""
        peer = self._peer_of(session)
        return peer is not None and (peer.lost_at is not None or not self._replay.may_sample(query.rest.get("count")))

    def _called(self, session: wire.ReceiverSession, query: wire.Fragment, *, is_over: bool) -> Answer | None:
        """The answer to a query; None: it is to wait."""
        columns, values = {}, {}
        name, module_id = query.rest.get("name"), query.rest.get("module_id")
        if module_id is not None and type(module_id) not in (str, int):
            raise ReplayError(f"module_id is {shown(module_id)}, expected text, a whole number, or none")
        if name == "sample":
            if (batch := self._sample(session, query, is_over=is_over)) is None:
                return None
            columns = arrays_of(batch)
            for part in columns.values() if self._replay.module_ids else [columns]:
                part[IDS] = part[IDS] + self._first_id
        elif name == "update_priorities":
            self._update_priorities(query.columns["ids"], query.columns["values"], module_id)
        elif name == "publish":
            weights = from_arrays(Arrays(dict(query.columns), query.rest["dtypes"], query.rest["others"]))
            values = {"version": self._stream.publish(weights)}
        else:
            values = asdict(self._replay.report(module_id))
        return columns, {"values": values, "problem": None}

    def _sample(self, session: wire.ReceiverSession, query: wire.Fragment, *, is_over: bool) -> Batch | None:
        """A batch, as soon as the rate lets it through; a sampler that is away gets none. None: it is to wait."""
        replay, peer = self._replay, self._peer_of(session)
        count, wait_s = query.rest.get("count"), query.rest.get("wait_s", 0.0)
        if count is not None and not (is_whole(count) and 1 <= count <= replay.capacity):
            raise ReplayError(f"count is {shown(count)}, expected 1 to {replay.capacity}, the host's capacity")
        if type(wait_s) not in (int, float) or not 0 <= wait_s <= _MOST_WAIT_S:
            raise ReplayError(f"wait_s is {shown(wait_s)}, expected seconds, 0 or more")
        if wait_s and not is_over and self._has_to_wait(session, query):
            return None
        if peer is None or peer.lost_at is not None:
            raise ReplayError("the sampler was away")
        may_sample = replay.may_sample(count)
        try:
            return replay.sample(count, max_bytes=peer.connection.peer_max_frame - _REST)
        except ReplayError as error:
            if may_sample:
                raise
            names = ", ".join(self._stream.sources) or "none is there"
            raise ReplayError(f"{error}; rollouts that feed this host: {names}") from None

    def _update_priorities(self, ids: NDArray[Any], values: NDArray[Any], module_id: Any) -> None:
        if ids.shape == values.shape and ids.ndim == 1 and ids.dtype == np.int64:
            is_ours = ids >> _POSITION_BITS == self._first_id >> _POSITION_BITS
            ids, values = ids[is_ours] - self._first_id, values[is_ours]
        self._replay.update_priorities(ids, values, module_id)


def _refusal(error: Exception) -> Answer:
    return {}, {"values": {}, "problem": error_field(error)}


class ReplayHost:
    """Serves a replay, in a thread, until its block is left: `with ReplayHost(...) as host: host.wait()`.

        rollouts       where rollouts send their fragments, by `feed` or `TrainerSink`: 'tcp://host:port',
                       'unix:/path', or 'shm:/path'
        trainers       where a `ReplayClient` samples: 'tcp://host:port' or 'unix:/path'
        secret, tls    as for `RemoteEnvs.listen`, of both
        checkpoint     folder of the replay's state; if it has one, the host goes on from it. None: there is none
        every          seconds between two checkpoints
        limits         of frames, times and bytes under way

        rollouts, trainers    addresses, with their ports once the block is entered

    The replay's rate holds across processes: an insert that it holds back is not done with, and its rollout stands
    still; a sample that it holds back is answered later.

    With a checkpoint, a rollout keeps each fragment until a checkpoint has it. After a kill the next host gets what the
    newest checkpoint lacks, each fragment once. Samples and priorities since that checkpoint are not counted. What has
    changed since the last one is copied and written, at first all of it; while it is copied, nothing is inserted and
    nobody is answered. Leaving the block writes one; the rollouts wait for the next host.

    Without a checkpoint, fragments are acknowledged when they are inserted, and the rollouts are told goodbye: what the
    rate still holds back they count as `undelivered`.

    A rollout whose fragments the replay can't take is refused; the others go on. While the host serves the replay, call
    it by a `ReplayClient` alone.

    Raises ValueError for arguments that don't fit, RunError if an address can't be listened on, ReplayError for a
    checkpoint of another replay, and if another host or replay writes to its folder.
    """

    def __init__(
        self,
        replay: Replay,
        *,
        rollouts: str | wire.Address,
        trainers: str | wire.Address,
        secret: Secret = None,
        tls: ssl.SSLContext | None = None,
        checkpoint: str | Path | None = None,
        every: float = 30.0,
        limits: wire.Limits | None = None,
    ) -> None:
        if not isinstance(replay, Replay):
            raise ValueError(f"replay is {shown(replay)}, expected a Replay()")
        every = checked_number("every", every, above=0, most=inf, noun="seconds")
        self.replay = replay
        self._endpoint = endpoint_at(trainers, secret, tls, limits, listens=True)
        self.trainers = self._endpoint.address
        self._checkpoint, self._every = None if checkpoint is None else CheckpointFolder(checkpoint), every
        self._stream = TrainerStream(
            rollouts,
            secret=secret,
            tls=tls,
            yields="fragments",
            sources=Sources(None, join_timeout=None),
            ack="auto" if checkpoint is None else "manual",
            limits=limits,
        )
        self._stream.log.holder = type(self).__name__, lambda: str(self.replay.report())
        self.rollouts = self._stream.address
        self._handed = self._stream.state_dict()  # after the last insert
        self._saved: Any = None  # what the newest checkpoint has
        self._closing = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            if self._checkpoint is not None:
                if not self._checkpoint.path.parent.is_dir():
                    text = f"checkpoint is {self._checkpoint.path}, expected a path in a folder that is there"
                    raise ValueError(text)
                stack.enter_context(self._checkpoint.held())
                self._go_on_from(self._checkpoint)
            self._portal = stack.enter_context(start_blocking_portal())
            self._served, self._leaving = self._portal.start_task(self._serve)
            self._closing = stack.pop_all()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        with self._closing:
            if not self._served.done():
                self._portal.call(self._leaving.set)
            failure = self._served.exception()
        if failure is not None and failure is not error:
            raise failure

    def wait(self) -> None:
        """Wait until the host fails, and raise its error; or until a signal's handler raises one."""
        self._served.result()

    # In the thread

    async def _serve(self, *, task_status: TaskStatus[anyio.Event]) -> None:
        with out_of_group(), anyio.CancelScope() as scope:
            async with self._stream:
                await self._serve_with(task_status)
                if self._checkpoint is not None:  # rollouts wait for another host, as after a failure
                    scope.cancel()
                    await anyio.lowlevel.checkpoint()

    async def _serve_with(self, task_status: TaskStatus[anyio.Event]) -> None:
        """Serve with the stream open, until the host is to leave; write a last checkpoint."""
        try:
            server = SampleServer(self.replay, self._endpoint, self._stream)
        except EnvError as error:
            raise RunError(str(error)) from error
        self.rollouts, self.trainers = self._stream.address, server.address
        self.replay.turns.enter_loop()
        leaving = anyio.Event()
        async with anyio.create_task_group() as tasks:
            for part in (
                server.run,
                self.replay.turns.relay,
                self._insert_all,
                self._save_again_and_again,
                self._remind,
            ):
                tasks.start_soon(part)
            task_status.started(leaving)
            await leaving.wait()
            tasks.cancel_scope.cancel()
        await self._save()  # not after an error, which may have come in the middle of an insert

    async def _insert_all(self) -> None:
        async for fragment in self._stream:
            try:
                await self.replay.insert_in_loop(fragment)
            except ReplayError as error:
                self._stream.refuse(str(error))
            except anyio.get_cancelled_exc_class():  # while the rate held it back
                self._stream.put_back()
                raise
            if self._checkpoint is not None:
                self._handed = self._stream.state_dict()
            await anyio.lowlevel.checkpoint()

    async def _remind(self) -> None:
        """Log at growing intervals which side has waited while neither went on."""
        seen, reminder = None, WaitReminder()
        while True:
            await anyio.sleep(_LOOK_S)
            report = self.replay.report()
            now_seen = report.waiting, report.inserted, report.sampled
            if now_seen != seen:
                seen, reminder = now_seen, WaitReminder()
            elif report.waiting is not None and reminder.is_long:
                names = ", ".join(self._stream.sources) or "none is there"
                logger.warning("waiting for %.0f s: %s; rollouts: %s", reminder.waited_s, report, names)

    # Checkpoints

    def _go_on_from(self, folder: CheckpointFolder) -> None:
        if not folder.is_there:
            return
        state = folder.read()
        self.replay.set_state(state)
        self._handed = state.get("stream", self._handed)
        self._stream.load_state_dict(self._handed)
        logger.info("going on from %s: %s", folder.path, self.replay.report())

    async def _save_again_and_again(self) -> None:
        while self._checkpoint is not None:
            await anyio.sleep(self._every)
            await self._save()

    async def _save(self) -> None:
        """Write a checkpoint if there is something new, and acknowledge what it has."""
        report = self.replay.report()
        news = report.inserted, report.sampled, self._handed
        if self._checkpoint is None or news == self._saved:
            return
        handed, folder = self._handed, self._checkpoint
        try:
            state = self.replay.get_state(folder.since()) | {"stream": handed}
            await anyio.to_thread.run_sync(folder.write, state)
        except (OSError, MemoryError) as error:
            text = error_text(error)
            logger.warning("%s can't be written: %s; until it can, nothing is acknowledged", folder.path, text)
            return
        self._saved = news
        self._stream.ack(handed)
