"""`PolicyServer`: serves a shelf of policies to `PolicyClient`s, by rollflow's own protocol."""

import ssl
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, Self

import numpy as np

from rollflow.nodes.env.remote.remote_envs import Secret, address_of, close_sockets, listen_on, secret_bytes
from rollflow.nodes.env.remote.software import software
from rollflow.policy.serving.items import check_items
from rollflow.policy.serving.request import Acted, ActRequest, ClientSession, Outcome, RequestError
from rollflow.policy.serving.shelf import Shelf
from rollflow.stream import wire
from rollflow.stream.data.errors import WireError, error_field
from rollflow.stream.data.space import describe_space
from rollflow.stream.data.tree import Tree, stack_trees, tree_at
from rollflow.stream.net.request_clients import (
    MOST_STRANGERS,
    ClientPeer,
    RequestClient,
    RequestClients,
    ServerOptions,
)
from rollflow.stream.net.socket_loop import SocketLoop
from rollflow.stream.net.transport import check_server_tls
from rollflow.stream.wire.codec.rows import check_numbers
from rollflow.stream.wire.codec.spaces import placed

SERVING_LIMITS = wire.Limits(max_frame=1 << 24, undelivered=1 << 25)
_TIDY_S = 5.0
_GOODBYE_S = 1.0
_DRAIN_S = 30.0


@dataclass(eq=False)
class _Pending:
    """A request whose observations are being acted on; `outcomes` has one for each place, None: it is under way."""

    client: RequestClient
    number: int
    outcomes: list[Outcome | None] = field(default_factory=list)
    left: int = 0


