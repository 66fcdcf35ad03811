"""Transports: they carry a connection's bytes through a socket, with TLS or without, and never block."""

import contextlib
import select
import socket
import ssl
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice
from time import monotonic

from rollflow.stream.data.system import system_module
from rollflow.stream.wire import Address, Connection, Event, TcpAddress

termios = system_module("termios")
fcntl = system_module("fcntl")

_MOST_READS = 64  # in a row, before others have their turn
_MOST_BUFFERS = 64  # sent at a time
_MOST_SENT = 1 << 22  # bytes at a time, before others have their turn
_TLS_BYTES = 1 << 16
_LOOK_S = 0.1  # after which it is asked again how long the other end is waited for
_UNIX_BUFFER = 1 << 20  # bytes that are on their way, as far as the system allows
# First byte of TLS: a record of type handshake or alert. No frame begins so: its length and 4 are a multiple of 8.
TLS_BEGINS = (0x15, 0x16)


class Transport:
    """Carrier of a connection: it sends what that gives, and gives it what is received.

    sock          connected; taken over
    connection    this end of the protocol

    Reading finds out that a socket can't be written to any more.
    """

    def __init__(self, sock: socket.socket, connection: Connection) -> None:
        sock.setblocking(False)
        connection.may_use_tls = sock.family != getattr(socket, "AF_UNIX", None)
        if connection.may_use_tls:
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
        """True if something is left to be sent once the socket takes more."""
        return bool(self._unsent)

    def read(self, now: float) -> list[Event]:
        """Receive what is there: the connection's events. If it is refused here, none tells that it is broken."""
        events: list[Event] = []
        for _ in range(_MOST_READS):
            buffer = self.connection.buffer()
            room = len(buffer)
            try:
                count = self._receive(buffer)
            except (BlockingIOError, InterruptedError):
                break
            except OSError:
                count = 0
            if count and self.connection.is_new and buffer[0] in TLS_BEGINS:
                self._refuse_mismatch(speaks_tls=False)
            events += self.connection.filled(count, now) if count else self.connection.ended()
            if not count or not self.connection.is_open or count < room:
                break
        return events

    def write(self) -> None:
        """Send what there is to send, as much as the socket takes, and not for long."""
        self._unsent += [memoryview(buffer).cast("B") for buffer in self.connection.outgoing()]
        self.connection.sent(self._send())

    def close(self, until: Callable[[], float] | None = None) -> None:
        """Close the socket; what it has taken is still delivered.

        until    gives the time, on the clock `monotonic`, until which the rest is sent, and then the other end is
                 waited for to close; what it has sent is dropped. It may become earlier. None: nothing is waited for
        """
        # Closed with something unread, the connection would be reset, and the last words lost.
        with contextlib.suppress(OSError):
            if until is not None:
                self._finish(until)
            self._sock.shutdown(socket.SHUT_WR)
            for _ in range(_MOST_READS):
                if not self._sock.recv(_TLS_BYTES):
                    break
        self._sock.close()

    def _finish(self, until: Callable[[], float]) -> None:
        """Send the rest, and read until the other end has closed, at the latest until this time."""
        poll, is_sending = select.poll(), True
        poll.register(self._sock, select.POLLIN | select.POLLOUT)
        while (left := until() - monotonic()) > 0:
            poll.poll(min(left, _LOOK_S) * 1e3)
            if is_sending:
                self.write()
                if not self.waits_to_write:
                    is_sending = False
                    self._sock.shutdown(socket.SHUT_WR)
                    poll.modify(self._sock, select.POLLIN)
            with contextlib.suppress(BlockingIOError):
                if not self._sock.recv(_TLS_BYTES):
                    return

    def _refuse_mismatch(self, *, speaks_tls: bool) -> None:
        """Refuse an end that speaks TLS if this one does not, or the other way round."""
        me, other = self.connection.roles
        one, none = (me, other) if speaks_tls else (other, me)
        self.connection.refuse("tls", f"the {one} speaks TLS and the {none} does not, expected both to, or neither")

    def _receive(self, buffer: memoryview) -> int:
        """Receive into the buffer; the number of bytes received. Raises OSError if that can't be."""
        return self._sock.recv_into(buffer)

    def _send(self) -> int:
        """Send from `_unsent`; the number of bytes sent."""
        unsent, total = self._unsent, 0
        while unsent and total < _MOST_SENT:
            try:
                count = self._send_some(_MOST_SENT - total)
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

    def _send_some(self, most: int) -> int:
        """Send at most so many bytes; the number of bytes sent. Raises OSError if that can't be."""
        return self._sock.sendmsg(_first(self._unsent, most))


