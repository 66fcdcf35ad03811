"""Checks that a host keeps to the protocol, each in a connection of its own."""

import secrets
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from time import monotonic
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector.utils import batch_space

from rollflow.stream import wire
from rollflow.stream.data.closing import ClosedOnExit, closing_on_error
from rollflow.stream.data.errors import WireError
from rollflow.stream.data.space import space_of
from rollflow.stream.data.tree import Tree, leaves_of, map_tree
from rollflow.stream.net.transport import TLS_BEGINS
from rollflow.stream.wire.session import form_of

Opened = Callable[[], socket.socket]  # a new connection to the host, blocking


class RawConnection(ClosedOnExit):
    """Connection with a host: the handshake as a gateway has it, then message by message: what is sent may be wrong.

    opened        gives a new connection to the host
    secret        shared by both; None: there is none
    patience_s    how long an answer may take
    session       that goes on, whose requests under way are asked again; None: a new one

    Raises WireError if the host does something else in the handshake.
    """

    def __init__(
        self, opened: Opened, secret: bytes | None, patience_s: float, session: wire.GatewaySession | None = None
    ) -> None:
        self.secret, self._opened, self._patience_s = secret, opened, patience_s
        self._decoder = wire.FrameDecoder(wire.Limits().max_frame)
        self._waiting: list[wire.Message] = []
        gateway = wire.GatewayConnection(
            software="rollflow check-host", secret=secret, limits=wire.Limits(), now=monotonic()
        )
        self.sock = opened()
        with closing_on_error(self.close):
            self.sock.settimeout(patience_s)
            events: list[Any] = []
            while not events:
                data = self._data("the handshake")
                if gateway.is_new and data[0] in TLS_BEGINS:
                    raise WireError("speaks TLS, expected it not to")
                events = gateway.receive(data, monotonic())
                self.sock.sendall(b"".join(gateway.outgoing()))
            if isinstance(events[0], WireError):
                raise events[0]
            self.hello: wire.Hello = events[0]
            lanes = range(10, 10 + len(self.hello.slots))
            self.session = session or wire.GatewaySession(
                self.hello.session, self.hello, lanes, self.hello.first_slots(0)
            )
            gateway.welcome(self.session)
            self.sock.sendall(b"".join(gateway.outgoing()))
        self._form, self.lane = form_of(self.hello), self.session.lanes[0]

    def again(self, session: wire.GatewaySession | None = None, secret: bytes | None = None) -> "RawConnection":
        """Close this connection; another one, with a new session or one that goes on, and a secret if it is another."""
        self.close()
        return RawConnection(self._opened, secret or self.secret, self._patience_s, session)

    def close(self) -> None:
        """Close the connection, without a goodbye."""
        self.sock.close()

    def ask(self, request: wire.Reset | wire.Step) -> wire.Rows | wire.AgentRows:
        """Send the next request: its answer. Raises WireError if that fails, or does not fit."""
        self.put(request)
        return self.answers_to([request])[0]

    def put(self, request: wire.Reset | wire.Step) -> None:
        """Send the next request, whose answer is waited for from now on."""
        self.session.ask(request)
        self.send(request)

    def answers_to(self, requests: Sequence[wire.Reset | wire.Step], how: str = "") -> list[wire.Rows | wire.AgentRows]:
        """The answers to these, in any order.

        how    the requests came, for errors
        """
        left, answers = [request.lane for request in requests], []
        while left:
            lanes = f"each of lanes {left}, {how}"
            kind = "agent_rows" if self.hello.role == "agents" else "rows"
            expected = f"{kind} for {lanes if how else f'{requests[0].kind} {requests[0].number}'}"
            answer = self.expect(wire.Rows | wire.AgentRows | wire.Failed, expected)
            request: Any = self.session.asked(answer)
            if request is None:  # after a reconnection it may come twice
                continue
            if isinstance(answer, wire.Failed):
                failure = f"{answer.type}: {answer.text}"
                raise WireError(f"failed at {request.kind} {request.number}: {failure}, expected {expected}")
            answers.append(self._form.check_rows(answer, request, self.session.slots_of(answer.lane)))
            self.session.take(answers[-1])
            left.remove(answer.lane)
        return answers

    def reset(self, seed: int = 1) -> wire.Rows | wire.AgentRows:
        """Reset the first lane with seeds."""
        return self.ask(self.reset_request(seed, self.lane))

    def reset_request(self, seed: int, lane: int) -> wire.Reset:
        """Request for the reset of a lane with seeds."""
        seeds = tuple(seed + slot for slot in range(self.session.slots_of(lane)))
        return wire.Reset(lane, self.session.next_number(lane), seeds, None)

    def step(self, actions: Tree) -> wire.Rows | wire.AgentRows:
        """Step the first lane, with the actions of those agents that are to act."""
        return self.ask(self.step_request(actions))

    def step_request(self, actions: Tree) -> wire.Step:
        """Request for a step of the first lane."""
        number, turns = self.session.next_number(self.lane), self.session.turns_of(self.lane)
        if turns is None:
            return wire.Step(self.lane, number, actions)
        theirs = [
            map_tree(lambda leaf, slots=slots: leaf[slots], part)
            for part, slots in zip(actions, turns.acting, strict=True)
        ]
        return wire.Step(self.lane, number, theirs, turns.acting)

    def actions(self, count: int) -> list[Tree]:
        """So many actions for all slots of the first lane, and all their agents, the same for every run."""
        form, slots = self._form, self.session.slots_of(self.lane)
        if isinstance(form, wire.AgentForm):
            parts = zip(form.action_spaces, form.sizes, strict=True)
            space: gym.Space[Any] = gym.spaces.Tuple([batch_space(part, slots * size) for part, size in parts])
        else:
            space = batch_space(space_of(dict(self.hello.action_space)), slots)
        space.seed(7)
        return [space.sample() for _ in range(count)]

    def send(self, message: wire.Message) -> None:
        """Send a message as it is."""
        self.sock.sendall(b"".join(wire.encode(message)))

    def expect(self, kind: Any, what: str) -> Any:
        """The next message, of this kind. Raises WireError for another, and if none comes."""
        while not self._waiting:
            self._take(self._data(what))
        message = self._waiting.pop(0)
        if not isinstance(message, kind):
            raise WireError(f"sent {shown(message)}, expected {what}")
        return message

    def refused(self, code: str, why: str) -> None:
        """Expect the host to refuse with this code and to close. Raises WireError if it does not."""
        refusal = self.expect(wire.Refused, f"refused with the code '{code}', after {why}")
        if refusal.code != code:
            raise WireError(f"refused with the code '{refusal.code}' ({refusal.text}), expected '{code}', after {why}")
        self.closed(f"the connection closed after {why}")

    def closed(self, what: str, last: type[wire.Message] | None = None) -> None:
        """Expect the host to close the connection. Raises WireError if it does not.

        last    message that it may say before
        """
        while not self._waiting and (data := self._data(what, may_end=True)):
            self._take(data)
            self._waiting = [message for message in self._waiting if last is None or not isinstance(message, last)]
        if self._waiting:
            raise WireError(f"sent {shown(self._waiting[0])}, expected {what}")

    def _take(self, data: bytes) -> None:
        """Keep the messages in these bytes, but for pings, which are answered."""
        for message in map(wire.decode, self._decoder.feed(data)):
            if isinstance(message, wire.Ping):
                self.send(wire.Pong(message.number))
            else:
                self._waiting.append(message)

    def _data(self, what: str, *, may_end: bool = False) -> bytes:
        """The next bytes; none if the other end has closed, if it may."""
        try:
            data = self.sock.recv(1 << 16)
        except TimeoutError:
            raise WireError(f"sent nothing for {self._patience_s:g} s, expected {what}") from None
        except ConnectionError:
            data = b""
        if not data and not may_end:
            raise WireError(f"closed the connection, expected {what}")
        return data