class PolicyServer:
    """Serves a shelf of policies to clients over TCP or a Unix socket, until it is closed.

        shelf          the policies
        listen         `tcp://host:port` or `unix:/path`; port 0: any that is free
        secret         that clients must know, and that is never sent; needed but on loopback and Unix sockets
        tls            a server's context; None: nothing is encrypted
        limits         of frames, times, and bytes that wait for a client; None: frames of 16 MiB
        max_clients    more are refused
        window         requests that a client may have under way

    Public attribute `address`: where it listens.

    A client that is cut off may come back within `limits.grace_s` seconds: its requests are then acted on once, and
    answered once. After that it is forgotten, and its sessions with it.

    Raises WireError for an address that is none, or not without a secret; EnvError where it can't be listened on.
    """

    def __init__(
        self,
        shelf: Shelf,
        listen: str,
        *,
        secret: Secret = None,
        tls: ssl.SSLContext | None = None,
        limits: wire.Limits | None = None,
        max_clients: int = 1024,
        window: int = 256,
    ) -> None:
        check_server_tls(tls)
        address, known = wire.parse_address(listen), secret_bytes(secret)
        wire.check_secret(address, known)
        self._shelf = shelf
        self._answered: deque[Sequence[tuple[tuple[_Pending, int], Outcome]]] = deque()  # by the threads that act
        self._policies: tuple[tuple[tuple[str, str], ...], dict[str, Any]] = (), {}
        self._closing = threading.Event()
        self._sockets = listen_on(address)
        self.address = str(address_of(self._sockets[0]))
        self._loop: SocketLoop[ClientPeer] = SocketLoop(self, max_strangers=MOST_STRANGERS)
        options = ServerOptions(
            known, tls, limits or SERVING_LIMITS, software(), wire.ServerConnection, max_clients, window
        )
        self._clients = RequestClients(
            self._loop, options, lambda client: self._shelf.forget_client(client.session.token)
        )
        self._loop.listen(self._sockets, options)
        self._threads = [
            threading.Thread(target=target, name=name, daemon=True)
            for target, name in ((self._run, "rollflow serves policies"), (self._tidy, "rollflow tidies policies"))
        ]
        for thread in self._threads:
            thread.start()

    @property
    def num_clients(self) -> int:
        """Clients that are there, or may come back."""
        return len(self._clients)

    def close(self) -> None:
        """Answer what was taken, say goodbye, and close the sockets."""
        self._closing.set()
        self._loop.wakeup.ring()
        for thread in self._threads:
            thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def deliver(self, outcomes: Sequence[tuple[tuple[_Pending, int], Outcome]]) -> None:
        """Take answers from a thread that acts."""
        self._answered.append(outcomes)
        self._loop.wakeup.ring()

    # In the thread that serves

    def _run(self) -> None:
        try:
            while not self._closing.is_set():
                self._turn(None)
            self._loop.stop_listening()
            until = monotonic() + _DRAIN_S
            while any(each.session.num_under_way for each in self._clients) and monotonic() < until:
                self._turn(until)  # requests that come now are another server's
            for peer in self._loop.peers:
                peer.connection.goodbye("the server is closing")
            until = monotonic() + _GOODBYE_S
            while any(peer.client is not None for peer in self._loop.peers) and monotonic() < until:
                self._turn(until)
        finally:
            for peer in self._loop.peers:
                self._loop.drop(peer)
            self._loop.close()
            close_sockets(self._sockets)

    def _turn(self, until: float | None) -> None:
        """Tell what is new, wait until there is something to do, and do it."""
        versions = tuple((name, self._shelf.newest(name).version) for name in self._shelf.names)
        if self._policies[0] != versions:
            self._policies = versions, {name: self._described(name) for name in self._shelf.names}
            self._loop.send(self._tell)
        ready = self._loop.wait_until(until, self._clients.due)
        now = monotonic()
        self._loop.serve(ready, now)
        self._loop.tick(now)
        while self._answered:
            for (pending, place), outcome in self._answered.popleft():
                pending.outcomes[place] = outcome
                self._settle(pending, 1)
        self._clients.tick(now)

    def _tell(self, peer: ClientPeer) -> None:
        """Tell a client which policies there are."""
        if peer.client is not None and peer.connection.phase is wire.ConnectionPhase.RUNNING:
            peer.connection.tell(wire.Settings({"policies": self._policies[1]}))

    def _described(self, name: str) -> dict[str, Any]:
        newest = self._shelf.newest(name)
        spaces = newest.policy.observation_space, newest.policy.action_space
        return {
            "observation_space": describe_space(spaces[0]),
            "action_space": describe_space(spaces[1]),
            "version": newest.version,
            "has_memory": newest.has_memory,
        }

    def _take(self, client: RequestClient, act: wire.Act) -> None:
        """Have the observations of a request acted on."""
        count = len(act.sessions)
        pending = _Pending(client, act.number, [None] * count, count)
        try:
            rewards, observations = self._checked(act)
        except Exception as error:
            pending.outcomes = [error] * count
            self._settle(pending, count)
            return
        for place, name in enumerate(act.sessions):
            session = None if name is None else ClientSession(client.session.token, name)
            ticket = pending, place
            begins, reward = bool(act.begins[place]), float(rewards[place])
            request = ActRequest(session, tree_at(observations, place), reward, begins, None, self, ticket)
            try:
                self._shelf.submit(act.policy, request, act.version)
            except Exception as error:
                pending.outcomes[place] = error
                self._settle(pending, 1)

    def _checked(self, act: wire.Act) -> tuple[Any, Tree]:
        """Rewards f32[N] and observations any[N, ...] of a request. Raises RequestError, UnknownPolicyError."""
        count = len(act.sessions)
        policy = self._shelf.newest(act.policy).policy
        rewards = np.full(count, np.nan, np.float32) if act.rewards is None else act.rewards
        for name, column in (("begins", act.begins), ("rewards", rewards)):
            if len(column) != count:
                raise RequestError(f"{name} has {len(column)} entries, expected {count}, one for each session")
        if np.isinf(rewards).any():
            raise RequestError("rewards has an infinite one, expected finite numbers, or NaN for none")
        try:
            observations = placed(act.obs, policy.observation_space, count, "obs", "request")
            check_numbers(observations, range(count), "obs", "observation")
        except WireError as error:
            raise RequestError(str(error)) from None
        check_items(policy.observation_space, observations, "obs")
        return rewards, observations

    def _settle(self, pending: _Pending, count: int) -> None:
        """Note that so many more observations of a request have their outcome; answer it where all have."""
        pending.left -= count
        if pending.left:
            return
        acted = _answer_of(pending.number, pending.outcomes)
        count = len(pending.outcomes)
        self._clients.answer(pending.client, acted, lambda error: _answer_of(pending.number, [error] * count))

    # What the loop asks for

    def handle(self, peer: ClientPeer, event: wire.Message, now: float) -> None:
        """Take a message of a client."""
        client = self._clients.take(peer, event)
        if client is None:
            return
        if isinstance(event, wire.Hello):
            self._tell(peer)
        elif isinstance(event, wire.Act):
            self._take(client, event)
        elif isinstance(event, wire.Release):
            for name in event.sessions:
                if event.policy in self._shelf.names:
                    self._shelf.forget(event.policy, ClientSession(client.session.token, name))

    def fail(self, peer: ClientPeer, error: Exception, now: float) -> None:
        """Refuse a client that something has failed for; it may come back."""
        self._clients.fail(peer, error, now)

    def _tidy(self) -> None:
        while not self._closing.wait(_TIDY_S):
            self._shelf.tidy()


def _answer_of(number: int, outcomes: Sequence[Outcome | None]) -> wire.Acted:
    """The answer to a request with these outcomes, one for each observation."""
    acted = [(place, each) for place, each in enumerate(outcomes) if isinstance(each, Acted)]
    refused = [
        [place, getattr(each, "status", 500), error_field(each)]
        for place, each in enumerate(outcomes)
        if isinstance(each, Exception)
    ]
    if len(refused) == len(outcomes) and len({text for _, _, text in refused}) == 1:
        refused = [[None, *refused[0][1:]]]
    actions = stack_trees([each.action for _, each in acted]) if acted else None
    versions, weights = tuple(each.version for _, each in acted), tuple(each.weights for _, each in acted)
    return wire.Acted(number, tuple(place for place, _ in acted), actions, versions, weights, tuple(refused))
