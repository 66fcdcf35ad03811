"""Host of lanes for a rollout elsewhere: it dials a gateway or is dialled, and comes back."""

import contextlib
import logging
import os
import secrets
import socket
import ssl
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from time import monotonic
from typing import Any, Literal

from rollflow.nodes.env.workers.job_thread import JobThread
from rollflow.stream import wire
from rollflow.stream.data.closing import ClosedOnExit, Closing, close_all
from rollflow.stream.data.errors import ColumnError, WireError
from rollflow.stream.net import backoff
from rollflow.stream.net.backoff import WaitReminder
from rollflow.stream.net.dial_wait import DialWait
from rollflow.stream.net.endpoint import Endpoint, Secret, address_of, close_sockets, endpoint_at, listen_on
from rollflow.stream.net.socket_loop import REDIALLED, Peer, SocketLoop, quoted, refusal_level
from rollflow.stream.observe.stacks import answering_dumps
from rollflow.stream.wire.software import hello_of

logger = logging.getLogger(__name__)


_QUIET_S = 0.5  # how long a lane is waited for without a word
_ENDING = {False: "stopped", True: "drained"}  # why it ends, by whether it was told to drain
_MOST_STRANGERS = 64  # connections that have not proved themselves yet

HostPeer = Peer[wire.HostConnection]
# Keyword that a host has not -> its place.
PLACES = {name: f"connect(address, {name}=…), or listening" for name in ("secret", "tls", "limits")}


_NOWHERE = Endpoint(wire.UnixAddress("/"), wire.Limits())


