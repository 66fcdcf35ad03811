"""Dialogue with a host that is being checked, frame by frame: what is sent need not be right."""

import secrets
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Any

import gymnasium as gym
from gymnasium.vector.utils import batch_space

from rollflow.stream.data.space import space_of
from rollflow.stream.data.tree import Tree, map_tree
from rollflow.stream.net.transport import TLS_BEGINS, tls_problem
from rollflow.stream.wire import (
    NONCE_BYTES,
    AgentForm,
    AgentRows,
    ConnectionBroken,
    Failed,
    FrameDecoder,
    GatewayConnection,
    GatewaySession,
    Hello,
    Limits,
    Message,
    Refused,
    Reset,
    Rows,
    Step,
    decode,
    encode,
)
from rollflow.stream.wire.session import form_of

_TLS_S = 10.0  # how long it may take to agree on how to encrypt

Opened = Callable[[], socket.socket]  # a new connection to the host, blocking


class ProtocolViolation(Exception):
    """Raised when a host does something else than the protocol says."""


class HostDialogue:
    """Connections with one host.

    opened        gives a new connection to it
    secret        shared by both; None: there is none
    patience_s    how long an answer may take
    role          the host's, as it said in the last handshake
    """

    def __init__(self, opened: Opened, secret: bytes | None, patience_s: float) -> None:
        self.opened, self.secret, self.patience_s = opened, secret, patience_s
        self.role = ""

    @contextmanager
    def begun(self, session: GatewaySession | None = None) -> Iterator["RawConnection"]:
        """A connection after its handshake, with a new session or one that goes on."""
        with self.opened() as sock:
            sock.settimeout(self.patience_s)
            yield RawConnection(self.shaken(sock, session), sock)

    def shaken(self, sock: socket.socket, session: GatewaySession | None) -> GatewaySession:
        """Go through the handshake. Raises ProtocolViolation where the host does something else."""
        gateway = GatewayConnection(
            software="rollflow check-host",
            nonce=secrets.token_bytes(NONCE_BYTES),
            secret=self.secret,
            limits=Limits(),
            now=monotonic(),
        )
        hello: Hello | None = None
        while hello is None:
            for event in _received(sock, gateway, "the handshake"):
                if isinstance(event, Hello):
                    hello = event
        self.role = hello.role
        if session is None:
            lanes = range(10, 10 + len(hello.slots))
            session = GatewaySession(hello.session, hello, lanes, hello.first_slots(0))
        gateway.welcome(session)
        _flush(sock, gateway)
        return session


