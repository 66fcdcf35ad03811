"""Uplink of a rollout: its connection to a trainer, in a thread of its own; it dials again whenever that is lost.

A follower is one that sends nothing, and takes the trainer's weights.
"""

import logging
import socket
import ssl
import threading
from collections import deque
from collections.abc import Callable, Mapping
from time import monotonic
from typing import Any

from rollflow.nodes.modules.policy_weights import from_arrays
from rollflow.nodes.offloaded.fragment_message import refusing
from rollflow.sinks.trainer.lending import FragmentLender
from rollflow.sinks.trainer.pace_gate import ResendBuffer
from rollflow.stream import wire
from rollflow.stream.data.closing import ClosedOnExit
from rollflow.stream.data.errors import WireError
from rollflow.stream.graph.wakeup import Wakeup
from rollflow.stream.net.descriptor_transport import DescriptorTransport
from rollflow.stream.net.dial_wait import DialWait
from rollflow.stream.net.endpoint import Endpoint, Secret, endpoint_at
from rollflow.stream.net.socket_loop import COMES_BACK, Peer, SocketLoop, quoted
from rollflow.stream.wire.software import hello_of

logger = logging.getLogger(__name__)

NOTHING = "nothing"  # what a follower sends
_LONGEST_RETRY_S = 2.0
_GOODBYE_S = 2.0  # that the trainer has for its own goodbye
_MUCH = 1 << 16  # bytes that wait for the trainer
_AT_A_TIME = 4  # fragments that are made ready before they are sent
_NO_TRAINER = ("frame", "message", "order")  # before it was welcomed: somebody else is at the address


