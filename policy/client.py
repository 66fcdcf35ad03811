"""`PolicyClient`: has a server of policies choose actions, over connections that may break."""

import logging
import secrets
import socket
import ssl
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from time import monotonic
from typing import Any, Self

import gymnasium as gym
import numpy as np

from rollflow.nodes.env.remote.remote_envs import Secret, check_tls, secret_bytes
from rollflow.nodes.env.remote.software import software
from rollflow.policy.served_policy import ServedPolicy, actions_of, count_of, policy_of
from rollflow.policy.serving.items import item_from
from rollflow.policy.serving.request import (
    ClosedError,
    RequestError,
    SessionLostError,
    UnansweredError,
    UnknownPolicyError,
)
from rollflow.stream import wire
from rollflow.stream.data.errors import WireError
from rollflow.stream.data.tree import Tree, map_tree, tree_at
from rollflow.stream.net.dialler import Dialled
from rollflow.stream.net.socket_loop import SocketLoop
from rollflow.stream.net.sockets import Peer
from rollflow.stream.net.transport import transport_for

logger = logging.getLogger(__name__)

DEFAULT_SESSION = "default"
CLIENT_LIMITS = wire.Limits(max_frame=1 << 26, undelivered=1 << 27)
# Codes of errors after which the server is dialled again.
_COMES_BACK = ("lost", "silent", "undelivered", "handshake", "busy", "session")
SessionName = str | int
_Key = tuple[str, SessionName]  # a policy's name, and a session's


