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
from time import monotonic
from typing import Any, Literal, Self

from rollflow.nodes.backoff import pause_s
from rollflow.nodes.closing import close_all, closing_on_error
from rollflow.nodes.remote.dial import problem_of, reach
from rollflow.nodes.remote.lane_threads import Job, LaneThreads, ServedLane, check_alike
from rollflow.nodes.remote.lines import Entrance, Line, Lines, quoted
from rollflow.nodes.remote.remote_envs import Secret, address_of, check_tls, close_sockets, listen_on, secret_bytes
from rollflow.nodes.remote.software import software
from rollflow.nodes.remote.transport import transport_for
from rollflow.stream.bell import Bell
from rollflow.stream.errors import ColumnError, WireError
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
    Reset,
    Step,
    Turn,
    Welcome,
    check_secret,
    parse_address,
)

logger = logging.getLogger(__name__)

_LONGEST_RETRY_S = 5.0
_MOST_STRANGERS = 64  # connections that have not proved themselves yet
# Codes of errors after which the gateway is dialled again.
_COMES_BACK = ("lost", "silent", "undelivered", "handshake", "busy", "session")


class Host:
    """What `EnvHost` and `RolloutHost` have in common: connections, and a thread for every lane.

    lanes       what the threads work with
    metadata    what else there is to know, for people

    Leave it by `with`, or `close` it: this ends the threads and closes the environments. Raises EnvError where lanes
    differ.
    """

    role: Literal["env", "agents", "rollout"]
    word_s: float | None = None  # seconds after which `_say` is called at the latest; None: it need not be

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
        self._tls = tls
        self._limits = Limits() if limits is None else limits
        self._served = lanes
        with closing_on_error(lambda: close_all(("a lane", lane.env.close) for lane in lanes)):
            self._secret = secret_bytes(secret)
            check_alike(lanes)
        self._metadata = metadata
        self._place_of: dict[int, int] = {}  # of a lane, by what the gateway calls it
        self._session = _new_session()
        self._lock = threading.RLock()  # of the session, its connections, and their sockets
        self._bell = Bell()
        self._poll = select.poll()
        self._poll.register(self._bell.fileno(), select.POLLIN)
        self._lines: Lines[Line[HostConnection]] = Lines(self._poll)  # strangers', and the one that was welcomed
        self._welcomed_line: Line[HostConnection] | None = None
        self._is_stopped = self._was_welcomed = False  # by the newest gateway
        self._fatal: Exception | None = None  # after which this session is over
        self._threads = LaneThreads(lanes, self._answer, lambda request, error: self._failed(request, error))

    def connect(self, address: str, *, retry_s: float | None = 60.0) -> str:
        """Dial a gateway and serve it until it says goodbye; the reason that it gives.

        A connection that can't be made, or breaks, is dialled again for up to `retry_s` seconds, None for ever. Raises
        WireError where the gateway refuses, is not to be reached, or does not know the secret.
        """
        target = parse_address(address)
        check_secret(target, self._secret)
        check_tls(target, self._tls)
        since, failures = monotonic(), 0
        while not self._is_stopped:
            try:
                sock = reach(target, failures, self._bell, lambda: self._is_stopped)
            except InterruptedError:
                continue  # it has been stopped meanwhile
            except OSError as error:
                problem = problem_of(error)
            else:
                try:
                    return self._serve_alone(self._greet(sock, str(target), target))
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
        """Inside `listening`: serve gateways that dial, one at a time, until `stop` is called.

        Another one is told that this host is busy. What is wrong with one, such as another secret, is logged.
        """
        entrance = Entrance(self._listeners, self._poll)
        try:
            while not self._is_stopped:
                ready = self._wait(entrance.due)
                for line in self._in_order():
                    self._serve_among_others(line, ready)
                now = monotonic()
                for fd in ready:
                    if fd in entrance:
                        self._let_in(entrance.accept(fd, now))
                entrance.listen_again(now)
        finally:
            for line in self._lines:
                self._hang_up(line)
            entrance.close()

    def stop(self) -> None:
        """Have `connect` or `serve` say goodbye and return. May be called from any thread."""
        self._is_stopped = True
        self._bell.ring()

    def close(self) -> None:
        """End the threads, once they have done the step that they are at, and close the environments."""
        self._threads.close(self._limits.handshake_s)
        self._bell.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Connections

    def _greet(self, sock: socket.socket, where: str, dialled: Address | None) -> Line[HostConnection]:
        """Say hello to whoever is at the other end."""
        connection = HostConnection(
            self._hello(), self._session, secret=self._secret, limits=self._limits, now=monotonic()
        )
        self._was_welcomed = False
        line = Line(transport_for(sock, connection, self._tls, dialled=dialled), connection, where)
        with self._lock:
            self._lines.add(line)
        return line

    def _let_in(self, arrived: tuple[socket.socket, str] | None) -> None:
        if arrived is None:
            return
        with self._lock:
            crowded_out = self._lines.crowd_out(_MOST_STRANGERS)
        if crowded_out is not None:
            logger.warning("%s: %s", crowded_out.where, crowded_out.connection.error)
            self._hang_up(crowded_out)
        self._greet(*arrived, None)

    def _serve_alone(self, line: Line[HostConnection]) -> str:
        """Serve a gateway until it says goodbye: its reason. Raises WireError when it breaks."""
        try:
            while not self._is_stopped:
                reason = self._look_after(line, self._wait())
                if reason is not None:
                    return reason
            return "stopped"
        finally:
            self._hang_up(line)

    def _serve_among_others(self, line: Line[HostConnection], ready: set[int]) -> None:
        """Do what there is to do for a gateway; how it ends is logged."""
        if line.fileno() < 0:  # it has given way to another one
            return
        try:
            reason = self._look_after(line, ready)
        except Exception as error:
            if not isinstance(error, WireError) and error is not self._fatal:
                raise
            logger.warning("%s: %s: %s", line.where, type(error).__name__, quoted(error))
        else:
            if reason is None:
                return
            logger.info("%s: the gateway says goodbye: %s", line.where, quoted(reason))
        self._hang_up(line)

    def _wait(self, *others_due: float | None) -> set[int]:
        """Send what there is to send, and wait until there is something to do: the descriptors that can be used."""
        with self._lock:
            for line in self._lines:
                self._lines.write(line)
            dues = [line.connection.next_deadline() for line in self._lines]
        now = monotonic()
        if self.word_s is not None and self._welcomed_line is not None:
            dues.append(now + self.word_s)
        due = min((due for due in (*dues, *others_due) if due is not None), default=None)
        ready = {fd for fd, _ in self._poll.poll(None if due is None else max(0.0, due - now) * 1e3)}
        self._bell.silence()
        return ready

    def _look_after(self, line: Line[HostConnection], ready: set[int]) -> str | None:
        """Do what there is to do for a connection; the gateway's reason where it says goodbye.

        Raises WireError where it breaks, and what a lane has raised where there is no going on.
        """
        is_welcomed = line is self._welcomed_line
        if is_welcomed and self._fatal is not None:
            with self._lock:
                line.connection.refuse(self.role, f"{type(self._fatal).__name__}: {self._fatal}")
            self._begin_anew()
            self._dismissed()
            raise self._fatal
        with self._lock:
            line.connection.is_busy = not is_welcomed and self._welcomed_line is not None
            now = monotonic()
            events = line.transport.read(now) if line.fileno() in ready else []
            events += line.connection.tick(now)
        for event in events:
            reason = self._handle(line, event)
            if reason is not None:
                return reason
        with self._lock:
            if line is self._welcomed_line:
                self._say(line.connection)
            if not line.connection.is_open:  # an answer was more than it takes
                raise line.connection.error or WireError("gateway: connection lost", "lost")
        return None

    def _handle(self, line: Line[HostConnection], event: Event) -> str | None:
        match event:
            case Welcome():
                self._take_over(line)
                self._place_of = {grant.lane: place for place, grant in enumerate(event.lanes)}
                self._welcomed(event)
            case Reset() | Step() | Turn():
                place = self._place_of[event.lane]
                work = self._work_on(self._served[place], event)
                self._threads.put(place, Job(line.connection, event, work))
            case Goodbye():
                if line is self._welcomed_line:
                    self._begin_anew()  # for another rollout
                    self._dismissed()
                return event.reason
            case Broken():
                raise event.error
            case _:
                self._told(event)
        return None

    def _in_order(self) -> list[Line[HostConnection]]:
        """The welcomed connection first: where it has ended, another one may be welcomed in its place."""
        return sorted(self._lines, key=lambda line: line is not self._welcomed_line)

    def _take_over(self, line: Line[HostConnection]) -> None:
        """A connection has been welcomed: if there is an older one, it was the same gateway's."""
        logger.info("%s: the gateway has taken this host in", line.where)
        older, self._welcomed_line = self._welcomed_line, line
        self._was_welcomed = True
        if older is not None:
            logger.info("%s: the gateway has come back, the connection from %s is closed", line.where, older.where)
            with self._lock:
                older.connection.ended()  # it is not the place for a goodbye
            self._hang_up(older)

    def _begin_anew(self) -> None:
        """Have another session; who is in the handshake has been offered the one before."""
        self._session = _new_session()
        for line in self._lines:
            if line is not self._welcomed_line:
                with self._lock:
                    line.connection.refuse("session", "the session that was offered is over, expected another try")
                self._hang_up(line)

    def _hang_up(self, line: Line[HostConnection]) -> None:
        """Be done with a connection; one that is still open is told so."""
        with self._lock:
            line.connection.goodbye("the host was stopped")
            self._lines.drop(line)
            if line is self._welcomed_line:
                self._welcomed_line = None

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
        return Hello(
            versions=(VERSION, VERSION),
            role=self.role,
            software=software(),
            name=self.name,
            nonce=secrets.token_bytes(NONCE_BYTES),
            session=self._session.token,
            max_frame=self._limits.max_frame,
            slots=tuple(lane.env.num_envs for lane in self._served),
            metadata=self._metadata,
            busy=self._welcomed_line is not None,
            **self._served[0].describe(),
        )

    def _pause(self, seconds: float) -> None:
        poll = select.poll()
        poll.register(self._bell.fileno(), select.POLLIN)
        self._bell.silence()
        if not self._is_stopped:
            poll.poll(seconds * 1e3)

    def _answer(self, job: Job, answer: Answer) -> None:
        with self._lock:
            try:
                job.connection.answer(job.request, answer)
            except (WireError, ColumnError) as error:
                if getattr(error, "code", "") != "undelivered":
                    failed = self._failed(job.request, error)
                    with contextlib.suppress(WireError):  # the connection is broken: the answer waits for the next
                        if failed is not None:
                            job.connection.answer(job.request, failed)
            line = self._welcomed_line
            if line is not None:
                self._lines.write(line)
                if line.transport.waits_to_write or not line.connection.is_open:
                    self._bell.ring()


def _new_session() -> HostSession:
    return HostSession(secrets.token_bytes(SESSION_BYTES))