def shown(message: wire.Message) -> str:
    """A message, for people."""
    reason = f" '{message.code}' ({message.text})" if isinstance(message, wire.Refused) else ""
    number = getattr(message, "number", None)
    return f"{message.kind}{'' if number is None else f' {number}'}{reason}"


def check_host(
    opened: Opened, *, secret: bytes | None = None, patience_s: float = 10.0
) -> Iterator[tuple[str, str | None]]:
    """Check a host, connection after connection: the names of checks, and what the host did wrong; None: all is well.

        opened        gives a new connection to it
        patience_s    how long it may take for a step or a reset

    If the host does not get through the handshake, the other checks are left out.
    """
    role = ""
    for number, (name, check) in enumerate(_CHECKS.items()):
        if check is _keeps_turns and role != "agents":
            continue
        try:
            with RawConnection(opened, secret, patience_s) as host:
                role = host.hello.role
                check(host)
        except (WireError, OSError) as error:
            yield name, str(error) or type(error).__name__
            if number == 0:
                return
        else:
            yield name, None


def _takes_part(host: RawConnection) -> None:
    if host.hello.role not in ("env", "agents"):
        raise WireError(f"has the role '{host.hello.role}', expected 'env', or 'agents'")


def _refuses_gateways(host: RawConnection) -> None:
    if host.secret is None:
        return
    try:
        with host.again(secret=secrets.token_bytes(32)):
            raise WireError("took part with a gateway that has another secret, expected it to refuse")
    except WireError as error:
        if error.code != "secret":
            raise