class PolicyClient:
    """Has policies act that a `PolicyServer`, or `rollflow serve --listen`, serves elsewhere.

        address    of the server, `tcp://host:port` or `unix:/path`
        policy     the name of the policy that acts; None: the only one
        secret     the server's; None: it has none
        tls        a client's context; None: nothing is encrypted
        timeout    seconds that an answer is waited for, over as many connections as it takes
        name       what the server calls this client; None: the machine's name
        limits     of frames, times and bytes under way

    It is called as a `Policy` is, from any number of threads. A session's first observation begins an episode, and so
    does the first one after `reset`. A connection that breaks is dialled again; a request that was under way is acted
    on once, and answered once. A session whose memory the server has lost, since it was started anew or away for too
    long, raises SessionLostError until it is `reset`.

    Raises WireError for an address that is none, where the server refuses this client, and where it does not know the
    secret; ServingError for what the server says of a request; UnansweredError where no answer comes in time.
    """

    def __init__(
        self,
        address: str,
        *,
        policy: str | None = None,
        secret: Secret = None,
        tls: ssl.SSLContext | None = None,
        timeout: float = 60.0,
        name: str | None = None,
        limits: wire.Limits | None = None,
    ) -> None:
        target, self._secret = wire.parse_address(address), secret_bytes(secret)
        wire.check_secret(target, self._secret)
        check_tls(target, tls)
        self.address, self.policy, self.timeout = str(target), policy, timeout
        self._tls, self._limits = tls, limits or CLIENT_LIMITS
        self._name = socket.gethostname() if name is None else name
        self._policies: dict[str, ServedPolicy] = {}
        self._session = wire.ClientSession(secrets.token_bytes(wire.SESSION_BYTES))
        self._futures: dict[int, Future[wire.Acted]] = {}
        self._begun: set[_Key] = set()  # sessions whose next observation goes on with an episode
        self._unknown: set[_Key] = set()  # sessions with a request whose answer never came
        self._fatal: Exception | None = None
        self._is_closing = False
        self._loop: SocketLoop[Peer[wire.ClientConnection]] = SocketLoop(self)
        self._loop.dial([target], self)
        self._changed = threading.Condition(self._loop.lock)  # of all of the above
        self._thread = threading.Thread(target=self._run, name=f"rollflow client of {target}", daemon=True)
        self._thread.start()

    # Acting

    def act(
        self,
        observation: Tree,
        reward: float | None = None,
        session: SessionName | None = DEFAULT_SESSION,
        *,
        policy: str | None = None,
    ) -> Any:
        """The action for one observation, `any[...]`, of one environment.

            observation    in the environment's space
            reward         for the session's action before; None: none is there
            session        whose memory acts; None: the observation stands by itself
            policy         that is to act; None: the client's

        Returns an item of the action space. Raises as `act_batch` does.
        """
        until = monotonic() + self.timeout
        name, served = self._served(policy, until)
        item = item_from(served.observation_space, observation, "observation")
        rows = map_tree(lambda leaf: np.array(leaf)[None], item)
        rewards = None if reward is None else np.array([reward], np.float32)
        acted = self._asked(name, [session], rows, rewards, until)
        return tree_at(actions_of(acted, served.action_space, 1), 0)

    def act_batch(
        self,
        observations: Tree,
        rewards: Any = None,
        sessions: Sequence[SessionName | None] | None = None,
        *,
        policy: str | None = None,
    ) -> Tree:
        """The actions, any[N, ...], for one observation each of N environments, in one request.

            observations    any[N, ...]   a tree, as the environment's space has it
            rewards         f32[N]        for each session's action before, NaN for none; None: there are none
            sessions        N of them; None: 0 … N - 1
            policy          that is to act; None: the client's

        Raises ServingError: RequestError for what does not fit, SessionLostError for a session whose memory is gone,
        OverloadedError where too much waits at the server, PartlyActedError where only some observations have an
        action. Raises UnansweredError where no answer comes in time: the sessions are then lost.
        """
        until = monotonic() + self.timeout
        name, served = self._served(policy, until)
        count = count_of(observations)
        names = list(range(count)) if sessions is None else list(sessions)
        if len(names) != count or not count:
            raise RequestError(f"{count} observations for {len(names)} sessions, expected one for each, at least one")
        rows = item_from(served.observation_space, observations, "observations", (count,))  # a copy
        acted = self._asked(name, names, rows, None if rewards is None else np.asarray(rewards, np.float32), until)
        return actions_of(acted, served.action_space, count)

    def reset(self, session: SessionName = DEFAULT_SESSION, *, policy: str | None = None) -> None:
        """Begin a new episode with the session's next observation."""
        key = self._name_of(policy, monotonic() + self.timeout), session
        with self._changed:
            self._begun.discard(key)
            self._unknown.discard(key)

    def forget(self, session: SessionName = DEFAULT_SESSION, *, policy: str | None = None) -> None:
        """Release the memory of a session whose environment is gone."""
        name = self._name_of(policy, monotonic() + self.timeout)
        self.reset(session, policy=name)
        with self._changed:
            for peer in self._loop.peers:
                if peer.connection.phase is wire.ConnectionPhase.RUNNING:
                    peer.connection.tell(wire.Release(name, (session,)))
                    self._loop.peers.write(peer)

    # What there is

    @property
    def policies(self) -> Mapping[str, ServedPolicy]:
        """The policies that are served, by name; waits until the server has said so. Raises as `act` does."""
        until = monotonic() + self.timeout
        with self._changed:
            self._wait(until, lambda: bool(self._policies))
            return dict(self._policies)

    @property
    def observation_space(self) -> gym.Space[Any]:
        """Space of the observations that the client's policy takes."""
        return self._served(None, monotonic() + self.timeout)[1].observation_space

    @property
    def action_space(self) -> gym.Space[Any]:
        """Space of the actions that the client's policy gives."""
        return self._served(None, monotonic() + self.timeout)[1].action_space

    def close(self) -> None:
        """Say goodbye, which ends this client's sessions; requests under way raise ClosedError."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        self._loop.wakeup.ring()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Asking

    def _name_of(self, policy: str | None, until: float) -> str:
        name = self.policy if policy is None else policy
        return self._served(None, until)[0] if name is None else name

    def _served(self, policy: str | None, until: float) -> tuple[str, ServedPolicy]:
        name = self.policy if policy is None else policy
        with self._changed:
            self._wait(until, lambda: bool(self._policies))
            found = dict(self._policies)
        if name is None and len(found) == 1:
            name = next(iter(found))
        if name is None or name not in found:
            wanted = "policy is None" if name is None else f"there is no policy '{name}'"
            raise UnknownPolicyError(f"{wanted}, expected one of those that are served: {', '.join(found)}")
        return name, found[name]

    def _asked(
        self, policy: str, names: Sequence[SessionName | None], rows: Tree, rewards: Any, until: float
    ) -> wire.Acted:
        """The answer to a request."""
        keys = [(policy, name) for name in names if name is not None]
        future: Future[wire.Acted] = Future()
        with self._changed:
            self._wait(until, lambda: self._session.may_ask)
            for key in keys:
                if key in self._unknown:
                    raise SessionLostError(
                        f"session {key[1]!r} is lost: an answer of it never came; expected reset({key[1]!r}) before "
                        "its next observation"
                    )
            begins = np.array([name is None or (policy, name) not in self._begun for name in names], np.bool_)
            number = self._session.number + 1
            act = wire.Act(number, self._session.done, policy, None, tuple(names), begins, rewards, rows)
            self._futures[number] = future
            self._send(act)
        try:
            acted = future.result(max(0.0, until - monotonic()))
        except TimeoutError:
            with self._changed:
                self._session.drop(number)
                self._unknown.update(keys)
                raise self._unanswered() from None
        finally:
            self._futures.pop(number, None)
        with self._changed:
            self._begun.update((policy, name) for name in (names[place] for place in acted.places) if name is not None)
        return acted

    def _send(self, act: wire.Act) -> None:
        """Send a request by the connection that there is, or have the next one send it."""
        peer = next((each for each in self._loop.peers if each.connection.is_open), None)
        if peer is None or peer.connection.phase is not wire.ConnectionPhase.RUNNING:
            self._session.ask(act)
            return
        try:
            peer.connection.ask(act)
        except WireError as error:
            if error.code != "undelivered":
                raise
            self._loop.fail(peer, error, monotonic())
        self._loop.peers.write(peer)
        self._loop.wakeup.ring()  # for what the socket has not taken, and the next heartbeat

    def _wait(self, until: float, is_there: Any) -> None:
        """Wait, with the lock held, until something is there. Raises UnansweredError, ClosedError, or what is fatal."""
        while not is_there() or self._fatal is not None or self._is_closing:
            if self._fatal is not None:
                raise self._fatal
            if self._is_closing:
                raise ClosedError("this client is closed")
            if not self._changed.wait(max(0.0, until - monotonic())):
                raise self._unanswered()

    def _unanswered(self) -> UnansweredError:
        problems = "; ".join(self._loop.dialler.problems)
        return UnansweredError(
            f"{self.address} has not answered within {self.timeout:g} s{': ' if problems else ''}{problems}"
        )

    # In the thread

    def _run(self) -> None:
        try:
            self._loop.tick(monotonic())
            while not self._is_closing and self._fatal is None:
                ready = self._loop.wait_until(monotonic() + 1.0 if self._is_away else None)
                now = monotonic()
                self._loop.serve(ready, now)
                self._loop.tick(now)
        except Exception as error:
            self._fatal = error
        with self._changed:
            ending = self._fatal or ClosedError("this client is closed")
            for future in self._futures.values():
                if not future.done():
                    future.set_exception(ending)
            for peer in self._loop.peers:
                peer.connection.goodbye("the client is closed")
                self._loop.drop(peer)
            self._changed.notify_all()
        self._loop.close()

    @property
    def _is_away(self) -> bool:
        return not any(peer.connection.is_open for peer in self._loop.peers)

    # What the loop asks for

    def greet(
        self, sock: socket.socket, where: str, now: float, dialled: Dialled | None
    ) -> Peer[wire.ClientConnection]:
        """Peer of a socket with a server at its other end, which is told hello."""
        assert dialled is not None
        hello = wire.Hello(
            versions=(wire.VERSION, wire.VERSION),
            role="client",
            software=software(),
            name=self._name[:256],
            nonce=secrets.token_bytes(wire.NONCE_BYTES),
            session=self._session.token,
            max_frame=self._limits.max_frame,
            slots=(1,),
            observation_space={},
            action_space={},
            autoreset="DISABLED",
            metadata={},
        )
        connection = wire.ClientConnection(hello, self._session, secret=self._secret, limits=self._limits, now=now)
        transport = transport_for(sock, connection, self._tls, dialled=dialled.address)
        return Peer(transport, connection, where, dialled=dialled)

    def handle(self, peer: Peer[wire.ClientConnection], event: wire.Message, now: float) -> None:
        """Take a message of the server."""
        if isinstance(event, wire.Acted):
            future = self._futures.get(event.number)
            if future is not None and not future.done():
                future.set_result(event)
            with self._changed:
                self._changed.notify_all()
        elif isinstance(event, wire.Settings):
            policies = {name: policy_of(name, plain) for name, plain in event.settings.get("policies", {}).items()}
            with self._changed:
                self._policies = policies
                self._changed.notify_all()
        elif isinstance(event, wire.Welcome):
            self._loop.dialler.welcomed(peer.dialled)
            with self._changed:
                self._changed.notify_all()
        elif isinstance(event, wire.Goodbye):
            logger.info("%s says goodbye: %s", peer.where, event.reason)
            self._loop.drop(peer)

    def fail(self, peer: Peer[wire.ClientConnection], error: Exception, now: float) -> None:
        """Have the server dialled again, or end where that is of no use."""
        if isinstance(error, WireError) and error.code in _COMES_BACK:
            if peer.dialled is not None:
                peer.dialled.problem = str(error)
            peer.connection.refuse(error.code, str(error))
            logger.info("%s: %s; it is dialled again", peer.where, error)
        else:
            peer.connection.refuse(getattr(error, "code", "message"), str(error))
            self._fatal = error
