"""Sample server: answers the samplers of a replay host, across their connections."""

import logging
import secrets
import select
import socket
import ssl
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from operator import itemgetter
from time import monotonic
from typing import Any

import anyio
import numpy as np
from anyio.abc import TaskGroup
from numpy.typing import NDArray

from rollflow.nodes.argument_checks import is_whole
from rollflow.nodes.env.remote.remote_envs import address_of, close_sockets, listen_on
from rollflow.nodes.modules.weights_codec import Arrays, from_arrays
from rollflow.sinks.replay.replay import Batch, Replay
from rollflow.sinks.replay.sampled_steps import IDS
from rollflow.sinks.trainer.messages import arrays_of
from rollflow.stream import wire
from rollflow.stream.data.errors import ReplayError, WireError, error_field, error_text, shown
from rollflow.stream.data.system import require
from rollflow.stream.net.dialler import Dialled
from rollflow.stream.net.socket_loop import Peer, SocketLoop, quoted, refusal_level
from rollflow.stream.net.transport import transport_for

_TICK_S = 0.25
_MOST_CLIENTS = 1024
_MOST_STRANGERS = 256  # connections that have not proved themselves yet
_WINDOW = 64  # queries that a sampler may have under way
_MOST_WAIT_S = 1e6
_REST = 1 << 14  # bytes of an answer besides its arrays, at most
_POSITION_BITS = 40  # of an id; above them stands the number of the host that gave it
logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class SamplerPeer(Peer[wire.ReplayConnection]):
    """Connection of a sampler.

    name       that the sampler gives itself
    session    outlives its connections; None: it has not proved itself
    lost_at    when the connection was lost; None: it is there
    """

    name: str = ""
    session: wire.ServerSession | None = None
    lost_at: float | None = None