def _steps(host: RawConnection) -> None:
    host.reset()
    for actions in host.actions(300):
        host.step(actions)


def _repeats(host: RawConnection) -> None:
    runs = [[host.reset(seed=3), *map(host.step, host.actions(30))] for _ in range(2)]
    _check_same(runs[1], runs[0], "of the second run")


def _resets_first(host: RawConnection) -> None:
    host.send(host.step_request(host.actions(1)[0]))
    host.refused("order", "a step before the first reset")


def _answers_again(host: RawConnection) -> None:
    host.reset()
    first, second = host.actions(2)
    request = host.step_request(first)
    rows = host.ask(request)
    host.send(request)
    if not _same(host.expect(type(rows), f"the answer to step {request.number} again"), rows):
        raise WireError(f"answered step {request.number} with something else the second time, expected the same")
    host.step(second)


def _passes_over(host: RawConnection) -> None:
    old = host.reset_request(1, host.lane)
    host.ask(old)
    host.step(host.actions(1)[0])
    host.send(old)
    host.send(wire.Ping(5))
    host.expect(wire.Pong, f"nothing but a pong after a reset with number {old.number}, which is long gone")


def _refuses_numbers(host: RawConnection) -> None:
    host.reset()
    host.send(replace(host.step_request(host.actions(1)[0]), number=9))
    host.refused("number", "step 9 where 2 is the next")


def _refuses_lanes(host: RawConnection) -> None:
    host.send(wire.Reset(4711, 1, None, None))
    host.refused("number", "a reset of lane 4711, which there is not")


def _answers_pings(host: RawConnection) -> None:
    host.send(wire.Ping(77))
    pong = host.expect(wire.Pong, "pong 77")
    if pong.number != 77:
        raise WireError(f"sent pong {pong.number}, expected pong 77")


def _takes_pieces(host: RawConnection) -> None:
    first = host.reset_request(1, host.lane)
    host.session.ask(first)
    for byte in b"".join(wire.encode(first)):
        host.sock.sendall(bytes([byte]))
    host.answers_to([first], "whose request came byte by byte")
    requests = [host.reset_request(2, lane) for lane in host.session.lanes]
    for request in requests:
        host.session.ask(request)
    host.sock.sendall(b"".join(b"".join(wire.encode(request)) for request in requests))
    host.answers_to(requests, "whose requests came in one piece")