class RawConnection:
    """Connection after its handshake, frame by frame: what is sent need not be right.

    The answer to a request that was under way when the session's last connection ended may come twice: at once after
    the welcome, and for the request that was sent again.
    """

    def __init__(self, session: GatewaySession, sock: socket.socket) -> None:
        self.session, self.sock = session, sock
        self._sent_again = {(request.lane, request.number) for request in session.under_way}
        self.hello = session.hello
        self.lane = session.lanes[0]
        self.form = form_of(self.hello)
        self._decoder = FrameDecoder(Limits().max_frame)
        self._waiting: list[Message] = []

    @property
    def slots(self) -> int:
        """Environments of the first lane."""
        return self.session.slots_of(self.lane)

    def send(self, message: Message) -> None:
        """Send a message as it is."""
        self.sock.sendall(b"".join(encode(message)))

    def next(self, what: str) -> Message:
        """The next message. Raises ProtocolViolation where none comes."""
        while not self._waiting:
            data = _data(self.sock, what)
            if not data:
                raise ProtocolViolation(f"closed the connection, expected {what}")
            self._waiting += [decode(frame) for frame in self._decoder.feed(data)]
        return self._waiting.pop(0)

    def expect(self, kind: type[Message], what: str) -> Any:
        """The next message, of this kind. Raises ProtocolViolation for another."""
        message = self.next(what)
        if not isinstance(message, kind):
            raise ProtocolViolation(f"sent {shown(message)}, expected {what}")
        return message

    def ask(self, request: Reset | Step) -> Rows | AgentRows:
        """Send a valid request: its answer. Raises ProtocolViolation where that fails, or does not fit."""
        self.put(request)
        return self.answer_to(request)

    def put(self, request: Reset | Step) -> None:
        """Send a valid request, whose answer is waited for from now on."""
        self.session.ask(request)
        self.send(request)

    def answer_to(self, request: Reset | Step) -> Rows | AgentRows:
        """The next message, as the answer to this; one that came before and may come twice is dropped."""
        kind: Any = AgentRows if self.hello.role == "agents" else Rows
        answer = self._next_answer(kind, request)
        if (answer.lane, answer.number) in self._sent_again and self.session.asked(answer) is None:
            self._sent_again.remove((answer.lane, answer.number))
            answer = self._next_answer(kind, request)
        if (answer.lane, answer.number) != (request.lane, request.number):
            raise ProtocolViolation(
                f"sent {shown(answer)} of lane {answer.lane}, expected that of lane {request.lane}, "
                f"number {request.number}"
            )
        if isinstance(answer, Failed):
            raise ProtocolViolation(f"failed at {request.kind} {request.number}: {answer.type}: {answer.text}")
        rows: Rows | AgentRows = self.form.check_rows(answer, request, self.session.slots_of(request.lane))
        if self.session.asked(answer) is not None:
            self.session.take(rows)
        return rows

    def _next_answer(self, kind: Any, request: Reset | Step) -> Any:
        return self.expect(kind | Failed, f"{kind.kind} for {request.kind} {request.number}")

    def reset(self, seed: int = 1, lane: int | None = None) -> Rows | AgentRows:
        """Reset a lane with seeds."""
        lane = self.lane if lane is None else lane
        return self.ask(self.reset_request(seed, lane))

    def reset_request(self, seed: int, lane: int) -> Reset:
        """Request for the reset of a lane with seeds."""
        seeds = tuple(seed + slot for slot in range(self.session.slots_of(lane)))
        return Reset(lane, self.session.next_number(lane), seeds, None)

    def step(self, actions: Tree) -> Rows | AgentRows:
        """Step the first lane, with the actions of those agents that are to act."""
        return self.ask(self.step_request(actions))

    def step_request(self, actions: Tree) -> Step:
        """Request for a step of the first lane."""
        number, turns = self.session.next_number(self.lane), self.session.turns_of(self.lane)
        if turns is None:
            return Step(self.lane, number, actions)
        acting = turns.acting
        theirs = [
            map_tree(lambda leaf, slots=slots: leaf[slots], part) for part, slots in zip(actions, acting, strict=True)
        ]
        return Step(self.lane, number, theirs, acting)

    def actions(self, count: int) -> list[Tree]:
        """So many actions for all slots of the first lane, and all their agents, the same for every run."""
        if isinstance(self.form, AgentForm):
            sizes = [self.slots * size for size in self.form.sizes]
            parts = [batch_space(space, size) for space, size in zip(self.form.action_spaces, sizes, strict=True)]
            space: gym.Space[Any] = gym.spaces.Tuple(parts)
        else:
            space = batch_space(space_of(dict(self.hello.action_space)), self.slots)
        space.seed(7)
        return [space.sample() for _ in range(count)]

    def refused(self, code: str, why: str) -> None:
        """Expect the host to refuse with this code and to close. Raises ProtocolViolation where it does not."""
        refusal = self.expect(Refused, f"refused with the code '{code}', after {why}")
        if refusal.code != code:
            raise ProtocolViolation(
                f"refused with the code '{refusal.code}' ({refusal.text}), expected '{code}', after {why}"
            )
        self.closed(f"the connection closed after {why}")

    def closed(self, what: str) -> None:
        """Expect the host to close the connection. Raises ProtocolViolation where it does not."""
        if self._waiting or _data(self.sock, what):
            raise ProtocolViolation(f"sent more, expected {what}")


def shown(message: Message) -> str:
    """A message, for people."""
    reason = f" '{message.code}' ({message.text})" if isinstance(message, Refused) else ""
    number = getattr(message, "number", None)
    return f"{message.kind}{'' if number is None else f' {number}'}{reason}"


def encrypted(sock: socket.socket, tls: ssl.SSLContext, *, is_server: bool, name: str | None = None) -> ssl.SSLSocket:
    """Connection with TLS, which takes the socket over. Raises ProtocolViolation where both ends can't agree on it.

    name    name that a client expects in the certificate
    """
    sock.settimeout(_TLS_S)
    try:
        return tls.wrap_socket(sock, server_side=is_server, server_hostname=name)
    except TimeoutError:
        problem = f"sent nothing for {_TLS_S:g} s, expected TLS"
    except ConnectionError:
        problem = "closed the connection, expected TLS"
    except ssl.SSLError as error:
        problem = f"did not agree on TLS: {tls_problem(error)}"
        if error.reason == "WRONG_VERSION_NUMBER":
            problem = "speaks no TLS, expected it to"
    sock.close()
    raise ProtocolViolation(problem)


def _received(sock: socket.socket, gateway: GatewayConnection, what: str) -> list[Any]:
    data = _data(sock, what)
    if gateway.is_new and data and data[0] in TLS_BEGINS:
        raise ProtocolViolation("speaks TLS, expected it not to")
    events = gateway.receive(data, monotonic()) if data else gateway.ended()
    _flush(sock, gateway)
    for event in events:
        if isinstance(event, ConnectionBroken):
            raise event.error
    return list(events)


def _flush(sock: socket.socket, gateway: GatewayConnection) -> None:
    for buffer in gateway.outgoing():
        sock.sendall(buffer)


def _data(sock: socket.socket, what: str) -> bytes:
    """The next bytes; none where the other end has closed."""
    try:
        return sock.recv(1 << 16)
    except TimeoutError:
        raise ProtocolViolation(f"sent nothing for {sock.gettimeout():g} s, expected {what}") from None
    except ConnectionError:
        return b""
    except ssl.SSLError as error:
        raise ProtocolViolation(f"did not agree on TLS: {tls_problem(error)}") from None
