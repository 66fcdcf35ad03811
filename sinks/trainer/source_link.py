"""A rollout's connection to its trainer, in a thread of its own; it dials again whenever that is lost."""

import logging
import select
import socket
import ssl
import threading
from collections import deque
from collections.abc import Callable, Mapping
from itertools import islice
from time import monotonic
from typing import Any

from rollflow.nodes.backoff import pause_s
from rollflow.nodes.remote.dial import problem_of, reach
from rollflow.nodes.remote.lines import Line, Lines, quoted
from rollflow.nodes.remote.transport import Transport, transport_for
from rollflow.nodes.weights_codec import Arrays, from_arrays
from rollflow.nodes.weights_digest import digest_of
from rollflow.sinks.trainer.alike import MOST_ALIKE, MOST_BYTES, MOST_LENT, Alike, alike
from rollflow.sinks.trainer.compression import compressed
from rollflow.sinks.trainer.item_message import is_batch, nbytes_of
from rollflow.sinks.trainer.kept import Kept
from rollflow.sinks.trainer.pace_gate import Wanted
from rollflow.sinks.trainer.shared.descriptor_transport import DescriptorTransport
from rollflow.sinks.trainer.shared.lender import Lender
from rollflow.stream.bell import Bell
from rollflow.stream.errors import WireError
from rollflow.stream.wire import (
    FAILED,
    Address,
    Aside,
    Broken,
    Come,
    Done,
    Event,
    Finished,
    Free,
    Goodbye,
    Hello,
    Limits,
    Phase,
    Receipt,
    Settings,
    SourceConnection,
    SourceSession,
    Weights,
    Welcome,
)

logger = logging.getLogger(__name__)

_LONGEST_RETRY_S = 2.0
_GOODBYE_S = 2.0  # that the trainer has for its own goodbye
_MUCH = 1 << 16  # bytes that wait for the trainer
_AT_A_TIME = 4  # fragments that are made ready before they are sent
_MOST_VERSIONS = 64  # whose digests are known
# Codes of errors after which the trainer is dialled again.
_COMES_BACK = ("lost", "silent", "undelivered", "handshake")
_NO_TRAINER = ("frame", "message", "order")  # before it was welcomed: somebody else is at the address


