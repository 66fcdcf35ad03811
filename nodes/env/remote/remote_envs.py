"""Hosts as a user names them to a rollout whose environments, or all of it, are on other hosts."""

import socket
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from rollflow.stream.data.closing import closing_on_error
from rollflow.stream.data.errors import EnvError
from rollflow.stream.net.endpoint import Endpoint, Secret, address_of, close_sockets, endpoint_at, listen_on
from rollflow.stream.wire import Address, Limits

if TYPE_CHECKING:
    from rollflow.nodes.launch.on_hosts import HostKeeper


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

        Raises WireError for an address that is none, or not without a secret; EnvError if it can't be listened on.
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
        """Say that a rollout has it. Raises EnvError if another has."""
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

    It serves if a round trip for each step would take too long. Hosts are sent weights and what connectors have
    learnt, and send fragments. They must have the same connectors, and, unless that is the default one, the same
    module.
    """
