"""A host's end of the wire, whatever it does for the rollout: it dials a gateway or is dialled, and comes back."""

import contextlib
import logging
import secrets
import select
import socket
import ssl
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from queue import SimpleQueue
from time import monotonic
from typing import Any, Literal, NamedTuple, Protocol, Self

from gymnasium.vector import AutoresetMode, VectorEnv

from rollflow.nodes.backoff import pause_s
from rollflow.nodes.remote.dial import problem_of, reach
from rollflow.nodes.remote.remote_envs import Secret, address_of, close_sockets, listen_on, secret_bytes
from rollflow.nodes.remote.transport import Transport, transport_for
from rollflow.stream.bell import Bell
from rollflow.stream.errors import ColumnError, EnvError, WireError
from rollflow.stream.space_codec import describe_space
from rollflow.stream.wire import (
    NONCE_BYTES,
    SESSION_BYTES,
    VERSION,
    Address,
    Answer,
    Broken,
    Event,
    Failed,
    Goodbye,
    Hello,
    HostConnection,
    HostSession,
    Limits,
    Message,
    Request,
    Reset,
    Step,
    Turn,
    Welcome,
    check_secret,
    parse_address,
)

logger = logging.getLogger(__name__)

_LONGEST_RETRY_S = 5.0
# Codes of errors after which the gateway is dialled again.
_COMES_BACK = ("lost", "silent", "undelivered", "handshake", "busy", "session")


class ServedLane(Protocol):
    """A lane of a host: environments, and whatever is done with them."""

    env: VectorEnv[Any, Any, Any]
    autoreset: AutoresetMode

    def close(self) -> None:
        """Close the environments."""
        ...


class Job(NamedTuple):
    """What a lane is to do: `work` gives the answer, or None where nobody wants it any more."""

    connection: HostConnection
    request: Request
    work: Callable[[], Answer | None]


