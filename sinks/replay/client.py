"""Replay client: samples from a replay host in another process or on another host."""

import logging
import secrets
import socket
import ssl
import threading
from collections.abc import Callable, Mapping
from dataclasses import fields
from math import inf
from time import monotonic
from typing import Any

import numpy as np

from rollflow.nodes.argument_checks import checked_count, checked_number
from rollflow.nodes.connectors.common.batches import as_array
from rollflow.sinks.replay.replay import Batch, ReplayReport
from rollflow.sinks.trainer.messages import is_by_module, joined_weights, tensors_of
from rollflow.sinks.trainer.newest_weights import copied_weights, frame_size
from rollflow.stream import wire
from rollflow.stream.data.closing import ClosedOnExit
from rollflow.stream.data.errors import ReplayError, WireError
from rollflow.stream.net.backoff import WaitReminder
from rollflow.stream.net.endpoint import Endpoint, Secret, endpoint_at
from rollflow.stream.net.socket_loop import REDIALLED, Peer, SocketLoop, quoted
from rollflow.stream.wire.software import hello_of

logger = logging.getLogger(__name__)

_HOSTS_SHARE = 0.9  # of the time that an answer is waited for, so that a reason not to sample comes in time


class ReplayClient(ClosedOnExit):
    """Samples from a `ReplayHost`, or `rollflow replay-host`, elsewhere.

        address    where the host listens for trainers: 'tcp://host:port' or 'unix:/path'
        secret     the host's; None: it has none
        tls        a client's context; None: nothing is encrypted
        timeout    seconds that an answer is waited for, over as many connections as it takes
        name       what the host calls this client; None: the machine's name
        limits     of frames, times and bytes under way

    Any number of threads may call it. A connection that breaks is dialled again. The host does each call once; one
    that has been started anew meanwhile does what was not answered.

    Raises WireError for an address that is none, and if the host refuses this client or has another secret;
    ReplayError for what the host says of a call, and if no answer comes in time.
    """

    def __init__(
        self,
        address: str,
        *,
        secret: Secret = None,
        tls: ssl.SSLContext | None = None,
        timeout: float = 60.0,
        name: str | None = None,
        limits: wire.Limits | None = None,
    ) -> None:
        checked_number("timeout", timeout, above=0, most=inf, noun="seconds")
        endpoint = endpoint_at(address, secret, tls, limits)
        self.address, self.timeout = str(endpoint.address), timeout
        self._link = _Link(endpoint, socket.gethostname() if name is None else name)

    def sample(self, count: int | None = None, *, wait_s: float | None = None) -> Batch:
        """A batch of `count` rows, as `Replay.sample` gives it; None: as many as the host's `batch_size`.

        wait_s    seconds that the host may wait for inserts, if the rate holds the sample back; None: nearly
                  `timeout`

        Raises ReplayError if nothing can be sampled in time; the text says what is waited for.
        """
        count = None if count is None else checked_count("count", count, 1)
        wait_s = _HOSTS_SHARE * self.timeout if wait_s is None else float(wait_s)
        columns = self._link.ask(self.timeout, "sample", {"count": count, "wait_s": wait_s}).columns
        return tensors_of(columns)

    def update_priorities(self, ids: Any, values: Any, module_id: str | None = None) -> None:
        """Set the priorities of steps, as `Replay.update_priorities` does.

        ids          i64[B]  of batches of the host as it runs now: those from before a restart are passed over
        values       f[B]    such as TD errors
        module_id    of several agents: the module whose batch it was
        """
        arrays = {"ids": as_array(ids).astype(np.int64), "values": as_array(values)}
        self._link.ask(self.timeout, "update_priorities", {"module_id": module_id}, arrays)

    def publish(self, weights: Mapping[str, Any]) -> int:
        """Have all rollouts act with a module's `state_dict()`; returns its policy version.

        weights    if rollouts have several modules: module id -> `state_dict()` of all that are trained

        Raises ModuleError for weights that can't be sent.
        """
        weights = joined_weights(weights) if is_by_module(weights) else weights
        sent = copied_weights(weights)
        frame_size(sent)  # which raises for what can't be sent
        values = {"dtypes": sent.dtypes, "others": sent.others}
        version: int = self._link.ask(self.timeout, "publish", values, sent.tensors).rest["values"]["version"]
        return version

    def report(self, module_id: str | None = None) -> ReplayReport:
        """The host's counts, the ratio reached, and which side waits.

        module_id    of several agents: the module; None: all together
        """
        report = self._link.ask(self.timeout, "report", {"module_id": module_id}).rest["values"]
        return ReplayReport(**{each.name: report[each.name] for each in fields(ReplayReport)})

    def close(self) -> None:
        """Say goodbye; calls under way raise ReplayError."""
        self._link.close()