class TrainerUplink:
    """Connection of a rollout with a trainer, made again and again: it sends items and takes weights.

    endpoint   where the trainer listens
    name       of this end there; None: the name of this computer
    described  gives slots, spaces and metadata for the first message of each connection
    session    memory that outlives connections, with the items to send
    publish    called with a version and weights that came; False: they are not newer than the rollout's
    lender     lends items in shared memory; None: they go through the socket
    retry_s    seconds without a trainer, unless one said goodbye, after which it is given up; None: it never is
    go_on      called with the state that a trainer gives a rollout to go on from, before it is dialled anew

    newest      version and id of the newest weights that came from here and were taken
    goodbye     the reason that the trainer gave when it left; None: it has not, or there is another one
    problem     why there is no trainer; "": there is one
    error       error that has ended this; None: there is none
    bell        rings when any of these has changed
    """

    def __init__(
        self,
        endpoint: Endpoint,
        name: str | None,
        described: Callable[[], Mapping[str, Any]],
        session: ResendBuffer,
        publish: Callable[[int, Mapping[str, Any]], bool],
        lender: FragmentLender | None = None,
        retry_s: float | None = None,
        go_on: Callable[[Mapping[str, Any]], None] | None = None,
    ) -> None:
        self.newest: tuple[int, bytes] | None = None
        self.goodbye: str | None = None
        self.name = socket.gethostname() if name is None else name
        self._endpoint, self.address, self._lender = endpoint, endpoint.address, lender
        self.problem = f"{self.address} has not been reached"
        self.error: Exception | None = None
        self.bell = Wakeup()
        self._described, self.session, self._publish, self._go_on = described, session, publish, go_on
        self._news: deque[Mapping[str, Any]] = deque()
        self._answer: Mapping[str, Any] | None = None  # to a trainer that asks for the rollout's state
        self._loop: SocketLoop[Peer[wire.SenderConnection]] = SocketLoop(self)
        self._wait = DialWait("trainer", self.address, retry_s)
        self._is_closing = self._is_welcomed = False
        self._ending: str | None = None  # how the last trainer went that had taken this rollout in
        self._parting: str | None = None  # reason of this end's goodbye; None: it says none
        self._failure: str | None = None  # error that this end leaves for
        self._leave_by: float | None = None
        self._is_finished = False
        # The connections that were told so, and that the answer was sent through.
        self._finished_through: wire.SenderConnection | None = None
        self._answered_through: wire.SenderConnection | None = None
        self._thread = threading.Thread(target=self._run, name=f"rollflow to trainer {self.address}", daemon=True)

    def start(self) -> None:
        """Begin to dial."""
        self._wait.begin()
        self._thread.start()

    def wake(self) -> None:
        """Send items that are new. From any thread."""
        self._loop.wakeup.ring()

    def tell(self, news: Mapping[str, Any]) -> None:
        """Send news beside the items. From any thread."""
        self._news.append(news)
        self._loop.wakeup.ring()

    def answer(self, answer: Mapping[str, Any] | None) -> None:
        """Send the answer to a trainer that has asked for the rollout's state, through other connections as well.

        None: it has come
        """
        self._answer, self._answered_through = answer, None
        self._loop.wakeup.ring()

    def finish(self) -> None:
        """Tell the trainer that no more items come, once all have been sent."""
        self._is_finished = True
        self._loop.wakeup.ring()

    def close(self, reason: str | None, failure: str | None = None) -> None:
        """Say goodbye for a reason, or tell a failure, or neither; end the thread."""
        has_word = reason is not None or failure is not None
        self._leave_by, self._parting = monotonic() + (_GOODBYE_S if has_word else 0.0), reason
        self._failure = failure
        self._is_closing = True
        self._loop.wakeup.ring()
        if self._thread.is_alive():
            self._thread.join()

    def release(self) -> None:
        """Give the descriptors back."""
        self.bell.close()
        self._loop.close()

    # In the thread

    def _run(self) -> None:
        self._loop.dial(
            [self.address],
            self._endpoint.tls,
            shares=self._lender is not None,
            longest_pause_s=_LONGEST_RETRY_S,
            on_failure=self._failed,
        )
        try:
            while self._loop.peers or not self._is_closing:
                self._loop.send(self._send)
                now = self._loop.turn(self._leave_by, self._wait.due)
                if self._leave_by is not None and now >= self._leave_by:
                    break
                if not self._is_welcomed:
                    gives_up = self.goodbye is None and not self._loop.peers
                    self._wait.check(self._loop.dialler.problems, gives_up=gives_up)
        except Exception as error:
            self.error = error
        self._loop.dial([])
        leave_by = self._leave_by
        for peer in self._loop.peers:
            self._loop.drop(peer, None if leave_by is None else lambda: leave_by)
        if self._lender is not None:
            self._lender.end()
        self.bell.ring()

    def _failed(self, problem: str) -> None:
        """Note that the trainer could not be reached, or that its connection has ended."""
        if self._lender is not None:
            self._lender.end()
        if self._is_closing:  # nobody waits for the trainer any more
            if problem and self.goodbye is None:
                self.problem = f"trainer {self.address}: {problem}"
            return
        if not self._is_welcomed or self.goodbye is None:
            problem = f"trainer {self.address}: {problem}"
        if self._is_welcomed:
            self._ending = problem
        elif self._ending is not None:
            problem = f"{self._ending}; now: {problem}"
        self._is_welcomed = False
        if problem != self.problem or self.goodbye is None:
            self._wait.failed(problem)
        if problem != self.problem:
            self.problem = problem
            self.bell.ring()

    def _send(self, peer: Peer[wire.SenderConnection]) -> None:
        """Send what there is to send, as much as is wanted."""
        connection = peer.connection
        if self._parting is not None:
            connection.goodbye(self._parting)
        if connection.phase is not wire.ConnectionPhase.RUNNING:
            return
        if self._failure is not None and self._parting is None:
            if connection.undelivered:
                return  # it would be cut off with what waits before it
            raise WireError(f"the rollout has failed: {self._failure}", wire.FAILED)
        while self._news:
            connection.tell(wire.Metrics(self._news.popleft()))
        if self._answer is not None and self._answered_through is not connection:
            self._answered_through = connection
            connection.tell(wire.Metrics(self._answer))
        session, begun = self.session, connection.next
        while connection.undelivered < _MUCH and connection.next <= min(session.given, session.done + session.window):
            if connection.next - begun >= _AT_A_TIME:
                self._loop.wakeup.ring()  # the trainer can begin with these meanwhile
                break
            message = session.get(connection.next)
            if self._lender is not None:
                self._lender.send(message)
            else:
                connection.send(message)
        if self._is_finished and connection.next > session.given and self._finished_through is not connection:
            connection.tell(wire.Metrics({"last": session.given}))
            self._finished_through = connection

    def hello(self) -> wire.Hello:
        """The first message of a connection that is made now."""
        told = self._described()
        return hello_of("source", self.name, self.session.token, self._endpoint.limits, **told)

    # What the loop asks for

    def connection(self, now: float) -> wire.SenderConnection:
        """This end of a connection with a trainer, which is told hello."""
        _, limits, secret, _ = self._endpoint
        return wire.SenderConnection(self.hello(), self.session, secret=secret, limits=limits, now=now)

    def handle(self, peer: Peer[wire.SenderConnection], event: wire.Message, now: float) -> None:
        """Take a message of the trainer."""
        match event:
            case wire.Welcome():
                logger.info("trainer %s has taken this rollout in", self.address)
                self._wait.connected()
                if self._lender is not None:
                    assert isinstance(peer.transport, DescriptorTransport)
                    self._lender.begin(peer.connection, peer.transport)
                self.problem, self.goodbye, self._is_welcomed = "", None, True
            case wire.Settings() if "state" in event.settings and self._go_on is not None:
                self._go_on(event.settings)
                assert peer.dialled is not None
                peer.dialled.problem = "it has given the state to go on from"
                peer.connection.goodbye(peer.dialled.problem)
            case wire.Settings():
                self.session.take_order(event.settings)
            case wire.Weights():
                with refusing("they are no weights", "weights"):
                    weights = from_arrays(event)
                self._take_weights(event, weights)
            case wire.Done():
                self.session.take(event)
                if self._lender is not None:
                    with refusing("it is lent no such block", "memory"):
                        self._lender.take_back(event.freed)
            case wire.Goodbye() if not self._is_welcomed:
                raise WireError(f"goodbye in the handshake: {quoted(event.reason)}", "lost")
            case wire.Goodbye():
                self.goodbye = event.reason
                self.problem = f"trainer {self.address} said goodbye: {quoted(event.reason)}"
                assert peer.dialled is not None
                peer.dialled.problem = self.problem
                logger.info("%s", self.problem)
        self.bell.ring()

    def fail(self, peer: Peer[wire.SenderConnection], error: Exception, now: float) -> None:
        """Refuse the trainer; have another try, or raise the error if that is of no use."""
        code = error.code if isinstance(error, WireError) else "weights"
        if code == wire.FAILED and error is peer.connection.error:  # the trainer has: another one may come in its place
            code = "lost"
        else:
            peer.connection.refuse(code, str(error))
        if not isinstance(error, WireError):
            raise error
        problem = str(error).removeprefix("trainer: ")
        if code not in (*COMES_BACK, "handshake", *(() if self._is_welcomed else _NO_TRAINER)):
            raise WireError(f"trainer {self.address}: {problem}", code) from None
        assert peer.dialled is not None
        peer.dialled.problem = problem

    def _take_weights(self, message: wire.Weights, weights: Mapping[str, Any]) -> None:
        if self._publish(message.version, weights):
            self.newest = message.version, message.id
        elif self.newest != (message.version, message.id):  # else they have come before
            logger.warning(
                "trainer %s: weights of version %d are not taken, expected a newer version: the rollout has some of "
                "another trainer",
                self.address,
                message.version,
            )


