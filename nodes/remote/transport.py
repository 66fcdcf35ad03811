"""A connection's bytes through a socket, with TLS or without, never waiting."""

import contextlib
import fcntl
import socket
import ssl
import sys
import termios
from collections import deque
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import islice

from rollflow.stream.errors import WireError
from rollflow.stream.wire import Address, Broken, Connection, Event, TcpAddress

_MOST_READS = 64  # in a row, before others have their turn
_MOST_BUFFERS = 64  # sent at a time
_MOST_SENT = 1 << 22  # bytes at a time, before others have their turn
_TLS_BYTES = 1 << 16
_UNIX_BUFFER = 1 << 20  # bytes that are on their way, as far as the system allows
# What TLS begins with: a record of type handshake or alert. No frame does: its length and 4 are a multiple of 8.
TLS_BEGINS = (0x15, 0x16)


class Transport:
    """What a connection is to send goes out, and what comes in is given to it.

    sock          connected; taken over
    connection    this end of the protocol

    A socket that can't be written to any more is found out by reading.
    """

    def __init__(self, sock: socket.socket, connection: Connection) -> None:
        sock.setblocking(False)
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        else:  # which does not grow as that of TCP does, and holds a fifth of this
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _UNIX_BUFFER)
        self.connection = connection
        connection.queued = partial(_queued, sock)
        self._sock = sock
        self._unsent: deque[memoryview] = deque()

    def fileno(self) -> int:
        """The socket's descriptor; -1 once it is closed."""
        return self._sock.fileno()

    @property
    def waits_to_write(self) -> bool:
        """Whether something is left to be sent once the socket takes more."""
        return bool(self._unsent)

    def read(self, now: float) -> list[Event]:
        """Receive what is there; what it comes to."""
        events: list[Event] = []
        for _ in range(_MOST_READS):
            buffer = self.connection.buffer()
            try:
                count = self._sock.recv_into(buffer)
            except (BlockingIOError, InterruptedError):
                break
            except OSError:
                count = 0
            if count and self.connection.is_new and buffer[0] in TLS_BEGINS:
                return [self._mismatched(speaks_tls=False)]
            events += self.connection.filled(count, now) if count else self.connection.ended()
            if not count or not self.connection.is_open:
                break
        return events

    def write(self) -> None:
        """Send what there is to send, as much as the socket takes, and not for long."""
        self._unsent += [memoryview(buffer).cast("B") for buffer in self.connection.outgoing()]
        self.connection.sent(self._send())

    def close(self) -> None:
        """Close the socket; what it has taken is still delivered."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_WR)
            # Closed with something unread, the connection would be reset, and the last words lost.
            for _ in range(_MOST_READS):
                if not self._sock.recv(_TLS_BYTES):
                    break
        self._sock.close()

    def _mismatched(self, *, speaks_tls: bool) -> Event:
        """Refuse: one end speaks TLS, and the other does not."""
        me, other = self.connection.roles
        one, none = (me, other) if speaks_tls else (other, me)
        return self._refused(f"the {one} speaks TLS and the {none} does not, expected both to, or neither")

    def _refused(self, problem: str) -> Event:
        self.connection.refuse("tls", problem)
        assert self.connection.error is not None
        return Broken(self.connection.error)

    def _send(self) -> int:
        """Send from `_unsent`; how many bytes were sent."""
        unsent, total = self._unsent, 0
        while unsent and total < _MOST_SENT:
            try:
                count = self._sock.sendmsg(_first(unsent, _MOST_SENT - total))
            except (BlockingIOError, InterruptedError):
                break
            except OSError:
                unsent.clear()
                break
            total += count
            while unsent and count >= len(unsent[0]):
                count -= len(unsent.popleft())
            if count:
                unsent[0] = unsent[0][count:]
        return total


def _queued(sock: socket.socket) -> int:
    """Bytes that were sent and that the other end's system has not acknowledged; 0 where the system does not tell."""
    try:
        return int.from_bytes(fcntl.ioctl(sock, termios.TIOCOUTQ, bytes(4)), sys.byteorder)
    except (OSError, ValueError):  # ValueError: it is closed
        return 0


def _first(buffers: Iterable[memoryview], most: int) -> list[memoryview]:
    """The first of them, and of their bytes: so many at most, at least one."""
    found = []
    for buffer in islice(buffers, _MOST_BUFFERS):
        found.append(buffer[:most])
        most -= len(buffer)
        if most <= 0:
            break
    return found


def check_server_tls(tls: ssl.SSLContext | None) -> None:
    """Raise WireError for a context that is not for a server."""
    if tls is not None and tls.protocol is ssl.PROTOCOL_TLS_CLIENT:
        raise WireError(
            "tls is a client's context, expected a server's, such as ssl.create_default_context("
            "ssl.Purpose.CLIENT_AUTH) with its certificate loaded",
            "tls",
        )


