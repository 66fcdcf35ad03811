"""Checks that a host keeps to the protocol, each in a connection of its own."""

import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace

import numpy as np

from rollflow.nodes.env.remote.conformance.dialogue import HostDialogue, Opened, ProtocolViolation, RawConnection, shown
from rollflow.stream.data.errors import WireError
from rollflow.stream.data.tree import leaves_of, map_tree
from rollflow.stream.wire import AgentRows, Failed, Goodbye, Ping, Pong, Refused, Reset, Rows, encode


@dataclass(frozen=True, slots=True)
class Result:
    """Result of one check; `wrong` says what the host did and what was expected, None: all is well."""

    name: str
    wrong: str | None


def check_host(opened: Opened, *, secret: bytes | None = None, patience_s: float = 10.0) -> Iterator[Result]:
    """Check a host, connection after connection: the results one by one.

        opened        gives a new connection to it
        patience_s    how long it may take for a step or a reset

    Where the host does not get through the handshake, the other checks are left out.
    """
    dialogue = HostDialogue(opened, secret, patience_s)
    for number, (name, check) in enumerate(_CHECKS):
        if check is _keeps_turns and dialogue.role != "agents":
            continue
        try:
            check(dialogue)
        except (ProtocolViolation, WireError, OSError) as error:
            yield Result(name, str(error) or type(error).__name__)
            if number == 0:
                return
        else:
            yield Result(name, None)


# Checks in their order, each with the words for what a host does that passes it.

Check = Callable[[HostDialogue], None]
_CHECKS: list[tuple[str, Check]] = []


def _of_host(name: str) -> Callable[[Check], Check]:
    """Add a check that opens connections itself."""

    def added(check: Check) -> Check:
        _CHECKS.append((name, check))
        return check

    return added


def _of_connection(name: str) -> Callable[[Callable[[RawConnection], None]], Check]:
    """Add a check of one connection, after its handshake."""

    def added(check: Callable[[RawConnection], None]) -> Check:
        def opening(dialogue: HostDialogue) -> None:
            with dialogue.begun() as host:
                check(host)

        return _of_host(name)(opening)

    return added


@_of_connection("Says hello, proves the secret, and is welcome")
def _takes_part(host: RawConnection) -> None:
    if host.hello.role not in ("env", "agents"):
        raise ProtocolViolation(f"has the role '{host.hello.role}', expected 'env', or 'agents'")


@_of_host("Refuses a gateway that does not know the secret")
def _refuses_gateways(dialogue: HostDialogue) -> None:
    if dialogue.secret is None:
        return
    stranger = HostDialogue(dialogue.opened, secrets.token_bytes(32), dialogue.patience_s)
    try:
        with stranger.begun():
            raise ProtocolViolation("took part with a gateway that has another secret, expected it to refuse")
    except WireError as error:
        if error.code != "secret":
            raise


@_of_connection("Answers a reset with observations in its space")
def _resets(host: RawConnection) -> None:
    host.reset()


@_of_connection("Answers 300 steps with rows that fit its spaces and its autoreset mode")
def _steps(host: RawConnection) -> None:
    host.reset()
    for actions in host.actions(300):
        host.step(actions)


@_of_connection("Gives the same episodes for the same seeds and actions")
def _repeats(host: RawConnection) -> None:
    runs = [[host.reset(seed=3), *map(host.step, host.actions(30))] for _ in range(2)]
    _check_same(runs[1], runs[0], "of the second run")


@_of_connection("Refuses a step before the first reset")
def _resets_first(host: RawConnection) -> None:
    host.send(host.step_request(host.actions(1)[0]))
    host.refused("order", "a step before the first reset")


@_of_connection("Answers a request that comes twice with the same bytes, and steps once")
def _answers_again(host: RawConnection) -> None:
    host.reset()
    first, second = host.actions(2)
    request = host.step_request(first)
    rows = host.ask(request)
    host.send(request)
    if not _same(host.answer_to(request), rows):
        raise ProtocolViolation(
            f"answered step {request.number} with something else the second time, expected the same"
        )
    host.step(second)


@_of_connection("Says nothing to a request whose number is long gone")
def _passes_over(host: RawConnection) -> None:
    old = host.reset_request(1, host.lane)
    host.ask(old)
    host.step(host.actions(1)[0])
    host.send(old)
    host.send(Ping(5))
    host.expect(Pong, f"nothing but a pong after a reset with number {old.number}, which is long gone")


@_of_connection("Refuses a request whose number is too high")
def _refuses_numbers(host: RawConnection) -> None:
    host.reset()
    host.send(replace(host.step_request(host.actions(1)[0]), number=9))
    host.refused("number", "step 9 where 2 is the next")