class WeightsFollower(ClosedOnExit):
    """Takes the newest weights of a `TrainerStream`, for whoever acts elsewhere, such as a server of policies.

        address        where the trainer listens: 'tcp://host:port', 'unix:/path' or 'shm:/path'
        take           called with a policy version and weights, a `state_dict()` or, of several modules, one with names
                       `module id/name`, from a thread of its own. What it raises ends the following
        secret, tls    as for `TrainerSink`
        name           name of this end at the trainer; None: the name of this computer
        limits         of frames, times and bytes under way

    A trainer waits for no follower, and counts none among its rollouts. One that is lost is dialled again, for ever. A
    trainer that was started anew counts its versions anew, too, and is followed all the same.

    Raises WireError for an invalid address, or one that needs a secret.
    """

    def __init__(
        self,
        address: str | wire.Address,
        take: Callable[[int, Mapping[str, Any]], object],
        *,
        secret: Secret = None,
        tls: ssl.SSLContext | None = None,
        name: str | None = None,
        limits: wire.Limits | None = None,
    ) -> None:
        endpoint = endpoint_at(address, secret, tls, limits, may_share=True)
        self._take = take
        self._uplink = TrainerUplink(endpoint, name, _described, ResendBuffer(1), self._taken)
        self._uplink.start()

    @property
    def problem(self) -> str:
        """Why there is no trainer; "" while there is one."""
        return str(self._uplink.error or self._uplink.problem)

    @property
    def error(self) -> Exception | None:
        """The error that has ended the following, such as another secret; None: there is none."""
        return self._uplink.error

    def close(self) -> None:
        """Say goodbye, and end the thread."""
        self._uplink.close("it follows no more")
        self._uplink.release()

    # In the thread

    def _taken(self, version: int, weights: Mapping[str, Any]) -> bool:
        self._take(version, weights)
        return True


def _described() -> dict[str, Any]:
    return {"slots": (1,), "metadata": {"sends": NOTHING}}
