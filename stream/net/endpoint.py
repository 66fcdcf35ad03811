"""Ends of connections as a user names them: addresses with a secret, TLS and limits, and sockets that listen there."""

import errno
import os
import socket
import ssl
import stat
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

from rollflow.stream.data.closing import closing_on_error
from rollflow.stream.data.errors import EnvError, WireError
from rollflow.stream.wire import Address, Limits, TcpAddress, UnixAddress, check_secret, parse_address

Secret = bytes | str | None


class Endpoint(NamedTuple):
    """Address that is listened on or dialled, and the limits and the protection of the connections there."""

    address: Address
    limits: Limits
    secret: bytes | None = None
    tls: ssl.SSLContext | None = None

    @property
    def shares(self) -> bool:
        """True if both ends share memory."""
        return isinstance(self.address, UnixAddress) and self.address.scheme == "shm:"


def endpoint_at(
    address: str | Address,
    secret: Secret,
    tls: ssl.SSLContext | None,
    limits: Limits | None,
    *,
    listens: bool = False,
    may_share: bool = False,
) -> Endpoint:
    """An endpoint, checked.

    listens      whether it is listened on, with a server's context; else it is dialled, with a client's
    may_share    whether the address may be one of shared memory

    Raises WireError for an invalid address, one that needs a secret, and a secret or context that it can't have.
    """
    target, known = parse_address(address, may_share=may_share), secret_bytes(secret)
    check_secret(target, known)
    endpoint = Endpoint(target, limits or Limits(), known, tls)
    if tls is None:
        return endpoint
    if endpoint.shares:
        raise WireError(f"address {str(target)!r} with tls: memory is not encrypted, expected tls=None", "tls")
    if listens and tls.protocol is ssl.PROTOCOL_TLS_CLIENT:
        raise WireError(
            "tls is a client's context, expected a server's, such as ssl.create_default_context("
            "ssl.Purpose.CLIENT_AUTH) with its certificate loaded",
            "tls",
        )
    if not listens and isinstance(target, UnixAddress) and tls.check_hostname:
        raise WireError(
            f"{target} has no host name to check in a certificate; expected tls.check_hostname=False", "tls"
        )
    return endpoint


def secret_bytes(secret: Secret) -> bytes | None:
    """A secret as it is used: text in UTF-8, without white space at its ends. Raises WireError for what can be none."""
    if not isinstance(secret, bytes | str | None):
        raise WireError(f"secret is of type {type(secret).__name__}, expected text or bytes", "secret")
    return secret.strip().encode() if isinstance(secret, str) else secret


def listen_on(address: Address) -> list[socket.socket]:
    """Sockets that listen on an address. Raises EnvError if that can't be."""
    try:
        sockets = [_unix_listener(address)] if isinstance(address, UnixAddress) else _tcp_listeners(address)
    except OSError as error:
        reason = (error.strerror or str(error)).partition(" (while attempting")[0]  # which has the address once more
        raise EnvError(f"can't listen on {address}: {reason}") from error
    for sock in sockets:
        sock.setblocking(False)
    return sockets


def address_of(sock: socket.socket) -> Address:
    """Address that a socket listens on."""
    name = sock.getsockname()
    return UnixAddress(name) if sock.family == getattr(socket, "AF_UNIX", None) else TcpAddress(name[0], name[1])


def close_sockets(sockets: Sequence[socket.socket]) -> None:
    """Close listening sockets, and take the files of Unix sockets away."""
    for sock in sockets:
        if sock.family == getattr(socket, "AF_UNIX", None) and sock.fileno() >= 0:
            with suppress(OSError):
                os.unlink(sock.getsockname())
        sock.close()


def _unix_listener(address: UnixAddress) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    with closing_on_error(sock.close):
        with suppress(FileNotFoundError):
            if not stat.S_ISSOCK(os.stat(address.path).st_mode):
                raise FileExistsError(errno.EEXIST, "something else is there, expected nothing or a socket")
            if not _is_answered(address):
                os.unlink(address.path)  # left behind by somebody who was killed
        sock.bind(address.path)
        os.chmod(address.path, 0o600)
        sock.listen(socket.SOMAXCONN)
    return sock


def _is_answered(address: UnixAddress) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(address.path)
        except ConnectionRefusedError:
            return False
    return True


def _tcp_listeners(address: TcpAddress) -> list[socket.socket]:
    found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    # A name may stand for several addresses; with port 0 each would have another one.
    sockets: list[socket.socket] = []
    with closing_on_error(lambda: close_sockets(sockets)):
        for family, _, _, _, target in found if address.port else found[:1]:
            sockets.append(socket.create_server(target, family=family, backlog=socket.SOMAXCONN))
    return sockets