class Host(ClosedOnExit):
    """Connections of a host with gateways, and a thread for every lane; `EnvHost` and `RolloutHost` are made of it.

    lanes       what the threads work with, in the order of the Hello: with `env`, that are to be closed, and
                `describe`, which gives fields of a Hello about them
    metadata    what else there is to know, for people

    Leave it by `with`, or `close` it: this ends the threads and closes the environments.
    """

    role: Literal["env", "agents", "rollout", "agent_rollout"]
    report_s: float | None = None  # seconds after which `_report` is called at the latest; None: it need not be

    def __init__(
        self,
        lanes: Sequence[Any],
        *,
        name: str | None,
        metadata: dict[str, Any],
    ) -> None:
        # Two hosts of one machine are not taken for each other.
        self.name = f"{socket.gethostname()}-{os.getpid()}" if name is None else name
        self._endpoint = _NOWHERE  # of the connections that are served now, or were last
        self._metadata = metadata
        self._loop: SocketLoop[HostPeer] = SocketLoop(self, max_strangers=_MOST_STRANGERS)  # and the welcomed one
        self._lock = self._loop.lock  # of the session as well
        self._wakeup = self._loop.wakeup
        self._welcomed_peer: HostPeer | None = None
        self._is_stopped = self._is_closed = False
        self._serving = threading.RLock()  # held by `connect` and `serve`
        self._fatal: Exception | None = None  # after which this session is over
        self._wait: DialWait | None = None  # for the gateway that is dialled
        self._parting: str | None = None  # the reason of that gateway
        self._lanes = lanes
        self._threads = [JobThread(f"rollflow lane {place}") for place in range(len(lanes))]
        self._begun, self._done = [0] * len(lanes), [0] * len(lanes)  # requests of each lane
        self._place_of: dict[int, int] = {}  # of a lane, by what the gateway calls it
        self._offer_session()
        self._drain: WaitReminder | None = None  # None: nobody has told this host to
        self._is_cut_short = False

    def connect(
        self,
        address: str,
        *,
        secret: Secret = None,
        tls: ssl.SSLContext | None = None,
        limits: wire.Limits | None = None,
        retry_s: float | None = 60.0,
    ) -> str:
        """Dial a gateway and serve it until it says goodbye; the reason that it gives.

            secret     the gateway's; None: it has none
            tls        a client's context
            limits     of frames, times and bytes under way
            retry_s    seconds for which a connection is dialled again that can't be made, or breaks; None: for ever

        Raises WireError if the gateway refuses, is not to be reached, or does not know the secret.
        """
        with self._served(endpoint_at(address, secret, tls, limits)):
            return self._serve_dialled(retry_s)

    @contextmanager
    def listening(
        self,
        address: str,
        *,
        secret: Secret = None,
        tls: ssl.SSLContext | None = None,
        limits: wire.Limits | None = None,
    ) -> Iterator[wire.Address]:
        """Listen on an address, which is given with the port that it has; what comes is served by `serve`.

        secret, limits    as for `connect`
        tls               a server's context
        """
        self._listened = endpoint_at(address, secret, tls, limits, listens=True)
        self._listeners = listen_on(self._listened.address)
        try:
            yield address_of(self._listeners[0])
        finally:
            close_sockets(self._listeners)

    def serve(self) -> None:
        """Inside `listening`: serve gateways that dial, one at a time, until `stop` is called.

        Another one is told that this host is busy. What is wrong with one, such as another secret, is logged.
        """
        with self._served(self._listened):
            self._loop.listen(self._listeners, self._listened.tls)
            while not self._is_over():
                self._turn()

    def stop(self) -> None:
        """Have `connect` or `serve` say goodbye and return. May be called from any thread."""
        self._is_stopped = True
        self._wakeup.ring()

    def drain(self, grace_s: float = 20.0) -> None:
        """Have `connect` or `serve` hand over what the lanes have, within so many seconds, say goodbye, and return.

        A step that has begun is finished, and a fragment ends with it; no other begins. A lost gateway is awaited. May
        be called from any thread and from a signal handler; again, it may only shorten the time.
        """
        self._drain = self._drain or WaitReminder(grace_s)
        self._drain.shorten(grace_s)
        self._wakeup.ring()

    @property
    def is_draining(self) -> bool:
        """True once `drain` was called."""
        return self._drain is not None

    def close(self) -> None:
        """Stop, end the threads, once they have done the step that they are at, and close the environments.

        From any thread: waits until `connect` or `serve` has returned. Again does nothing. Raises what closing the
        environments raises.
        """
        self.stop()
        with self._serving:
            if self._is_closed:
                return
            self._is_closed = True
            self._dismissed()
            try:
                self._close_lanes()
            finally:
                self._loop.close()

    # Connections

    @contextmanager
    def _served(self, endpoint: Endpoint) -> Iterator[None]:
        """Serve gateways in this thread, and hang up in the end."""
        with self._serving, answering_dumps():
            self._endpoint = endpoint
            try:
                yield
            finally:
                self._loop.dial([])
                self._loop.stop_listening()
                for peer in self._loop.peers:
                    self._hang_up(peer)
                self._wait = None
                if self._drain is not None:
                    self._log_drain(f"has drained for {self._drain.waited_s:.1f} s")

    def _serve_dialled(self, retry_s: float | None) -> str:
        """Dial a gateway, again and again, and serve it until it says goodbye: its reason."""
        target = self._endpoint.address
        wait = self._wait = DialWait("gateway", target, retry_s)
        self._parting = None
        self._loop.dial(
            [target],
            self._endpoint.tls,
            longest_pause_s=backoff.times.host_pause_s,
            on_failure=lambda problem: wait.failed(f"gateway {target}: {problem.removeprefix('gateway: ')}"),
        )
        while self._parting is None and not self._is_over():
            self._turn()
            if self._welcomed_peer is None:
                wait.check(self._loop.dialler.problems, gives_up=not self._loop.peers)
        return _ENDING[self.is_draining] if self._parting is None else self._parting

    def _is_over(self) -> bool:
        """True once this host is to say goodbye: it was stopped, or has drained, or has no more time for that."""
        if self._is_stopped or self._drain is None:
            return self._is_stopped
        if not self._is_cut_short:
            self._is_cut_short = True
            self._log_drain(f"drains, for {self._drain.left_s:.1f} s at most")
            self._cut_short()
        elif self._drain.is_long:
            self._log_drain(f"drains, for {self._drain.left_s:.1f} s more")
        return self._drain.is_over or not self._has_more()

    def _log_drain(self, how: str) -> None:
        busy, count = self._busy_lanes(), len(self._lanes)
        rest = f", still at something: {', '.join(map(str, busy))}" if busy else ""
        logger.warning("host %s %s: %d of %d lanes are done%s", self.name, how, count - len(busy), count, rest)

    def _has_more(self) -> bool:
        """True if something that lanes have made, or are making, has not been sent to the rollout."""
        is_served = self._welcomed_peer is not None and self._fatal is None  # else it is not known what has reached it
        return bool(self._place_of) and bool(not is_served or self._busy_lanes() or self._session.owed)

    def _turn(self) -> None:
        """Send what there is to send, wait until there is something to do, and do it."""
        self._loop.send(self._tell)
        next_report = None if self.report_s is None or self._welcomed_peer is None else monotonic() + self.report_s
        drained = None if self._drain is None else monotonic() + self._drain.left
        ready = self._loop.wait_until(next_report, drained, None if self._wait is None else self._wait.due)
        now, welcomed = monotonic(), self._welcomed_peer
        if welcomed is not None:
            if self._fatal is not None:
                self._loop.fail(welcomed, self._fatal, now)
            # The welcomed connection first: where it has ended, another one may be welcomed in its place.
            ready.sort(key=lambda each: each[0] != welcomed.fileno())
        self._loop.serve(ready, now)
        self._loop.tick(now)

    def _tell(self, peer: HostPeer) -> None:
        if peer is self._welcomed_peer:
            self._report(peer.connection)

    def _take_over(self, peer: HostPeer, *, was_known: bool) -> None:
        """Go on with a connection that has been welcomed: if there is an older one, it was the same gateway's."""
        logger.info("%s: the gateway has taken this host in", peer.where)
        if self._wait is not None:
            self._wait.connected()
        elif was_known:
            logger.warning("%s: the gateway is connected again", peer.where)
        older, self._welcomed_peer = self._welcomed_peer, peer
        if older is not None:
            logger.info("%s: the gateway has come back, the connection from %s is closed", peer.where, older.where)
            with self._lock:
                older.connection.ended()  # it is not the place for a goodbye
            self._hang_up(older)
        self._mark_busy()

    def _begin_anew(self) -> None:
        """Have another session, for another rollout; peers in the handshake have been offered the one before."""
        self._offer_session()
        for peer in self._loop.peers:
            if peer is not self._welcomed_peer:
                with self._lock:
                    peer.connection.refuse("session", "the session that was offered is over, expected another try")
                self._hang_up(peer)
        self._dismissed()

    def _hang_up(self, peer: HostPeer) -> None:
        """Be done with a connection; one that is still open is told so."""
        drain = None if peer is not self._welcomed_peer or self._has_more() else self._drain
        with self._lock:
            peer.connection.goodbye(f"the host was {_ENDING[drain is not None]}", drained=drain is not None)
            self._loop.drop(peer, None if drain is None else lambda: monotonic() + drain.left_s)
            if peer is self._welcomed_peer:
                self._welcomed_peer = None
                self._mark_busy()

    def _mark_busy(self) -> None:
        """Have the other connections know whether one is welcomed."""
        with self._lock:
            for peer in self._loop.peers:
                peer.connection.is_busy = self._welcomed_peer is not None and peer is not self._welcomed_peer

    # What the loop asks for

    def connection(self, now: float) -> wire.HostConnection:
        """This end of a connection with a gateway, which is told hello."""
        _, limits, secret, _ = self._endpoint
        connection = wire.HostConnection(self._hello(), self._session, secret=secret, limits=limits, now=monotonic())
        connection.is_busy = self._welcomed_peer is not None
        return connection

    def handle(self, peer: HostPeer, event: wire.Message, now: float) -> None:
        """Take a message of a gateway."""
        match event:
            case wire.Welcome():
                self._take_over(peer, was_known=event.resumed)
                self._place_of = {grant.lane: place for place, grant in enumerate(event.lanes)}
                self._welcomed(event)
            case wire.Reset() | wire.Step() | wire.Turn():
                if self._drain is None:  # else nothing more is begun
                    self._begin(peer.connection, event)
            case wire.Goodbye():
                if peer is self._welcomed_peer:
                    self._begin_anew()
                self._parting = event.reason
                if self._wait is None:
                    logger.info("%s: the gateway says goodbye: %s", peer.where, quoted(event.reason))
                else:
                    self._loop.dial([])  # it is not lost
                self._hang_up(peer)
            case _:
                self._take_news(event)

    def fail(self, peer: HostPeer, error: Exception, now: float) -> None:
        """Log how a connection has ended, or raise the error if the gateway is dialled."""
        if error is self._fatal:
            with self._lock:
                peer.connection.refuse(self.role, f"{type(error).__name__}: {error}")
            self._begin_anew()
        if not isinstance(error, WireError) and error is not self._fatal:
            raise error
        if peer.dialled is None:
            logger.log(refusal_level(peer.connection), "%s: %s: %s", peer.where, type(error).__name__, quoted(error))
        elif isinstance(error, WireError) and error.code in REDIALLED:
            if error.code == "session":
                self._offer_session()
            peer.dialled.problem = str(error)
        else:
            raise error
        self._hang_up(peer)

    # For subclasses

    def _welcomed(self, welcome: wire.Welcome) -> None:
        """Begin for a gateway that has taken this host in."""

    def _dismissed(self) -> None:
        """End, in the middle of what lanes are at, for a rollout that has said goodbye or failed, or at the close."""

    def _cut_short(self) -> None:
        """Have lanes come to an end with what they are at, as this host drains."""

    def _work_on(self, lane: Any, request: Any) -> Callable[[], wire.Answer | None]:
        """Work for the lane's thread; if it gives None, nobody wants the answer any more."""
        raise NotImplementedError

    def _take_news(self, news: wire.Message) -> None:
        """Take a message that is no request."""

    def _report(self, connection: wire.HostConnection) -> None:
        """Tell the gateway what it has not asked for, with the lock held."""

    def _failed(self, request: Any, error: Exception) -> wire.Answer | None:
        """Answer if a lane's work has raised."""
        return wire.Failed.of(request, error)

    # Inside

    def _hello(self) -> wire.Hello:
        return hello_of(
            self.role,
            self.name,
            self._session.token,
            self._endpoint.limits,
            slots=tuple(lane.env.num_envs for lane in self._lanes),
            metadata=self._metadata,
            busy=self._welcomed_peer is not None,
            **self._lanes[0].describe(),
        )

    def _offer_session(self) -> None:
        """Have another session: there is no rollout."""
        self._session = wire.HostSession(secrets.token_bytes(wire.SESSION_BYTES))
        self._place_of = {}

    def _busy_lanes(self) -> list[int]:
        """Places of the lanes that are at something."""
        return [place for place, begun in enumerate(self._begun) if begun != self._done[place]]

    def _close_lanes(self) -> None:
        """End the threads and close the environments, but for those of a lane that is at something for too long.

        Raises what closing raises, once all are closed.
        """
        busy, patience_s = self._busy_lanes(), self._endpoint.limits.handshake_s
        left_s = patience_s if self._drain is None else min(patience_s, self._drain.left_s)
        for thread in self._threads:
            thread.end()
        closings: list[Closing] = []
        for place, lane in enumerate(self._lanes):
            limit_s = left_s if place in busy else patience_s
            if not self._threads[place].has_ended(min(_QUIET_S, limit_s)):
                logger.warning("lane %d is still at something: it is waited for, %.3g s at most", place, limit_s)
            if self._threads[place].has_ended(limit_s):
                closings.append((f"the environments of lane {place}", lane.env.close))
        close_all(closings)

    def _begin(self, connection: wire.HostConnection, request: wire.Request) -> None:
        """Have a lane's thread do a request. From the thread that has the sockets."""
        place = self._place_of[request.lane]
        self._begun[place] += 1
        work = self._work_on(self._lanes[place], request)
        self._threads[place].put(partial(self._do, place, connection, request, work))

    def _do(
        self, place: int, connection: wire.HostConnection, request: wire.Request, work: Callable[[], wire.Answer | None]
    ) -> None:
        answer: wire.Answer | None
        try:
            answer = work()
        except BaseException as error:
            logger.warning("lane %d: %r", request.lane, error, exc_info=error)
            answer = self._failed(request, error)  # type: ignore[arg-type]
        with self._lock:
            if answer is not None:
                self._give(connection, request, answer)
            self._done[place] += 1
            self._send_answer()

    def _give(self, connection: wire.HostConnection, request: wire.Request, answer: wire.Answer) -> None:
        try:
            connection.answer(request, answer)
        except (WireError, ColumnError) as error:
            if getattr(error, "code", "") != "undelivered":
                failed = self._failed(request, error)
                with contextlib.suppress(WireError):  # the connection is broken: the answer waits for the next
                    if failed is not None:
                        connection.answer(request, failed)

    def _send_answer(self) -> None:
        """Send what a lane has answered; with the lock, in the lane's thread."""
        peer = self._welcomed_peer
        if peer is not None:
            self._loop.write(peer)
            if peer.transport.waits_to_write or not peer.connection.is_open:
                self._wakeup.ring()
        if self._drain is not None:
            self._wakeup.ring()  # this may have been the last
