"""`PolicyClient`: has a server of policies choose actions over a WebSocket, by connections that may break."""

import logging
import re
import secrets
import ssl
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from math import inf
from queue import Empty, SimpleQueue
from time import monotonic
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np

from rollflow.nodes.argument_checks import checked_number
from rollflow.nodes.policies.onnx_policy import DEFAULT_SESSION
from rollflow.nodes.policies.space_text import space_of
from rollflow.policy.serving.request import (
    PROTOCOL,
    ClosedError,
    OverloadedError,
    PartlyActedError,
    RequestError,
    ServingError,
    SessionLostError,
    UnansweredError,
    UnknownPolicyError,
    pack,
    unpack,
)
from rollflow.stream.data.closing import ClosedOnExit
from rollflow.stream.data.errors import RollflowError, WireError, shown
from rollflow.stream.data.system import require_packages
from rollflow.stream.data.tree import Tree, stack_trees, tree_at, with_tuples
from rollflow.stream.net.backoff import WaitReminder, pause_s
from rollflow.stream.net.endpoint import Secret, secret_bytes

with suppress(ImportError):  # which a client raises, not this module: `from rollflow import *` imports it
    from websockets.exceptions import InvalidMessage, InvalidStatus, WebSocketException
    from websockets.sync.client import ClientConnection, connect

SessionName = str | int
_log = logging.getLogger(__name__)
_PATH = "/v1/stream"
_LONGEST_PAUSE_S = 2.0
_CLOSE_S, _HANDSHAKE_S = 1.0, 10.0
_NO_TLS = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "HTTP_REQUEST")
_ERRORS = {
    kind.status: kind for kind in (RequestError, UnknownPolicyError, SessionLostError, OverloadedError, ClosedError)
}


class ServedPolicy(NamedTuple):
    """What a client knows of a policy that is served.

    version       that takes what begins
    has_memory    whether an action may depend on what came before in its session
    """

    observation_space: gym.Space[Any]
    action_space: gym.Space[Any]
    version: str
    has_memory: bool


@dataclass(eq=False, slots=True)
class _Session:
    """What a client knows of a session.

    has_begun    True: its next observation goes on with an episode
    is_lost      True: the answer to a request never came
    is_busy      True: a request is under way
    """

    has_begun: bool = False
    is_lost: bool = False
    is_busy: bool = False