class Host:
    """What `EnvHost` and `RolloutHost` have in common: connections, and a thread for every lane.

    lanes       what the threads work with
    metadata    what else there is to know, for people

    Leave it by `with`, or `close` it: this ends the threads and closes the environments. Raises EnvError where lanes
    differ.
    """

    role: Literal["env", "rollout"]
    word_s: float | None = None  # seconds between two calls of `_say`; None: it has nothing to say

    def __init__(
        self,
        lanes: Sequence[ServedLane],
        *,
        secret: Secret,
        tls: ssl.SSLContext | None,
        name: str | None,
        limits: Limits | None,
        metadata: dict[str, Any],
    ) -> None:
        self.name = socket.gethostname() if name is None else name
        self._secret, self._tls = secret_bytes(secret), tls
        self._limits = Limits() if limits is None else limits
        self._served = lanes
        self._check_lanes()
        self._metadata = metadata
        self._by_id: dict[int, tuple[Any, SimpleQueue[Job | None]]] = {}
        self._session = _new_session()
        self._transport: Transport | None = None
        self._lock = threading.Lock()  # of the session, its connections, and the transport
        self._bell = Bell()
        self._is_stopped = self._was_welcomed = False  # by the connection that there is, or was last
        self._fatal: Exception | None = None  # after which this session is over
        self._jobs: list[SimpleQueue[Job | None]] = [SimpleQueue() for _ in lanes]
        self._threads = [
            threading.Thread(target=self._work, args=(jobs,), name=f"rollflow lane {place}", daemon=True)
            for place, jobs in enumerate(self._jobs)
        ]
        for thread in self._threads:
            thread.start()

    def connect(self, address: str, *, retry_s: float | None = 60.0) -> str:
        """Dial a gateway and serve it until it says goodbye; the reason that it gives.

        A connection that can't be made, or breaks, is dialled again for up to `retry_s` seconds, None for ever. Raises
        WireError where the gateway refuses, is not to be reached, or does not know the secret.
        """
        target = parse_address(address)
        check_secret(target, self._secret)
        since, failures = monotonic(), 0
        while not self._is_stopped:
            try:
                sock = reach(target, failures)
            except OSError as error:
                problem = problem_of(error)
            else:
                try:
                    return self._serve(sock, target)
                except WireError as error:
                    if error.code not in _COMES_BACK:
                        raise
                    if error.code == "session":
                        self._session = _new_session()
                    problem = str(error)
                if self._was_welcomed:
                    since, failures = monotonic(), 0
                logger.warning("%s", problem)
            if retry_s is not None and monotonic() - since >= retry_s:
                raise WireError(f"gateway {target} not reached for {retry_s:g} s: {problem}", "lost")
            failures += 1
            self._pause(pause_s(failures, _LONGEST_RETRY_S))
        return "stopped"

    @contextmanager
    def listening(self, address: str) -> Iterator[Address]:
        """Listen on an address, which is given with the port that it has; what comes is served by `serve`."""
        target = parse_address(address)
        check_secret(target, self._secret)
        self._listeners = listen_on(target)
        try:
            yield address_of(self._listeners[0])
        finally:
            close_sockets(self._listeners)

    def serve(self) -> None:
        """Inside `listening`: serve gateways that dial, one after the other, until `stop` is called.

        What is wrong with one, such as another secret, is logged.
        """
        poll = select.poll()
        for fd in (*(sock.fileno() for sock in self._listeners), self._bell.fileno()):
            poll.register(fd, select.POLLIN)
        while not self._is_stopped:
            ready = {fd for fd, _ in poll.poll()}
            self._bell.silence()
            for listener in self._listeners:
                if listener.fileno() in ready:
                    self._serve_next(listener)

    def stop(self) -> None:
        """Have `connect` or `serve` say goodbye and return. May be called from any thread."""
        self._is_stopped = True
        self._bell.ring()

    def close(self) -> None:
        """End the threads, once they have done the step that they are at, and close the environments."""
        for jobs in self._jobs:
            jobs.put(None)
        for thread, lane in zip(self._threads, self._served, strict=True):
            thread.join(self._limits.handshake_s)
            if not thread.is_alive():
                lane.close()
        self._bell.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Connections

    def _serve_next(self, listener: socket.socket) -> None:
        try:
            sock, _ = listener.accept()
        except OSError:
            return
        try:
            logger.info("the gateway says goodbye: %s", self._serve(sock, None))
        except WireError as error:
            logger.warning("%s", error)

    def _serve(self, sock: socket.socket, dialled: Address | None) -> str:
        """Serve a gateway, dialled or not, until it says goodbye: its reason. Raises WireError when it breaks."""
        session, self._was_welcomed = self._session, False
        connection = HostConnection(self._hello(), session, secret=self._secret, limits=self._limits, now=monotonic())
        transport = transport_for(sock, connection, self._tls, dialled=dialled)
        with self._lock:
            self._transport = transport
        try:
            return self._converse(connection, transport)
        except BaseException:
            with self._lock:
                connection.goodbye("the host was stopped")
            raise
        finally:
            with self._lock:
                self._transport = None
                transport.write()
                transport.close()

    def _converse(self, connection: HostConnection, transport: Transport) -> str:
        poll = select.poll()
        poll.register(self._bell.fileno(), select.POLLIN)
        while True:
            with self._lock:
                transport.write()
                deadline, waits = connection.next_deadline(), transport.waits_to_write
            poll.register(transport.fileno(), select.POLLIN | (select.POLLOUT if waits else 0))
            if not connection.is_open:  # an answer was more than it takes
                raise connection.error or WireError("gateway: connection lost", "lost")
            left = None if deadline is None else max(0.0, deadline - monotonic())
            if self.word_s is not None:
                left = self.word_s if left is None else min(left, self.word_s)
            ready = {fd for fd, _ in poll.poll(None if left is None else left * 1e3)}
            if self._bell.fileno() in ready:
                self._bell.silence()
            if self._is_stopped:
                with self._lock:
                    connection.goodbye("the host was stopped")
                return "stopped"
            if self._fatal is not None and self._was_welcomed:
                with self._lock:
                    connection.refuse(self.role, f"{type(self._fatal).__name__}: {self._fatal}")
                self._session = _new_session()
                raise self._fatal
            with self._lock:
                now = monotonic()
                events = transport.read(now) if transport.fileno() in ready else []
                events += connection.tick(now)
            for event in events:
                reason = self._handle(connection, event)
                if reason is not None:
                    return reason
            with self._lock:
                self._say(connection)

    def _handle(self, connection: HostConnection, event: Event) -> str | None:
        match event:
            case Welcome():
                self._was_welcomed = True
                granted = zip(event.lanes, self._served, self._jobs, strict=True)
                self._by_id = {grant.lane: (lane, jobs) for grant, lane, jobs in granted}
                self._welcomed(event)
            case Reset() | Step() | Turn():
                lane, jobs = self._by_id[event.lane]
                jobs.put(Job(connection, event, self._work_on(lane, event)))
            case Goodbye():
                self._session = _new_session()  # for another rollout
                self._dismissed()
                return event.reason
            case Broken():
                raise event.error
            case _:
                self._told(event)
        return None

    # What those do otherwise who are made of this

    def _welcomed(self, welcome: Welcome) -> None:
        """A gateway has taken this host in."""

    def _dismissed(self) -> None:
        """The rollout has ended."""

    def _work_on(self, lane: Any, request: Any) -> Callable[[], Answer | None]:
        """What is to be done in the lane's thread."""
        raise NotImplementedError

    def _told(self, news: Message) -> None:
        """The gateway has told something."""

    def _say(self, connection: HostConnection) -> None:
        """Say what nobody has asked for, with the lock held."""

    def _failed(self, request: Any, error: Exception) -> Answer | None:
        """What to answer where a lane's work has raised."""
        return Failed.of(request, error)

    # Inside

    def _hello(self) -> Hello:
        env = self._served[0].env
        return Hello(
            versions=(VERSION, VERSION),
            role=self.role,
            software="rollflow",
            name=self.name,
            nonce=secrets.token_bytes(NONCE_BYTES),
            session=self._session.token,
            max_frame=self._limits.max_frame,
            slots=tuple(lane.env.num_envs for lane in self._served),
            observation_space=describe_space(env.single_observation_space),
            action_space=describe_space(env.single_action_space),
            autoreset=self._served[0].autoreset.name,  # type: ignore[arg-type]
            metadata=self._metadata,
        )

    def _check_lanes(self) -> None:
        first = self._served[0]
        for place, lane in enumerate(self._served):
            for told, mine, other in (
                ("observation space", lane.env.single_observation_space, first.env.single_observation_space),
                ("action space", lane.env.single_action_space, first.env.single_action_space),
                ("autoreset mode", lane.autoreset, first.autoreset),
            ):
                if mine != other:
                    raise EnvError(f"lane {place}: its {told} is {mine}, expected that of lane 0, {other}")

    def _pause(self, seconds: float) -> None:
        poll = select.poll()
        poll.register(self._bell.fileno(), select.POLLIN)
        self._bell.silence()
        if not self._is_stopped:
            poll.poll(seconds * 1e3)

    # Lanes

    def _work(self, jobs: "SimpleQueue[Job | None]") -> None:
        while (job := jobs.get()) is not None:
            answer: Answer | None
            try:
                answer = job.work()
            except BaseException as error:
                logger.warning("lane %d: %r", job.request.lane, error)
                answer = self._failed(job.request, error)  # type: ignore[arg-type]
            if answer is not None:
                with self._lock:
                    self._answer(job.connection, job.request, answer)

    def _answer(self, connection: HostConnection, request: Request, answer: Answer) -> None:
        try:
            connection.answer(request, answer)
        except (WireError, ColumnError) as error:
            if getattr(error, "code", "") != "undelivered":
                with contextlib.suppress(WireError):  # the connection is broken: the answer waits for the next
                    connection.answer(request, Failed.of(request, error))
        if self._transport is not None:
            self._transport.write()
            if self._transport.waits_to_write or not self._transport.connection.is_open:
                self._bell.ring()


def _new_session() -> HostSession:
    return HostSession(secrets.token_bytes(SESSION_BYTES))
