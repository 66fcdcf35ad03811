"""Hosts as a user names them to a rollout whose environments, or all of it, are on other hosts."""

import errno
import os
import socket
import ssl
import stat
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Self

from rollflow.stream.data.closing import closing_on_error
from rollflow.stream.data.errors import EnvError, WireError
from rollflow.stream.wire import Address, Limits, SharedAddress, TcpAddress, UnixAddress, check_secret, parse_address

if TYPE_CHECKING:
    from rollflow.nodes.launch.on_hosts import HostKeeper

Secret = bytes | str | None


class Endpoint(NamedTuple):
    """Address that is listened on or dialled, and the limits and the protection of the connections there."""

    address: Address
    limits: Limits
    secret: bytes | None = None
    tls: ssl.SSLContext | None = None

    @property
    def shares(self) -> bool:
        """True where both ends share memory."""
        return isinstance(self.address, SharedAddress)


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
    if tls is None:
        return Endpoint(target, limits or Limits(), known)
    if isinstance(target, SharedAddress):
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
    return Endpoint(target, limits or Limits(), known, tls)


@dataclass(eq=False, repr=False)
class RemoteHosts:
    """Hosts that dial in, or are dialled, for `RemoteEnvs` and `RemoteRollouts`: see `listen` and `connect`.

    endpoint     one of the addresses, whose secret, TLS and limits are those of all
    addresses    listened on, with the ports that they have; or to be dialled
    supply       owner of the hosts; None: somebody else starts them

    For one rollout, which closes it; `close` is for one that was never given to any.
    """

    endpoint: Endpoint
    addresses: list[Address]
    sockets: list[socket.socket]
    hosts: int
    join_timeout: float | None
    max_hosts: int
    is_taken: bool = False
    supply: "HostKeeper | None" = None

    def __post_init__(self) -> None:
        if not 1 <= self.hosts <= self.max_hosts:
            raise ValueError(
                f"hosts is {self.hosts} and max_hosts is {self.max_hosts}, expected 1 <= hosts <= max_hosts"
            )

    @classmethod
    def listen(
        cls,
        *addresses: str,
        secret: Secret = None,
        tls: ssl.SSLContext | None = None,
        hosts: int = 1,
        join_timeout: float | None = 120.0,
        max_hosts: int = 4096,
        limits: Limits | None = None,
    ) -> Self:
        """Listen right away, for hosts that dial in whenever they want to.

            addresses       'tcp://host:port' or 'unix:/path'; port 0 is any that is free: see `addresses`
            secret          that hosts must know, and that is never sent. Without one only loopback addresses and Unix
                            sockets are listened on
            tls             a server's context; it may ask for the hosts' certificates
            hosts           how many the rollout waits for before it begins; others may come at any time
            join_timeout    seconds that it waits for them, and, when all have left, for others; None: for ever
            max_hosts       more are refused
            limits          of frames, times and bytes under way

        Raises WireError for an address that is none, or not without a secret; EnvError where it can't be listened on.
        """
        if not addresses:
            raise ValueError("no address to listen on, expected 'tcp://host:port' or 'unix:/path'")
        sockets: list[socket.socket] = []
        with closing_on_error(lambda: close_sockets(sockets)):
            for text in addresses:
                endpoint = endpoint_at(text, secret, tls, limits, listens=True)
                sockets += listen_on(endpoint.address)
            found = [address_of(sock) for sock in sockets]
            return cls(endpoint, found, sockets, hosts=hosts, join_timeout=join_timeout, max_hosts=max_hosts)

    @classmethod
    def connect(
        cls,
        addresses: str | Sequence[str],
        *,
        secret: Secret = None,
        tls: ssl.SSLContext | None = None,
        hosts: int | None = None,
        join_timeout: float | None = 120.0,
        limits: Limits | None = None,
    ) -> Self:
        """Dial hosts that listen, and again whenever a connection is lost.

            addresses    'tcp://host:port' or 'unix:/path', one for each host
            tls          a client's context
            hosts        how many the rollout waits for before it begins; None: all of them

        All else is as for `listen`.
        """
        texts = [addresses] if isinstance(addresses, str) else list(addresses)
        if not texts:
            raise ValueError("no address to dial, expected 'tcp://host:port' or 'unix:/path'")
        dialled = [endpoint_at(text, secret, tls, limits) for text in texts]
        return cls(
            dialled[0],
            [each.address for each in dialled],
            [],
            hosts=len(dialled) if hosts is None else hosts,
            join_timeout=join_timeout,
            max_hosts=len(dialled),
        )

    @property
    def is_listening(self) -> bool:
        """True if hosts dial in."""
        return bool(self.sockets)

    def take(self) -> None:
        """Say that a rollout has it. Raises EnvError where another has."""
        if self.is_taken:
            raise EnvError("these remote hosts have been given to a rollout already, expected others")
        self.is_taken = True

    def close(self) -> None:
        """Stop listening, and end the hosts that were started for it."""
        close_sockets(self.sockets)
        if self.supply is not None:
            self.supply.close()


class RemoteEnvs(RemoteHosts):
    """Environments on other hosts, `rollflow env-host` or an `EnvHost` there: the policy acts here.

    A `Rollout` takes hosts of environments with one agent, a `MultiAgentRollout` those of environments with several.
    """


class RemoteRollouts(RemoteHosts):
    """Whole rollouts on other hosts, `rollflow rollout-host` or a `RolloutHost` there: the policy acts there.

    It serves where a round trip for each step would take too long. Hosts are sent weights and what connectors have
    learnt, and send fragments. They must have the same connectors, and, unless that is the default one, the same
    module.
    """


def secret_bytes(secret: Secret) -> bytes | None:
    """A secret as it is used: text in UTF-8, without white space at its ends. Raises WireError for what can be none."""
    if not isinstance(secret, bytes | str | None):
        raise WireError(f"secret is of type {type(secret).__name__}, expected text or bytes", "secret")
    return secret.strip().encode() if isinstance(secret, str) else secret


def listen_on(address: Address) -> list[socket.socket]:
    """Sockets that listen on an address. Raises EnvError where that can't be."""
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
