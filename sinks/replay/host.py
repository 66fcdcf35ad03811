"""Replay host: a replay that rollouts in other processes write into, and that trainers elsewhere sample from."""

import logging
import secrets
import select
import ssl
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from math import inf
from pathlib import Path
from time import monotonic
from typing import Any, Self

import anyio
import anyio.lowlevel
import anyio.to_thread
import numpy as np
from anyio.abc import TaskGroup, TaskStatus
from anyio.from_thread import start_blocking_portal
from numpy.typing import NDArray

from rollflow.nodes.argument_checks import checked_number, is_whole
from rollflow.nodes.env.remote.remote_envs import Secret, address_of, close_sockets, listen_on, secret_bytes
from rollflow.nodes.env.remote.software import software
from rollflow.nodes.modules.weights_codec import Arrays, from_arrays
from rollflow.sinks.replay.checkpoint import CheckpointFolder
from rollflow.sinks.replay.replay import Batch, Replay, first_error
from rollflow.sinks.replay.sampled_steps import IDS
from rollflow.sinks.trainer.messages import arrays_of
from rollflow.sinks.trainer.stream import TrainerStream
from rollflow.stream import wire
from rollflow.stream.data.errors import EnvError, ReplayError, RunError, error_field, error_text, shown
from rollflow.stream.data.system import require
from rollflow.stream.net.backoff import Reminder
from rollflow.stream.net.request_clients import (
    MOST_STRANGERS,
    ClientPeer,
    RequestClient,
    RequestClients,
    ServerOptions,
)
from rollflow.stream.net.socket_loop import SocketLoop
from rollflow.stream.net.transport import check_server_tls

_TICK_S = 0.25
_MOST_CLIENTS = 1024
_WINDOW = 64  # queries that a sampler may have under way
_MOST_WAIT_S = 1e6
_REST = 1 << 14  # bytes of an answer besides its arrays, at most
_POSITION_BITS = 40  # of an id; above them stands the number of the host that gave it
logger = logging.getLogger(__name__)
_LOOK_S = 1.0


class SampleServer:
    """Answers the queries of samplers.

        address     to listen on; with port 0, any that is free
        limits      of frames and times
        publish     has all rollouts act with a `state_dict()`; returns its policy version
        rollouts    gives the names of the rollouts that are there

        address    with its port

    An id is a step's position and a random number of this server: after a restart a position may be another step's, so
    that priorities of earlier ids are passed over. Raises EnvError where the address can't be listened on.
    """

    def __init__(
        self,
        replay: Replay,
        address: wire.Address,
        *,
        secret: bytes | None,
        tls: ssl.SSLContext | None,
        limits: wire.Limits,
        publish: Callable[[Mapping[str, Any]], int],
        rollouts: Callable[[], Sequence[str]],
    ) -> None:
        require("a replay for other processes", (select, "epoll"))
        self._replay, self._publish, self._rollouts = replay, publish, rollouts
        self._first_id = secrets.randbits(62 - _POSITION_BITS) << _POSITION_BITS
        self._sockets = listen_on(address)
        self.address = address_of(self._sockets[0])
        self._epoll = select.epoll()
        self._loop: SocketLoop[ClientPeer] = SocketLoop(self, epoll=self._epoll, max_strangers=MOST_STRANGERS)
        options = ServerOptions(secret, tls, limits, software(), _MOST_CLIENTS, _WINDOW)
        self._clients = RequestClients(self._loop, options, lambda client: self._replay.turns.look_again())
        self._loop.listen(self._sockets, options)
        self._tasks: TaskGroup | None = None  # one for each query that is being answered

    async def run(self) -> None:
        """Serve until this is cancelled, then say goodbye."""
        try:
            async with anyio.create_task_group() as self._tasks:
                while True:
                    now = monotonic()
                    self._loop.serve(self._loop.wait(0), now)
                    self._loop.tick(now)
                    self._clients.tick(now)
                    with anyio.move_on_after(_TICK_S):
                        await anyio.wait_readable(self._epoll.fileno())
        finally:
            self.close()

    def close(self) -> None:
        """Say goodbye, and close the sockets."""
        for peer in self._loop.peers:
            peer.connection.goodbye("the replay host is closing")
            self._loop.drop(peer)
        self._loop.close()
        self._epoll.close()
        close_sockets(self._sockets)

    # What the loop asks for

    def handle(self, peer: ClientPeer, event: wire.Message, now: float) -> None:
        """Take a message of a sampler."""
        client = self._clients.take(peer, event)
        if client is not None and isinstance(event, wire.Hello):
            self._replay.turns.look_again()  # its queries that wait count again
        elif client is not None and isinstance(event, wire.Query):
            assert self._tasks is not None
            self._tasks.start_soon(self._answer, client, event)

    def fail(self, peer: ClientPeer, error: Exception, now: float) -> None:
        """Refuse a sampler that something has failed for; it may come back."""
        self._clients.fail(peer, error, now)

    # Queries

    async def _answer(self, client: RequestClient, query: wire.Query) -> None:
        try:
            columns, values = await self._called(client, query)
            result = wire.Result(query.number, columns, values, None)
        except Exception as error:
            result = _refusal(query.number, error)
        self._clients.answer(client, result, partial(_refusal, query.number))

    async def _called(self, client: RequestClient, query: wire.Query) -> tuple[Batch, dict[str, Any]]:
        """Columns and other values of the answer to a query."""
        module_id = query.values.get("module_id")
        if module_id is not None and type(module_id) not in (str, int):
            raise ReplayError(f"module_id is {shown(module_id)}, expected text, a whole number, or none")
        if query.name == "sample":
            columns = arrays_of(await self._sample(client, query.values))
            for part in columns.values() if self._replay.module_ids else [columns]:
                part[IDS] = part[IDS] + self._first_id
            return columns, {}
        if query.name == "update_priorities":
            self._update_priorities(_array_of(query, "ids"), _array_of(query, "values"), module_id)
            return {}, {}
        if query.name == "publish":
            dtypes, others = query.values.get("dtypes", {}), query.values.get("others", {})
            weights = from_arrays(Arrays(dict(query.arrays), dict(dtypes), dict(others)))
            return {}, {"version": self._publish(weights)}
        return {}, asdict(self._replay.report(module_id))

    async def _sample(self, client: RequestClient, values: Mapping[str, Any]) -> Batch:
        """A batch, as soon as the rate lets it through; a sampler that is away gets none."""
        replay = self._replay
        count, wait_s = values.get("count"), values.get("wait_s", 0.0)
        if count is not None and not (is_whole(count) and 1 <= count <= replay.capacity):
            raise ReplayError(f"count is {shown(count)}, expected 1 to {replay.capacity}, the host's capacity")
        if type(wait_s) not in (int, float) or not 0 <= wait_s <= _MOST_WAIT_S:
            raise ReplayError(f"wait_s is {shown(wait_s)}, expected seconds, 0 or more")
        with anyio.move_on_after(wait_s):
            await replay.turns.wait_in_loop("sample", lambda: self._is_there(client) and replay.may_sample(count))
        if not self._is_there(client):
            raise ReplayError("the sampler was away")
        try:
            most = client.peer.connection.peer_max_frame - _REST
            return replay.sample(count, max_bytes=most)
        except ReplayError as error:
            if replay.may_sample(count):
                raise
            names = ", ".join(self._rollouts()) or "none is there"
            raise ReplayError(f"{error}; rollouts that feed this host: {names}") from None

    def _is_there(self, client: RequestClient) -> bool:
        """True unless a sampler is away. Raises ReplayError once it is known no longer."""
        if client not in self._clients:
            raise ReplayError("the sampler is gone")
        return client.lost_at is None

    def _update_priorities(self, ids: NDArray[Any], values: NDArray[Any], module_id: Any) -> None:
        if ids.shape == values.shape and ids.ndim == 1 and ids.dtype == np.int64:
            is_ours = ids >> _POSITION_BITS == self._first_id >> _POSITION_BITS
            ids, values = ids[is_ours] - self._first_id, values[is_ours]
        self._replay.update_priorities(ids, values, module_id)