class PolicyClient(ClosedOnExit):
    """Has policies act that `rollflow serve`, or an `HttpServer`, serves elsewhere. Takes the extra `serve`.

        address      of the server, `http://host:port` or `https://host:port`
        policy       the name of the policy that acts; None: the only one
        secret       the server's; None: it has none
        tls          a client's context for `https://`; None: one that trusts what the system trusts
        timeout      seconds that an answer is waited for, over as many connections as it takes
        heartbeat    seconds without a sign of the server's life, twice, after which it is dialled again

    It is called as a `Policy` is, from any number of threads. A session's first observation begins an episode, and so
    does the first one after `reset`. A connection that breaks is dialled again. A session with a memory whose request
    was under way is lost then, since nobody knows whether it was acted on: the request raises UnansweredError. Such a
    session, and one whose memory the server has lost, raises SessionLostError until it is `reset`.

    Raises WireError for an address that is none, if the server has another secret, and if it does not speak this
    version of the protocol; ServingError for what the server says of a request; UnansweredError if no answer comes
    in time.
    """

    def __init__(
        self,
        address: str,
        *,
        policy: str | None = None,
        secret: Secret = None,
        tls: ssl.SSLContext | None = None,
        timeout: float = 60.0,
        heartbeat: float = 20.0,
    ) -> None:
        require_packages("PolicyClient", "serve", "websockets", "websockets.sync.client", error=ImportError)
        if not re.fullmatch(r"https?://[^/\s]+/?", address):
            raise WireError(f"address {address!r}, expected 'http://host:port' or 'https://host:port'", "address")
        if tls is not None and not address.startswith("https"):
            raise WireError(f"address {address!r} with tls, expected 'https://host:port'", "tls")
        self.address, self.policy = address.rstrip("/"), policy
        self.timeout = checked_number("timeout", timeout, above=0, most=inf, noun="seconds")
        self._tls, self._heartbeat = tls, checked_number("heartbeat", heartbeat, above=0, most=inf, noun="seconds")
        known = secret_bytes(secret)
        self._headers = {} if known is None else {"Authorization": f"Bearer {known.decode('latin-1')}"}
        self._hello = {"hello": PROTOCOL, "client": secrets.token_hex(16)}
        self._changed = threading.Condition()  # of all that follows
        self._policies: dict[str, ServedPolicy] = {}
        self._sessions: dict[tuple[str, SessionName], _Session] = {}
        self._mail: dict[int, SimpleQueue[Any]] = {}  # by request: answers, errors; None: there is another connection
        self._last_number = 0
        self._socket: Any = None
        self._most_bytes = inf
        self._ending: Exception | None = None
        self._problem = ""
        self._thread = threading.Thread(target=self._run, name=f"rollflow client of {address}", daemon=True)
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
        fields: dict[str, Any] = {"observation": observation, "session": _plain(session)}
        if reward is not None:
            fields["reward"] = float(reward)
        with self._held(policy, [session], until) as (name, [held]):
            answer = self._asked({"policy": name, **fields, "begins": not held.has_begun}, until)
            held.has_begun = True
        return with_tuples(answer["action"])

    def act_batch(
        self,
        observations: Tree,
        rewards: Any = None,
        sessions: Sequence[SessionName | None] | None = None,
        *,
        policy: str | None = None,
    ) -> Tree:
        """The actions, any[N, ...], for one observation each of N environments, in one request.

            observations    any[N, ...]   a tree, as the environment's space has it; or a list of N of them
            rewards         f32[N]        for each session's action before, NaN for none; None: there are none
            sessions        N of them; None: 0 … N - 1
            policy          that is to act; None: the client's

        Raises ServingError: RequestError for what does not fit, SessionLostError for a session whose memory is gone,
        OverloadedError if too much waits at the server, PartlyActedError if only some observations have an
        action. Raises UnansweredError if no answer comes in time: the sessions are then lost.
        """
        until = monotonic() + self.timeout
        if isinstance(observations, list) and any(isinstance(each, dict | tuple) for each in observations):
            try:
                observations = stack_trees(observations)
            except ValueError as error:
                raise RequestError(f"the observations differ, expected those of one space: {error}") from None
        count = _count_of(observations)
        names = list(range(count) if sessions is None else sessions)
        if len(names) != count or not count:
            raise RequestError(f"{count} observations for {len(names)} sessions, expected one for each, at least one")
        fields: dict[str, Any] = {"observations": observations, "sessions": [_plain(each) for each in names]}
        if rewards is not None:
            fields["rewards"] = [None if np.isnan(each) else float(each) for each in rewards]
        with self._held(policy, names, until) as (name, held):
            fields["begins"] = [not each.has_begun for each in held]
            answer = self._asked({"policy": name, **fields}, until)
            places = answer["places"]
            for place in places:
                held[place].has_begun = True
        actions = with_tuples(answer["actions"])
        if refused := answer["refused"]:
            errors = {each["place"]: _error_of(each) for each in refused}
            if not places and len({(type(error), str(error)) for error in errors.values()}) == 1:
                raise next(iter(errors.values()))
            raise PartlyActedError({place: tree_at(actions, row) for row, place in enumerate(places)}, errors)
        return actions

    def reset(self, session: SessionName = DEFAULT_SESSION, *, policy: str | None = None) -> None:
        """Begin a new episode with the session's next observation."""
        name = self._resolved(policy, monotonic() + self.timeout)
        with self._changed:
            if (known := self._sessions.get((name, session))) is not None:
                known.has_begun = known.is_lost = False

    def forget(self, session: SessionName = DEFAULT_SESSION, *, policy: str | None = None) -> None:
        """Release the memory of a session whose environment is gone."""
        until = monotonic() + self.timeout
        name = self._resolved(policy, until)
        with self._changed:
            self._sessions.pop((name, session), None)
        self._asked({"policy": name, "forget": session}, until)

    # What there is

    @property
    def policies(self) -> Mapping[str, ServedPolicy]:
        """The policies that are served now, by name. Raises as `act` does."""
        until = monotonic() + self.timeout
        self._wait(lambda: bool(self._socket), until)
        self._take_welcome(self._asked(self._hello, until))
        return dict(self._policies)

    @property
    def observation_space(self) -> gym.Space[Any]:
        """Space of the observations that the client's policy takes."""
        return self.policies[self._resolved(None, monotonic() + self.timeout)].observation_space

    @property
    def action_space(self) -> gym.Space[Any]:
        """Space of the actions that the client's policy gives."""
        return self.policies[self._resolved(None, monotonic() + self.timeout)].action_space

    def close(self) -> None:
        """Say goodbye, which ends this client's sessions; requests under way raise ClosedError."""
        self._end(ClosedError("this client is closed"))
        if (socket := self._socket) is not None:
            socket.close()
        self._thread.join(_CLOSE_S)

    # Asking

    def _resolved(self, policy: str | None, until: float) -> str:
        """The name of the policy that is asked for."""
        name = self.policy if policy is None else policy
        self._wait(lambda: bool(self._policies), until)
        if name is not None and name not in self._policies:
            self._take_welcome(self._asked(self._hello, until))  # it may be new
        found = dict(self._policies)
        if name is None and len(found) == 1:
            name = next(iter(found))
        if name is None or name not in found:
            wanted = "policy is None" if name is None else f"there is no policy '{name}'"
            raise UnknownPolicyError(f"{wanted}, expected one of those that are served: {', '.join(found)}")
        return name

    @contextmanager
    def _held(
        self, policy: str | None, names: Sequence[SessionName | None], until: float
    ) -> Iterator[tuple[str, list[_Session]]]:
        """The policy's name and these sessions, once none has a request under way; no other call has them meanwhile."""
        name = self._resolved(policy, until)
        has_memory = self._policies[name].has_memory
        keys = [(name, each) for each in names if each is not None]
        if len(set(keys)) < len(keys):
            twice = next(key[1] for key in keys if keys.count(key) > 1)
            raise RequestError(f"session {twice!r} comes more than once in one call, expected each session once")
        sessions: list[_Session] = []
        with self._changed:
            self._wait(lambda: not any(self._sessions[key].is_busy for key in keys if key in self._sessions), until)
            for each in names:
                session = _Session() if each is None else self._sessions.setdefault((name, each), _Session())
                if session.is_lost:
                    raise SessionLostError(
                        f"session {each!r} is lost: an answer of it never came; expected reset({each!r}) before its "
                        "next observation"
                    )
                sessions.append(session)
            for session in sessions:
                session.is_busy = True
        try:
            yield name, sessions
        except BaseException as error:
            if not isinstance(error, ServingError) or isinstance(error, UnansweredError):
                for session in sessions:  # it may have been acted on
                    session.is_lost, session.has_begun = has_memory, True
            raise
        finally:
            with self._changed:
                for session in sessions:
                    session.is_busy = False
                self._changed.notify_all()

    def _asked(self, fields: Mapping[str, Any], until: float) -> dict[str, Any]:
        """The answer to a message, which is sent by one connection after another until it is there."""
        mail: SimpleQueue[Any] = SimpleQueue()
        with self._changed:
            if self._ending is not None:
                raise self._ending
            self._last_number += 1
            number, socket = self._last_number, self._socket
            self._mail[number] = mail
        try:
            try:
                message = pack({"id": number, **fields})
            except (TypeError, ValueError, OverflowError) as error:
                raise RequestError(str(error)) from None
            if len(message) > self._most_bytes:
                raise RequestError(f"the request has {len(message)} bytes, expected at most {self._most_bytes}")
            answer, is_sent = None, False
            while answer is None:
                if is_sent and self._has_memory(fields):
                    raise UnansweredError(self._server("lost the connection while a request was under way"))
                if socket is not None:
                    with suppress(WebSocketException, OSError):  # another connection comes
                        socket.send(message)
                        is_sent = True
                answer = self._next(mail, until)
                socket = self._socket
        finally:
            with self._changed:
                del self._mail[number]
        if isinstance(answer, Exception):
            raise answer
        if "error" in answer:
            raise _error_of(answer)
        return dict(answer)

    def _has_memory(self, fields: Mapping[str, Any]) -> bool:
        """True if what is asked for may change a session: it is not asked for by another connection again."""
        sessions = fields.get("sessions", [fields.get("session")])
        policy = self._policies.get(fields.get("policy", ""))  # which a server that was started anew may lack
        return policy is not None and policy.has_memory and any(each is not None for each in sessions)

    def _next(self, mail: "SimpleQueue[Any]", until: float) -> Any:
        """What comes of a request next. Raises UnansweredError if nothing comes in time."""
        patience = WaitReminder(until - monotonic())
        while True:
            try:
                return mail.get(timeout=patience.left)
            except Empty:
                self._check_patience(patience)

    def _wait(self, is_there: Callable[[], bool], until: float) -> None:
        """Wait until something is there. Raises what has ended the client, and UnansweredError if it is late."""
        patience = WaitReminder(until - monotonic())
        with self._changed:
            while self._ending is None and not is_there():
                self._changed.wait(patience.left)
                self._check_patience(patience)
            if self._ending is not None:
                raise self._ending

    def _check_patience(self, patience: WaitReminder) -> None:
        """Log that the server is waited for, if that is due. Raises UnansweredError if it is late."""
        if patience.is_over:
            raise UnansweredError(self._server(f"has not answered within {self.timeout:g} s"))
        if patience.is_long:
            state = "has not answered yet" if self._socket is not None else "is away"
            _log.warning("waiting for %.0f s: %s", patience.waited_s, self._server(state))

    def _server(self, text: str) -> str:
        problem = self._problem
        return f"the server at {self.address} {text}{problem and ': '}{problem}"

    def _end(self, error: Exception) -> None:
        """Have all requests raise an error from now on."""
        with self._changed:
            self._ending = self._ending or error
            for mail in self._mail.values():
                mail.put(self._ending)
            self._changed.notify_all()

    def _pause(self, failures: int) -> None:
        """Wait until it is time for another try, or the client ends."""
        with self._changed:
            self._changed.wait_for(lambda: self._ending is not None, pause_s(failures, _LONGEST_PAUSE_S))

    # In the thread

    def _run(self) -> None:
        failures = 0
        while self._ending is None:
            try:
                with self._dialled() as socket:
                    socket.send(pack(self._hello))
                    self._take_welcome(unpack(socket.recv(_HANDSHAKE_S, decode=False)))
                    failures = 0
                    self._read(socket)
            except RollflowError as error:  # to dial again is of no use
                self._end(error)
            except (WebSocketException, OSError, EOFError) as error:
                failures += 1
                before, self._problem = self._problem, getattr(error, "strerror", None) or str(error)
                if failures == 1 or self._problem != before:
                    _log.info("%s; it is dialled again", self._server("is away"))
                self._pause(failures)
            except (KeyError, TypeError, AttributeError) as error:
                self._end(WireError(self._server(f"sends what this client does not understand: {error!r}")))

    def _dialled(self) -> "ClientConnection":
        server = f"the server at {self.address}"
        heartbeat = None if self._heartbeat == inf else self._heartbeat
        try:
            return connect(
                f"ws{self.address.removeprefix('http')}{_PATH}",
                ssl=self._tls,
                additional_headers=self._headers,
                compression=None,
                proxy=None,
                max_size=None,
                open_timeout=_HANDSHAKE_S,
                close_timeout=_CLOSE_S,
                ping_interval=heartbeat,
                ping_timeout=heartbeat,
            )
        except InvalidStatus as error:
            status = error.response.status_code
            text = f"no {_PATH} there, expected `rollflow serve` as new as this client"
            if status == 404:
                raise WireError(f"{server} has {text}") from None
            if status in (401, 403):
                secret = "has another secret" if self._headers else "asks for a secret"
                raise WireError(f"{server} {secret}, or has {text}", "secret") from None
            raise
        except InvalidMessage:
            raise ConnectionError("it hangs up before it answers; expected https:// if it speaks TLS") from None
        except ssl.SSLError as error:
            if isinstance(error, ssl.SSLCertVerificationError) or error.reason in _NO_TLS:
                raise WireError(f"{server} can't be trusted, or speaks no TLS: {error}", "tls") from None
            raise

    def _take_welcome(self, welcome: Any) -> None:
        """Take the policies that are served."""
        if not isinstance(welcome, dict) or "error" in welcome or welcome.get("hello") != PROTOCOL:
            said = welcome.get("error", welcome) if isinstance(welcome, dict) else welcome
            raise WireError(f"the server at {self.address} refuses this client: {shown(said)}")
        policies = {}
        for name, plain in welcome["policies"].items():
            observed, chosen = (space_of(plain[each], each) for each in ("observation_space", "action_space"))
            policies[name] = ServedPolicy(observed, chosen, plain["version"], plain["has_memory"])
        with self._changed:
            self._policies, self._most_bytes = policies, welcome["max_bytes"]
            self._changed.notify_all()

    def _read(self, socket: "ClientConnection") -> None:
        """Hand out answers until the connection is lost."""
        try:
            with self._changed:
                if self._ending is not None:
                    return
                self._socket, self._problem = socket, ""
                for mail in self._mail.values():
                    mail.put(None)
                self._changed.notify_all()
            while True:
                answer = unpack(socket.recv(decode=False))
                if (asked := self._mail.get(answer.get("id"))) is not None:
                    asked.put(answer)
        finally:
            self._socket = None


def _error_of(answer: Mapping[str, Any]) -> ServingError:
    return _ERRORS.get(answer["status"], ServingError)(answer["error"])


def _plain(session: SessionName | None) -> SessionName | None:
    return int(session) if isinstance(session, np.integer) else session


def _count_of(observations: Any) -> int:
    """Length of the leading axis of observations any[N, ...]; 0 if there is none."""
    while isinstance(observations, Mapping | tuple):
        observations = next(iter(observations.values() if isinstance(observations, Mapping) else observations), None)
    return len(observations) if isinstance(observations, np.ndarray | list) and np.ndim(observations[:1]) else 0