class _Link:
    """Asks a host, from any number of threads, until it is closed. A connection that breaks is dialled again."""

    def __init__(self, endpoint: Endpoint, name: str) -> None:
        self._endpoint, self._name = endpoint, name[:256]
        self._session = wire.SenderSession(secrets.token_bytes(wire.SESSION_BYTES))
        self._results: dict[int, wire.Fragment | None] = {}  # by the number of the request; None: it has not come
        self._ending: Exception | None = None  # once there is no more to be asked
        self._loop: SocketLoop[Peer[wire.SenderConnection]] = SocketLoop(self)
        self._loop.dial([endpoint.address], endpoint.tls)
        self._changed = threading.Condition(self._loop.lock)  # of all of the above
        self._thread = threading.Thread(target=self._run, name=f"rollflow sampler of {endpoint.address}", daemon=True)
        self._thread.start()

    def ask(
        self, timeout: float, name: str, values: Mapping[str, Any], arrays: Mapping[str, Any] | None = None
    ) -> wire.Fragment:
        """The answer to a query. Raises ReplayError if none comes in time, and if the host has refused it."""
        patience = WaitReminder(timeout)
        with self._changed:
            self._wait(patience, lambda: self._session.may_ask)
            query = self._session.query(arrays or {}, {"name": name, **values})
            number = query.number
            self._send(query)
            results = self._results
            results[number] = None
            try:
                self._wait(patience, lambda: results[number] is not None)
            except BaseException:
                self._session.drop(number)
                raise
            finally:
                result = results.pop(number)
        assert result is not None
        if (problem := result.rest["problem"]) is not None:
            raise ReplayError(problem)
        return result

    def _wait(self, patience: WaitReminder, is_there: Callable[[], bool]) -> None:
        """Wait, with the lock held, until something is there. Raises what has ended the link, or ReplayError."""
        while not is_there():
            if self._ending is not None:
                raise self._ending.with_traceback(None)  # of an earlier call
            if patience.is_over:
                raise ReplayError(self._host(f"has not answered within {patience.limit:g} s"))
            self._changed.wait(patience.left)
            if not is_there() and patience.is_long:
                is_connected = any(each.connection.phase is wire.ConnectionPhase.RUNNING for each in self._loop.peers)
                state = "has not answered yet" if is_connected else "is away"
                logger.warning("waiting for %.0f s: %s", patience.waited_s, self._host(state))

    def close(self) -> None:
        """Say goodbye; requests under way raise ReplayError."""
        with self._changed:
            self._ending = self._ending or ReplayError("this client is closed")
            self._changed.notify_all()
        self._loop.wakeup.ring()
        self._thread.join()

    def _send(self, request: wire.Fragment) -> None:
        """Send a request by the connection that there is, or have the next one send it."""
        peer = next((each for each in self._loop.peers if each.connection.is_open), None)
        if peer is None or peer.connection.phase is not wire.ConnectionPhase.RUNNING:
            self._session.ask(request)
            return
        try:
            peer.connection.ask(request)
        except WireError as error:
            if error.code != "undelivered":
                raise
            self._loop.fail(peer, error, monotonic())
        self._loop.write(peer)
        if peer.transport.waits_to_write or not peer.connection.is_open:
            self._loop.wakeup.ring()

    def _host(self, text: str) -> str:
        """What is said of the host, with the problems of its connections."""
        problems = "; ".join(self._loop.dialler.problems)
        return f"the replay host at {self._endpoint.address} {text}{problems and ': '}{problems}"

    # In the thread

    def _run(self) -> None:
        try:
            self._loop.tick(monotonic())
            while self._ending is None:
                self._loop.turn()
        except Exception as error:
            self._ending = self._ending or error
        with self._changed:
            for peer in self._loop.peers:
                peer.connection.goodbye("the client is closed")
                self._loop.drop(peer)
            self._changed.notify_all()
        self._loop.close()

    # What the loop asks for

    def connection(self, now: float) -> wire.SenderConnection:
        """This end of a connection with a host, which is told hello."""
        _, limits, secret, _ = self._endpoint
        hello = hello_of("sampler", self._name, self._session.token, limits, slots=(1,))
        return wire.SenderConnection(hello, self._session, secret=secret, limits=limits, now=now)

    def handle(self, peer: Peer[wire.SenderConnection], event: wire.Message, now: float) -> None:
        """Take a message of the host."""
        with self._changed:
            match event:
                case wire.Fragment():
                    if event.number in self._results:  # else whoever asked waits no more
                        self._results[event.number] = event
                case wire.Goodbye():
                    logger.info("%s says goodbye: %s", peer.where, event.reason)
                    if peer.dialled is not None:
                        peer.dialled.problem = f"it has said goodbye: {quoted(event.reason)}"
                    self._loop.drop(peer)
            self._changed.notify_all()

    def fail(self, peer: Peer[wire.SenderConnection], error: Exception, now: float) -> None:
        """Have the host dialled again, or end where that is of no use."""
        if isinstance(error, WireError) and error.code in REDIALLED:
            if peer.dialled is not None:
                peer.dialled.problem = str(error)
            peer.connection.refuse(error.code, str(error))
            logger.info("%s: %s; it is dialled again", peer.where, error)
        else:
            peer.connection.refuse(getattr(error, "code", "message"), str(error))
            self._ending = self._ending or error