class SampleServer:
    """Answers the queries of samplers. One that has proved itself may come back by another connection within its grace.

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
        self._secret, self._tls, self._limits = secret, tls, limits
        self._first_id = secrets.randbits(62 - _POSITION_BITS) << _POSITION_BITS
        self._clients: dict[bytes, SamplerPeer] = {}  # newest connections, by the tokens of their sessions
        self._sockets = listen_on(address)
        self.address = address_of(self._sockets[0])
        self._epoll = select.epoll()
        self._loop: SocketLoop[SamplerPeer] = SocketLoop(self, epoll=self._epoll, max_strangers=_MOST_STRANGERS)
        self._loop.listen(self._sockets)
        self._tasks: TaskGroup | None = None  # one for each query that is being answered

    async def run(self) -> None:
        """Serve until this is cancelled, then say goodbye."""
        try:
            async with anyio.create_task_group() as self._tasks:
                while True:
                    now = monotonic()
                    self._loop.serve(self._loop.wait(0), now)
                    self._loop.tick(now)
                    self._forget_lost(now)
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

    def greet(self, sock: socket.socket, where: str, now: float, dialled: Dialled | None) -> SamplerPeer:
        """Peer of a socket with a sampler at its other end, which has to prove itself."""
        connection = wire.ReplayConnection(secret=self._secret, limits=self._limits, now=now)
        return SamplerPeer(transport_for(sock, connection, self._tls, dialled=None), connection, where)

    def handle(self, peer: SamplerPeer, event: wire.Message, now: float) -> None:
        """Take a message of a sampler. Raises WireError where there are too many of them."""
        if isinstance(event, wire.Hello):
            self._take_in(peer, event)
        elif peer.session is None or self._peer_of(peer.session) is not peer:
            pass
        elif isinstance(event, wire.Goodbye):
            self._loop.drop(peer)
            self._forget(peer)
        elif isinstance(event, wire.Query):
            assert self._tasks is not None
            self._tasks.start_soon(self._answer, peer.session, event)

    def fail(self, peer: SamplerPeer, error: Exception, now: float) -> None:
        """Refuse a sampler that something has failed for; it may come back."""
        reason = error_text(error)
        peer.connection.refuse(error.code if isinstance(error, WireError) else "message", reason)
        if peer.session is None:
            level = refusal_level(peer.connection)
            logger.log(level, "a connection from %s is refused: %s", peer.where, quoted(reason))
        elif self._peer_of(peer.session) is peer and peer.lost_at is None:
            peer.lost_at = now
            logger.info("sampler %s at %s is lost: %s", quoted(peer.name), peer.where, quoted(reason))

    # Samplers

    def _take_in(self, peer: SamplerPeer, hello: wire.Hello) -> None:
        """Take in a sampler that has proved itself: a new one, or one that comes back."""
        older = self._clients.get(hello.session)
        if older is None:
            self._make_room()
        session = wire.ServerSession(hello.session, _WINDOW) if older is None else older.session
        assert session is not None
        peer.connection.welcome(session)
        peer.name, peer.session = hello.name, session
        self._clients[hello.session] = peer
        if older is not None:
            self._loop.drop(older)
        self._replay.turns.look_again()  # its queries that wait count again

    def _peer_of(self, session: wire.ServerSession) -> SamplerPeer | None:
        """The newest connection of a session; None: it is known no longer."""
        peer = self._clients.get(session.token)
        return peer if peer is not None and peer.session is session else None

    def _make_room(self) -> None:
        if len(self._clients) < _MOST_CLIENTS:
            return
        lost = [(each.lost_at, each) for each in self._clients.values() if each.lost_at is not None]
        if not lost:
            raise WireError(f"{_MOST_CLIENTS} clients are served already, expected fewer", "busy")
        self._forget(min(lost, key=itemgetter(0))[1])

    def _forget_lost(self, now: float) -> None:
        """Forget samplers that have had their time to come back."""
        for peer in list(self._clients.values()):
            if peer.lost_at is not None and now >= peer.lost_at + self._limits.grace_s:
                self._forget(peer)

    def _forget(self, peer: SamplerPeer) -> None:
        assert peer.session is not None
        del self._clients[peer.session.token]
        self._replay.turns.look_again()

    # Queries

    async def _answer(self, session: wire.ServerSession, query: wire.Query) -> None:
        try:
            columns, values = await self._called(session, query)
            result = wire.Result(query.number, columns, values, None)
        except Exception as error:
            result = _refusal(query.number, error)
        if (peer := self._peer_of(session)) is None:
            return
        try:
            try:
                peer.connection.answer(result)
            except WireError as error:
                if error.code == "undelivered":
                    raise
                peer.connection.answer(_refusal(query.number, error))
        except WireError as error:
            self._loop.fail(peer, error, monotonic())
        else:
            self._loop.write(peer)

    async def _called(self, session: wire.ServerSession, query: wire.Query) -> tuple[Batch, dict[str, Any]]:
        """Columns and other values of the answer to a query."""
        module_id = query.values.get("module_id")
        if module_id is not None and type(module_id) not in (str, int):
            raise ReplayError(f"module_id is {shown(module_id)}, expected text, a whole number, or none")
        if query.name == "sample":
            columns = arrays_of(await self._sample(session, query.values))
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

    async def _sample(self, session: wire.ServerSession, values: Mapping[str, Any]) -> Batch:
        """A batch, as soon as the rate lets it through; a sampler that is away gets none."""
        replay = self._replay
        count, wait_s = values.get("count"), values.get("wait_s", 0.0)
        if count is not None and not (is_whole(count) and 1 <= count <= replay.capacity):
            raise ReplayError(f"count is {shown(count)}, expected 1 to {replay.capacity}, the host's capacity")
        if type(wait_s) not in (int, float) or not 0 <= wait_s <= _MOST_WAIT_S:
            raise ReplayError(f"wait_s is {shown(wait_s)}, expected seconds, 0 or more")
        with anyio.move_on_after(wait_s):
            await replay.turns.wait_in_loop("sample", lambda: self._is_there(session) and replay.may_sample(count))
        peer = self._peer_of(session)
        if peer is None or peer.lost_at is not None:
            raise ReplayError("the sampler was away")
        try:
            most = peer.connection.peer_max_frame - _REST
            return replay.sample(count, max_bytes=most)
        except ReplayError as error:
            if replay.may_sample(count):
                raise
            names = ", ".join(self._rollouts()) or "none is there"
            raise ReplayError(f"{error}; rollouts that feed this host: {names}") from None

    def _is_there(self, session: wire.ServerSession) -> bool:
        """True unless a sampler is away. Raises ReplayError once it is known no longer."""
        if (peer := self._peer_of(session)) is None:
            raise ReplayError("the sampler is gone")
        return peer.lost_at is None

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