def _array_of(query: wire.Query, name: str) -> NDArray[Any]:
    if name not in query.arrays:
        raise ReplayError(f"{query.name} has no {name}, expected ids and values")
    return query.arrays[name]


def _refusal(number: int, error: Exception) -> wire.Result:
    return wire.Result(number, {}, {}, error_field(error))


class ReplayHost:
    """Serves a replay, in a thread, until its block is left: `with ReplayHost(...) as host: host.wait()`.

        rollouts       where rollouts send their fragments, by `feed` or `TrainerSink`: 'tcp://host:port',
                       'unix:/path', or 'shm:/path'
        trainers       where a `ReplayClient` samples: 'tcp://host:port' or 'unix:/path'
        secret, tls    as for `RemoteEnvs.listen`, of both
        checkpoint     folder of the replay's state; where it has one, the host goes on from it. None: there is none
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

    Raises ValueError for arguments that don't fit, RunError where an address can't be listened on, ReplayError for a
    checkpoint of another replay, and where another host or replay writes to its folder.
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
        check_server_tls(tls)
        self.replay = replay
        self.trainers = wire.parse_address(trainers) if isinstance(trainers, str) else trainers
        self._secret, self._tls, self._limits = secret_bytes(secret), tls, limits or wire.Limits()
        wire.check_secret(self.trainers, self._secret)
        self._checkpoint, self._every = None if checkpoint is None else CheckpointFolder(checkpoint), every
        self._stream = TrainerStream(
            rollouts,
            secret=secret,
            tls=tls,
            yields="fragments",
            sources=None,
            join_timeout=None,
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
        try:
            with anyio.CancelScope() as scope:
                async with self._stream:
                    await self._serve_with(task_status)
                    if self._checkpoint is not None:  # rollouts wait for another host, as after a failure
                        scope.cancel()
                        await anyio.lowlevel.checkpoint()
        except ExceptionGroup as group:
            raise first_error(group) from None

    async def _serve_with(self, task_status: TaskStatus[anyio.Event]) -> None:
        """Serve with the stream open, until the host is to leave; write a last checkpoint."""
        try:
            server = SampleServer(
                self.replay,
                self.trainers,
                secret=self._secret,
                tls=self._tls,
                limits=self._limits,
                publish=self._stream.publish,
                rollouts=lambda: self._stream.sources,
            )
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
        seen, reminder = None, Reminder(monotonic())
        while True:
            await anyio.sleep(_LOOK_S)
            report, now = self.replay.report(), monotonic()
            now_seen = report.waiting, report.inserted, report.sampled
            if now_seen != seen:
                seen, reminder = now_seen, Reminder(now)
            elif report.waiting is not None and reminder.is_due(now):
                names = ", ".join(self._stream.sources) or "none is there"
                logger.warning("waiting for %.0f s: %s; rollouts: %s", now - reminder.since, report, names)

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