class TlsTransport(Transport):
    """A `Transport` whose bytes are encrypted.

    context            server's or client's, as `is_server` says; with a client's certificate asked for or not
    server_hostname    what a client expects the certificate to be for
    """

    def __init__(
        self,
        sock: socket.socket,
        connection: Connection,
        context: ssl.SSLContext,
        *,
        is_server: bool,
        server_hostname: str | None = None,
    ) -> None:
        super().__init__(sock, connection)
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(
            self._incoming,
            self._outgoing,
            server_side=is_server,
            server_hostname=None if is_server else server_hostname,
        )
        self._plain: deque[memoryview] = deque()  # not encrypted yet
        self._encrypted = 0  # bytes of the connection's that are encrypted and not sent
        self._is_agreed = False
        self._is_mismatched = False  # the other end speaks no TLS: it is told so in plain words

    @property
    def waits_to_write(self) -> bool:
        """Whether something is left to be sent once the socket takes more."""
        return bool(self._unsent) or (self._is_agreed and bool(self._plain))

    def read(self, now: float) -> list[Event]:
        """Receive what is there, decrypt it; what it comes to."""
        has_ended = self._receive()
        events: list[Event] = []
        if self._is_mismatched:
            return [self._mismatched(speaks_tls=True)] if self.connection.is_open else []
        try:
            if self._agrees():
                for count in self._decrypted():
                    events += self.connection.filled(count, now)
                    if not self.connection.is_open:
                        break
        except ssl.SSLError as error:
            events += self._failed(error)
        if has_ended and self.connection.is_open:
            events += self.connection.ended()
        self.write()
        return events

    def write(self) -> None:
        """Encrypt and send what there is to send, as much as the socket takes, and not for long."""
        if self._is_mismatched:
            super().write()
            return
        self._plain += [memoryview(buffer).cast("B") for buffer in self.connection.outgoing()]
        with contextlib.suppress(ssl.SSLError):  # which reading finds out
            while self._agrees() and self._plain and self._encrypted < _MOST_SENT:
                count = self._tls.write(self._plain[0][:_MOST_SENT])
                self._encrypted += count
                self._plain[0] = self._plain[0][count:]
                if not self._plain[0]:
                    self._plain.popleft()
        if self._outgoing.pending:
            self._unsent.append(memoryview(self._outgoing.read()))
        # Encrypted there are more of them, by less than this. Whether all are sent is known only when nothing is left.
        sent = self._send() * 15 // 16
        sent = min(sent, self._encrypted) if self._unsent else self._encrypted
        self._encrypted -= sent
        self.connection.sent(sent)

    def _receive(self) -> bool:
        """Take in what has come; whether the other end has closed."""
        for _ in range(_MOST_READS):
            try:
                data = self._sock.recv(_TLS_BYTES)
            except (BlockingIOError, InterruptedError):
                return False
            except OSError:
                return True
            if not data:
                self._incoming.write_eof()
                return True
            if self.connection.is_new and data[0] not in TLS_BEGINS:
                self._is_mismatched = True
                self._unsent.clear()
                return False
            self.connection.is_new = False
            self._incoming.write(data)
        return False

    def _agrees(self) -> bool:
        """Whether both ends have agreed on how to encrypt. Raises ssl.SSLError where they can't."""
        if not self._is_agreed:
            with contextlib.suppress(ssl.SSLWantReadError):
                self._tls.do_handshake()
                self._is_agreed = True
        return self._is_agreed

    def _decrypted(self) -> Iterator[int]:
        """How many bytes stand in the connection's buffer now, again and again."""
        with contextlib.suppress(ssl.SSLWantReadError, ssl.SSLZeroReturnError, ssl.SSLEOFError):
            while count := int(self._tls.read(_TLS_BYTES, self.connection.buffer())):
                yield count

    def _failed(self, error: ssl.SSLError) -> list[Event]:
        return [self._refused(f"TLS: {tls_problem(error)}")] if self.connection.is_open else []


def tls_problem(error: ssl.SSLError) -> str:
    """Why two ends can't agree on how to encrypt, for people."""
    unverified = getattr(error, "verify_message", None)
    if unverified:
        return f"the other end's certificate is not good: {unverified.rstrip('.')}"
    reason = error.reason or str(error)
    if reason == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
        return "the other end shows no certificate, expected one"
    _, refused, why = reason.partition("ALERT_")
    return f"{'the other end refuses: ' if refused else ''}{(why or reason).lower().replace('_', ' ')}"


def transport_for(
    sock: socket.socket, connection: Connection, tls: ssl.SSLContext | None, *, dialled: Address | None
) -> Transport:
    """What carries a connection, encrypted where there is a context; `dialled` is None where the other end dialled."""
    if tls is None:
        return Transport(sock, connection)
    name = dialled.host if isinstance(dialled, TcpAddress) else None
    return TlsTransport(sock, connection, tls, is_server=dialled is None, server_hostname=name)