@_of_connection("Refuses a request for a lane that it has not")
def _refuses_lanes(host: RawConnection) -> None:
    host.send(Reset(4711, 1, None, None))
    host.refused("number", "a reset of lane 4711, which there is not")


@_of_connection("Answers a ping with its number")
def _answers_pings(host: RawConnection) -> None:
    host.send(Ping(77))
    pong = host.expect(Pong, "pong 77")
    if pong.number != 77:
        raise ProtocolViolation(f"sent pong {pong.number}, expected pong 77")


@_of_connection("Takes a frame that comes byte by byte")
def _takes_pieces(host: RawConnection) -> None:
    request = host.reset_request(1, host.lane)
    host.session.ask(request)
    for byte in b"".join(encode(request)):
        host.sock.sendall(bytes([byte]))
    host.answer_to(request)


@_of_connection("Answers requests for all its lanes that come in one piece")
def _takes_two_at_once(host: RawConnection) -> None:
    requests = {lane: host.reset_request(1, lane) for lane in host.session.lanes}
    for request in requests.values():
        host.session.ask(request)
    host.sock.sendall(b"".join(b"".join(encode(request)) for request in requests.values()))
    for _ in host.session.lanes:
        answer = host.next("rows for every lane")
        if not isinstance(answer, Rows | AgentRows) or answer.lane not in requests:
            raise ProtocolViolation(f"sent {shown(answer)}, expected rows for each of lanes {list(requests)}")
        del requests[answer.lane]


@_of_host("Goes on where it was after a connection is lost, and takes nothing twice")
def _goes_on(dialogue: HostDialogue) -> None:
    with dialogue.begun() as host:
        expected = [host.reset(), *map(host.step, host.actions(3))]
    with dialogue.begun() as host:
        first, second, third = host.actions(3)
        session = host.session
        rows = [host.reset(), host.step(first)]
        request = host.step_request(second)
        host.put(request)
    with dialogue.begun(session) as host:  # which asks again
        rows += host.answer_to(request), host.step(third)
    _check_same(rows, expected, "than without the break")


@_of_host("Begins anew where the gateway does not know its session any more")
def _begins_anew(dialogue: HostDialogue) -> None:
    with dialogue.begun() as host:
        host.reset()
        host.step(host.actions(1)[0])
    with dialogue.begun() as host:
        host.reset()


@_of_host("Refuses a frame that is larger than it takes, and is there for the next connection")
def _refuses_frames(dialogue: HostDialogue) -> None:
    with dialogue.begun() as host:
        host.sock.sendall((0xFFFFFFF8).to_bytes(4, "little"))
        host.refused("frame", "a frame of 4 GiB")
    _takes_part(dialogue)


@_of_connection("Refuses what is no frame")
def _refuses_noise(host: RawConnection) -> None:
    host.sock.sendall(bytes.fromhex("0c000000 04000000 c1c1c1c1 00000000"))
    host.expect(Refused, "refused, after a header that is no msgpack")


@_of_connection("Closes the connection when it is told goodbye")
def _says_goodbye(host: RawConnection) -> None:
    host.reset()
    host.send(Goodbye("checked"))
    try:
        message = host.next("a goodbye, or the end")
    except ProtocolViolation:
        return
    if not isinstance(message, Goodbye):
        raise ProtocolViolation(f"sent {shown(message)}, expected a goodbye or the end")
    host.closed("the end after goodbye")


@_of_connection("Fails a step in which nobody acts, and can be reset then")
def _keeps_turns(host: RawConnection) -> None:
    host.reset()
    request = host.step_request(host.actions(1)[0])
    nobody = tuple(np.zeros(0, np.int64) for _ in request.actions)
    none = [map_tree(lambda leaf: leaf[:0], part) for part in request.actions]
    request = replace(request, agent_slots=nobody, actions=none)
    host.put(request)
    host.session.take(host.expect(Failed, "failed, after a step in which nobody acts"))
    host.reset()


def _check_same(rows: list[Rows | AgentRows], expected: list[Rows | AgentRows], than: str) -> None:
    """Raise ProtocolViolation for the first answer that is another than the expected one."""
    for number, (one, other) in enumerate(zip(rows, expected, strict=True)):
        if not _same(one, other):
            raise ProtocolViolation(f"gave something else at step {number} {than}, expected the same")


def _same(one: Rows | AgentRows, other: Rows | AgentRows) -> bool:
    """True for two answers with the same values, infos left out."""
    columns = [
        field.name for field in fields(one) if field.name not in ("lane", "number") and "infos" not in field.name
    ]
    mine, theirs = (leaves_of([getattr(rows, name) for name in columns]) for rows in (one, other))
    return len(mine) == len(theirs) and all(np.array_equal(a, b) for a, b in zip(mine, theirs, strict=True))