class SourceLink:
    """Sends what is kept to a trainer, and takes what it says.

    address    where the trainer listens
    hello      what to say first through each connection
    session    what outlives connections
    kept       what there is to send
    publish    called with the version and the weights that came; False: they are not newer than the rollout's
    lender     lends what is sent; None: it goes through the socket

    wanted      how the trainer wants the stream; None: it has not been there yet
    versions    policy version -> digest of its weights, for those that came from here and were taken
    welcomes    how often a trainer has taken this rollout in
    goodbye     the reason that the trainer gave when it left; None: it has not, or there is another one
    problem     what stands between this and the trainer; "": nothing
    error       why there is no going on; None: there is
    bell        rings when anything has changed
    """

    def __init__(
        self,
        address: Address,
        hello: Callable[[], Hello],
        session: SourceSession,
        kept: Kept,
        publish: Callable[[int, Mapping[str, Any]], bool],
        *,
        secret: bytes | None,
        tls: ssl.SSLContext | None,
        limits: Limits,
        lender: Lender | None = None,
    ) -> None:
        self.wanted: Wanted | None = None
        self.versions: dict[int, bytes] = {}
        self.welcomes = 0
        self.goodbye: str | None = None
        self.problem = f"{address} has not been reached"
        self.error: Exception | None = None
        self.bell = Bell()
        self.address, self._hello, self._session, self._kept = address, hello, session, kept
        self._publish, self._secret, self._tls, self._limits = publish, secret, tls, limits
        self._lender = lender
        self._news: deque[Receipt | Come | Aside] = deque()
        self._wake = Bell()
        self._poll = select.poll()
        self._poll.register(self._wake.fileno(), select.POLLIN)
        self._lines: Lines[Line[SourceConnection]] = Lines(self._poll)
        self._is_closing = self._is_welcomed = False
        self._parting: str | None = None  # why this end leaves; None: without a word
        self._failure: str | None = None  # what it leaves for that it has not wanted
        self._leave_by: float | None = None
        self._is_finished = False
        self._told_finished: SourceConnection | None = None  # the connection that was told so
        self._thread = threading.Thread(target=self._run, name=f"rollflow to trainer {address}", daemon=True)

    def start(self) -> None:
        """Begin to dial."""
        self._thread.start()

    def wake(self) -> None:
        """Have a look at what is kept."""
        self._wake.ring()

    def tell(self, news: Receipt | Come | Aside) -> None:
        """Have something said beside what is kept."""
        self._news.append(news)
        self._wake.ring()

    def finish(self) -> None:
        """Say that no more comes, once all has been sent."""
        self._is_finished = True
        self._wake.ring()

    def close(self, reason: str | None, failure: str | None = None) -> None:
        """Say goodbye for a reason, or what there is no going on for, or just go; end the thread."""
        is_told = reason is not None or failure is not None
        self._leave_by, self._parting = monotonic() + (_GOODBYE_S if is_told else 0.0), reason
        self._failure = failure
        self._is_closing = True
        self._wake.ring()
        if self._thread.is_alive():
            self._thread.join()

    def release(self) -> None:
        """Give the descriptors back."""
        self.bell.close()
        self._wake.close()

    # In the thread

    def _run(self) -> None:
        try:
            self._connect_again_and_again()
        except Exception as error:
            self.error = error
        self.bell.ring()

    def _connect_again_and_again(self) -> None:
        failures = 0
        while not self._is_closing:
            try:
                self._is_welcomed = False
                self._serve(failures)
            except InterruptedError:
                return  # this end has left meanwhile
            except OSError as error:
                problem = f"trainer {self.address}: {problem_of(error)}"
            except WireError as error:
                if error.code not in (*_COMES_BACK, *(() if self._is_welcomed else _NO_TRAINER)):
                    raise self._where(error) from None
                problem = str(self._where(error))
            else:
                problem = self.problem  # a goodbye
            if self.goodbye is not None and problem != self.problem:
                problem = f"trainer {self.address} said goodbye: {quoted(self.goodbye)}; now: {problem}"
            failures = 0 if self._is_welcomed else failures
            if problem != self.problem:
                logger.warning("waiting: %s", problem)
            self.problem = problem
            failures += 1
            self._pause(pause_s(failures, _LONGEST_RETRY_S))

    def _where(self, error: WireError) -> WireError:
        """The error, and which trainer it is from."""
        return WireError(f"trainer {self.address}: {str(error).removeprefix('trainer: ')}", error.code)

    def _pause(self, seconds: float) -> None:
        until = monotonic() + seconds
        while not self._is_closing and (left := until - monotonic()) > 0:
            self._poll.poll(left * 1e3)
            self._wake.silence()

    def _serve(self, attempt: int) -> None:
        """Serve a connection until a goodbye. Raises OSError where none can be made, WireError where it breaks."""
        hello = self._hello()
        sock = reach(self.address, attempt, self._wake, lambda: self._is_closing)
        connection = SourceConnection(hello, self._session, secret=self._secret, limits=self._limits, now=monotonic())
        line = Line(self._transport(sock, connection), connection, str(self.address))
        self._lines.add(line)
        try:
            while connection.is_open:
                self._wake.silence()
                self._send(connection)
                self._make_room(connection)
                self._lines.write(line)
                dues = [due for due in (connection.next_deadline(), self._leave_by) if due is not None]
                timeout = max(0.0, min(dues) - monotonic()) * 1e3 if dues else None
                ready = {fd for fd, _ in self._poll.poll(timeout)}
                now = monotonic()
                if self._leave_by is not None and now >= self._leave_by:
                    return
                events = line.transport.read(now) if line.fileno() in ready else []
                for event in events + connection.tick(now):
                    self._take(event)
        except Exception as error:
            connection.refuse("weights" if not isinstance(error, WireError) else error.code, str(error))
            raise
        finally:
            self._lines.drop(line)
            if self._lender is not None:
                self._lender.end()

    def _transport(self, sock: socket.socket, connection: SourceConnection) -> Transport:
        if self._lender is None:
            return transport_for(sock, connection, self._tls, dialled=self.address)
        transport = DescriptorTransport(sock, connection)
        self._lender.begin(connection, transport)
        return transport

    def _send(self, connection: SourceConnection) -> None:
        """Send what there is to send, as much as is wanted."""
        if self._parting is not None:
            connection.goodbye(self._parting)
        if connection.phase is not Phase.RUNNING:
            return
        if self._failure is not None and self._parting is None:
            if connection.undelivered:
                return  # it would be cut off with what waits before it
            raise WireError(f"the rollout has failed: {self._failure}", FAILED)
        while self._news:
            connection.tell(self._news.popleft())
        session, wanted, begun = self._session, self.wanted, connection.next
        while wanted is not None and connection.undelivered < _MUCH:
            if connection.next > min(session.given, session.done + wanted.window):
                break
            if connection.next - begun >= _AT_A_TIME:
                self._wake.ring()  # the trainer can begin with these meanwhile
                break
            self._send_next(connection, wanted)
        if self._is_finished and connection.next > session.given and self._told_finished is not connection:
            connection.tell(Finished(session.given))
            self._told_finished = connection

    def _make_room(self, connection: SourceConnection) -> None:
        """Have on disk what need not be sent now; but for what the trainer has in shared memory, which stays there."""
        is_sent = connection.phase is Phase.RUNNING and self._lender is None
        if self._kept.make_room(connection.next - 1 if is_sent else self._session.done):
            self.bell.ring()

    def _send_next(self, connection: SourceConnection, wanted: Wanted) -> None:
        """Send the next that is kept, and those behind it that can go with it."""
        begin = connection.next
        message = self._kept.get(begin)
        if wanted.compression is not None and self._lender is None:
            connection.send(compressed(message))
            return
        end = min(self._session.given, self._session.done + wanted.window, begin + wanted.series - 1) + 1
        others = map(self._kept.get, range(begin + 1, min(end, begin + MOST_ALIKE)))
        is_lent_large = self._lender is not None and is_batch(message) and nbytes_of(message) >= MOST_BYTES
        most = min(MOST_LENT if is_lent_large else MOST_BYTES, connection.peer_max_frame // 2)
        if self._lender is not None and not is_batch(message):
            behind = max(0, most // max(1, nbytes_of(message)) - 1)
            self._lender.send([message, *islice(others, behind)])
        elif (found := alike(message, others, most)) is not None:
            self._send_alike(connection, found)
        elif self._lender is not None:
            self._lender.send([message])
        else:
            connection.send(message)

    def _send_alike(self, connection: SourceConnection, found: Alike) -> None:
        if self._lender is not None:
            self._lender.send_alike(found)
        else:
            connection.send(found.joined())

    def _take(self, event: Event) -> None:
        match event:
            case Welcome():
                logger.info("trainer %s has taken this rollout in", self.address)
                self.problem, self.wanted, self.goodbye, self._is_welcomed = "", None, None, True
                self.welcomes += 1
            case Settings():
                self.wanted = Wanted.of(event.settings)
                self._kept.needs = self.wanted.needs
            case Weights():
                self._take_weights(event)
            case Free():
                if self._lender is None:
                    raise WireError("free from a trainer that is lent nothing, expected none", "order")
                self._lender.take_back(event)
            case Done():
                self._session.take(event)
                self._kept.forget(self._session.kept)
            case Goodbye() if not self._is_welcomed:
                raise WireError(f"goodbye in the handshake: {quoted(event.reason)}", "lost")
            case Goodbye():
                self.goodbye = event.reason
                self.problem = f"trainer {self.address} said goodbye: {quoted(event.reason)}"
                logger.info("%s", self.problem)
            case Broken():
                has_failed = event.error.code == FAILED  # another trainer may come in its place
                raise WireError(str(event.error), "lost") if has_failed else event.error
        self.bell.ring()

    def _take_weights(self, message: Weights) -> None:
        tensors, dtypes, version = dict(message.tensors), dict(message.dtypes), message.version
        digest = digest_of(tensors, dtypes)
        if self._publish(version, from_arrays(Arrays(tensors, dtypes, dict(message.others)))):
            self.versions[version] = digest
            while len(self.versions) > _MOST_VERSIONS:
                del self.versions[next(iter(self.versions))]
        elif self.versions.get(version) != digest:  # they have come before
            logger.warning(
                "trainer %s: weights of version %d are not taken, expected a newer version: the rollout has some of "
                "another trainer",
                self.address,
                version,
            )