def _goes_on(host: RawConnection) -> None:
    expected = [host.reset(), *map(host.step, host.actions(3))]
    with host.again() as first:
        actions = host.actions(3)
        rows = [first.reset(), first.step(actions[0])]
        request = first.step_request(actions[1])
        first.put(request)
    with first.again(first.session) as second:  # which asks again
        rows += *second.answers_to([request]), second.step(actions[2])
    _check_same(rows, expected, "than without the break")


def _refuses_frames(host: RawConnection) -> None:
    host.sock.sendall((0xFFFFFFF8).to_bytes(4, "little"))
    host.refused("frame", "a frame of 4 GiB")
    with host.again() as other:
        _takes_part(other)


def _refuses_noise(host: RawConnection) -> None:
    host.sock.sendall(bytes.fromhex("0c000000 04000000 c1c1c1c1 00000000"))
    host.expect(wire.Refused, "refused, after a header that is no msgpack")


def _says_goodbye(host: RawConnection) -> None:
    host.reset()
    host.send(wire.Goodbye("checked"))
    host.closed("the end after goodbye", wire.Goodbye)


def _keeps_turns(host: RawConnection) -> None:
    host.reset()
    request = host.step_request(host.actions(1)[0])
    nobody = tuple(np.zeros(0, np.int64) for _ in request.actions)
    none = [map_tree(lambda leaf: leaf[:0], part) for part in request.actions]
    request = replace(request, agent_slots=nobody, actions=none)
    host.session.ask(request)
    host.send(request)
    host.session.take(host.expect(wire.Failed, "failed, after a step in which nobody acts"))
    host.reset()


def _check_same(rows: list[wire.Rows | wire.AgentRows], expected: list[wire.Rows | wire.AgentRows], than: str) -> None:
    """Raise WireError for the first answer that is another than the expected one."""
    for number, (one, other) in enumerate(zip(rows, expected, strict=True)):
        if not _same(one, other):
            raise WireError(f"gave something else at step {number} {than}, expected the same")


def _same(one: wire.Rows | wire.AgentRows, other: wire.Rows | wire.AgentRows) -> bool:
    """True for two answers with the same values, infos left out."""
    columns = [
        field.name for field in fields(one) if field.name not in ("lane", "number") and "infos" not in field.name
    ]
    mine, theirs = (leaves_of([getattr(rows, name) for name in columns]) for rows in (one, other))
    return len(mine) == len(theirs) and all(np.array_equal(a, b) for a, b in zip(mine, theirs, strict=True))


# What a host does that passes a check -> the check of a connection after its handshake, in their order.
_CHECKS: dict[str, Callable[[RawConnection], None]] = {
    "Says hello, proves the secret, and is welcome": _takes_part,
    "Refuses a gateway that does not know the secret": _refuses_gateways,
    "Answers a reset and 300 steps with rows that fit its spaces and its autoreset mode": _steps,
    "Gives the same episodes for the same seeds and actions": _repeats,
    "Refuses a step before the first reset": _resets_first,
    "Answers a request that comes twice with the same bytes, and steps once": _answers_again,
    "Says nothing to a request whose number is long gone": _passes_over,
    "Refuses a request whose number is too high": _refuses_numbers,
    "Refuses a request for a lane that it has not": _refuses_lanes,
    "Answers a ping with its number": _answers_pings,
    "Answers requests for all its lanes that come byte by byte and in one piece": _takes_pieces,
    "Goes on where it was after a connection is lost, and takes nothing twice": _goes_on,
    "Refuses a frame that is larger than it takes, and is there for the next connection": _refuses_frames,
    "Refuses what is no frame": _refuses_noise,
    "Closes the connection when it is told goodbye": _says_goodbye,
    "Fails a step in which nobody acts, and can be reset then": _keeps_turns,
}
