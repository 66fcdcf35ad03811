"""Follower of a trainer: it takes the newest weights, and sends nothing."""

import secrets
import socket
import ssl
from collections.abc import Callable, Mapping
from typing import Any, Self

from gymnasium import spaces

from rollflow.nodes.env.remote.remote_envs import Secret
from rollflow.sinks.trainer.resend_buffer import ResendBuffer
from rollflow.sinks.trainer.uplink import TrainerUplink, link_to, source_hello
from rollflow.stream import wire
from rollflow.stream.data.space import describe_space

NOTHING = "nothing"  # what a follower sends


class WeightsFollower:
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
        link = link_to(address, secret, tls, limits)
        self._take, self._name = take, socket.gethostname() if name is None else name
        self._session = wire.SourceSession(secrets.token_bytes(wire.SESSION_BYTES))
        self._uplink = TrainerUplink(link, self._hello, self._session, ResendBuffer(1), self._taken)
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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # In the thread

    def _taken(self, version: int, weights: Mapping[str, Any]) -> bool:
        self._take(version, weights)
        return True

    def _hello(self) -> wire.Hello:
        space = describe_space(spaces.Discrete(1))  # nobody looks at it
        details: dict[str, Any] = {"observation_space": space, "action_space": space, "metadata": {"sends": NOTHING}}
        return source_hello(self._uplink.link, self._session, self._name, slots=(1,), **details)