def _queued(sock: socket.socket) -> int:
    """Bytes sent that the other end's system has not acknowledged; 0 if this system does not tell."""
    try:
        return int.from_bytes(fcntl.ioctl(sock, termios.TIOCOUTQ, bytes(4)), sys.byteorder)
    except (OSError, ValueError):  # ValueError: it is closed
        return 0


def _first(buffers: Iterable[memoryview], most: int) -> list[memoryview]:
    """The first buffers, up to so many bytes, and at least one."""
    first = []
    for buffer in islice(buffers, _MOST_BUFFERS):
        first.append(buffer[:most])
        most -= len(buffer)
        if most <= 0:
            break
    return first


class TlsTransport(Transport):
    """`Transport` whose bytes are encrypted.

    context    a server's, if the other end has dialled, or a client's; a server's may ask for a certificate
    dialled    the address that was dialled, whose name a client expects in the certificate; None: the other end has
    """

    def __init__(
        self, sock: socket.socket, connection: Connection, context: ssl.SSLContext, *, dialled: Address | None
    ) -> None:
        super().__init__(sock, connection)
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(
            self._incoming,
            self._outgoing,
            server_side=dialled is None,
            server_hostname=dialled.host if isinstance(dialled, TcpAddress) else None,
        )
        self._plain: deque[memoryview] = deque()  # not encrypted yet
        self._encrypted = 0  # bytes of the connection's that are encrypted and not sent
        self._is_agreed = False
        self._is_mismatched = False  # the other end speaks no TLS: the refusal goes out in the clear

    @property
    def waits_to_write(self) -> bool:
        """True if something is left to be sent once the socket takes more."""
        return bool(self._unsent) or (self._is_agreed and bool(self._plain))

    def read(self, now: float) -> list[Event]:
        """Receive and decrypt what is there: the connection's events."""
        has_ended = self._take_encrypted()
        events: list[Event] = []
        if self._is_mismatched:
            self._refuse_mismatch(speaks_tls=True)
            return []
        try:
            if self._agrees():
                for count in self._decrypted():
                    events += self.connection.filled(count, now)
                    if not self.connection.is_open:
                        break
        except ssl.SSLError as error:
            if not (has_ended and self.connection.is_new):  # else it was closed without a word
                self.connection.refuse("tls", f"TLS: {tls_problem(error)}")
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

    def _take_encrypted(self) -> bool:
        """Take what has come; True if the other end has closed."""
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
        """True once both ends have agreed on how to encrypt. Raises ssl.SSLError if they can't."""
        if not self._is_agreed:
            with contextlib.suppress(ssl.SSLWantReadError):
                self._tls.do_handshake()
                self._is_agreed = True
        return self._is_agreed

    def _decrypted(self) -> Iterator[int]:
        """Counts of bytes, each decrypted into the connection's buffer."""
        with contextlib.suppress(ssl.SSLWantReadError, ssl.SSLZeroReturnError, ssl.SSLEOFError):
            while count := int(self._tls.read(_TLS_BYTES, self.connection.buffer())):
                yield count


def tls_problem(error: ssl.SSLError) -> str:
    """The reason why two ends can't agree on how to encrypt, for people."""
    unverified = getattr(error, "verify_message", None)
    if unverified:
        return f"the other end's certificate is not good: {unverified.rstrip('.')}"
    reason = error.reason or str(error)
    if reason == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
        return "the other end shows no certificate, expected one"
    _, is_alert, alert = reason.partition("ALERT_")
    return f"{'the other end refuses: ' if is_alert else ''}{(alert or reason).lower().replace('_', ' ')}"
