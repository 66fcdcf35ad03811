"""Transports: they carry a connection's bytes through a socket, with TLS or without, and never block."""

import contextlib
import select
import socket
import ssl
import sys
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from itertools import islice
from time import monotonic
from typing import Any

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

    _is_in_pieces = False  # less may be received at a time than there is

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
            events += self.connection.filled(count, now) if count else self.connection.ended()
            if not count or not self.connection.is_open or (count < room and not self._is_in_pieces):
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
            with contextlib.suppress(BlockingIOError, ssl.SSLWantReadError):
                if not self._sock.recv(_TLS_BYTES):
                    return

    def _refuse_mismatch(self, *, speaks_tls: bool) -> None:
        """Refuse an end that speaks TLS if this one does not, or the other way round."""
        me, other = self.connection.roles
        one, none = (me, other) if speaks_tls else (other, me)
        self.connection.refuse("tls", f"the {one} speaks TLS and the {none} does not, expected both to, or neither")

    def _receive(self, buffer: memoryview) -> int:
        """Receive into the buffer; the number of bytes received. Raises OSError if that can't be."""
        count = self._sock.recv_into(buffer)
        if count and self.connection.is_new and buffer[0] in TLS_BEGINS:
            self._refuse_mismatch(speaks_tls=False)
        return count

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

    _is_in_pieces = True

    def __init__(
        self, sock: socket.socket, connection: Connection, context: ssl.SSLContext, *, dialled: Address | None
    ) -> None:
        super().__init__(sock, connection)
        is_server, name = dialled is None, dialled.host if isinstance(dialled, TcpAddress) else None
        wrapped = context.wrap_socket(sock, is_server, do_handshake_on_connect=False, server_hostname=name)
        self._sock = self._tls = wrapped
        connection.queued = partial(_queued, self._tls)
        self._is_agreed = False
        self._speaks_first = not is_server
        self._is_clear = False  # the other end speaks no TLS: the refusal goes out in the clear

    @property
    def waits_to_write(self) -> bool:
        """True if something is left to be sent once the socket takes more."""
        return bool(self._unsent) and (self._is_agreed or self._is_clear)

    def read(self, now: float) -> list[Event]:
        """Receive and decrypt what is there: the connection's events."""
        events = super().read(now)
        while self._tls.pending() and self.connection.is_open:  # of which the system does not tell
            events += super().read(now)
        self.write()  # what may have waited for it
        return events

    def write(self) -> None:
        """Encrypt and send what there is to send, as much as the socket takes, and not for long."""
        with contextlib.suppress(OSError):  # which reading finds out
            self._agree()
        super().write()

    def _receive(self, buffer: memoryview) -> int:
        self._agree()
        return 0 if self._is_clear else int(self._tried(self._tls.recv_into, buffer))

    def _send_some(self, most: int) -> int:
        """Encrypt and send some bytes: as many again if they could not be sent."""
        if self._is_clear:
            return socket.socket.send(self._sock, self._unsent[0])
        if not self._is_agreed:
            raise BlockingIOError
        return int(self._tried(self._tls.send, self._unsent[0][:_TLS_BYTES]))

    def _agree(self) -> None:
        """Go on to agree with the other end on how to encrypt. Raises BlockingIOError if that has to wait."""
        if self._is_agreed or self._is_clear:
            return
        if self.connection.is_new:
            # What comes is looked at before TLS takes it: its next bytes would say nothing.
            try:
                first = socket.socket.recv(self._sock, 1, socket.MSG_PEEK)
            except BlockingIOError:
                if self._speaks_first:
                    self._begin()
                if self.connection.is_new:
                    raise
                first = b""
            if first:
                self.connection.is_new = False
                if first[0] not in TLS_BEGINS:
                    self._is_clear = True
                    self._unsent.clear()
                    if self._speaks_first:  # by its first bytes the other end knows as well
                        self._begin()
                    self._refuse_mismatch(speaks_tls=True)
                    return
        self._tried(self._tls.do_handshake)
        self._is_agreed = True

    def _begin(self) -> None:
        """Say hello to an end that was dialled."""
        self._speaks_first = False
        with contextlib.suppress(ssl.SSLError):
            self._tls.do_handshake()
        if self._tls.cipher() is not None:  # its answer has come meanwhile
            self.connection.is_new = False

    def _tried(self, operation: Callable[..., Any], *arguments: Any) -> Any:
        """What an operation returns. Raises BlockingIOError if it has to wait, OSError if there is nobody more.

        The other end is refused for an error of TLS.
        """
        try:
            return operation(*arguments)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise BlockingIOError from None
        except ssl.SSLError as error:
            if not isinstance(error, ssl.SSLEOFError):
                self.connection.refuse("tls", f"TLS: {tls_problem(error)}")
            raise


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
