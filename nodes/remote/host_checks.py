"""Whether somebody's host keeps to the protocol: it is asked for one thing after the other, and told what was wrong."""

import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace

import numpy as np

from rollflow.nodes.remote.host_talk import Opened, Talk, Wrong, shown
from rollflow.stream.errors import WireError
from rollflow.stream.tree import leaves_of, map_tree
from rollflow.stream.wire import AgentRows, Failed, Goodbye, Ping, Pong, Refused, Reset, Rows, encode


@dataclass(frozen=True, slots=True)
class Result:
    """What one check has shown; `wrong` says what was done and what was expected, and is None where all is well."""

    name: str
    wrong: str | None


def check_host(opened: Opened, *, secret: bytes | None = None, patience_s: float = 10.0) -> Iterator[Result]:
    """Check a host, connection after connection: the results one by one.

        opened        gives a new connection to it
        patience_s    how long it may take for a step or a reset

    The rest is left out where the host can't even be talked to.
    """
    talk = Talk(opened, secret, patience_s)
    for check in (*_CHECKS, _keeps_turns):
        if check is _keeps_turns and talk.role != "agents":
            continue
        told = (check.__doc__ or "").rstrip(".")
        try:
            check(talk)
        except (Wrong, WireError, OSError) as error:
            yield Result(told, str(error) or type(error).__name__)
            if check is _takes_part:
                return
        else:
            yield Result(told, None)


# The checks, each of which says in its docstring what a host does that passes it.


def _takes_part(talk: Talk) -> None:
    """Says hello, proves the secret, and is welcome."""
    with talk.begun() as line:
        if line.hello.role not in ("env", "agents"):
            raise Wrong(f"has the role '{line.hello.role}', expected 'env', or 'agents'")


def _resets(talk: Talk) -> None:
    """Answers a reset with observations in its space."""
    with talk.begun() as line:
        line.reset()


def _steps(talk: Talk) -> None:
    """Answers 300 steps with rows that fit its spaces and its autoreset mode."""
    with talk.begun() as line:
        line.reset()
        for actions in line.actions(300):
            line.step(actions)


def _repeats(talk: Talk) -> None:
    """Gives the same episodes for the same seeds and actions."""
    with talk.begun() as line:
        runs = []
        for _ in range(2):
            rows = [line.reset(seed=3), *(line.step(actions) for actions in line.actions(30))]
            runs.append(rows)
    for number, (one, other) in enumerate(zip(*runs, strict=True)):
        if not _same(one, other):
            raise Wrong(f"gave something else at step {number} of the second run, expected the same")


def _resets_first(talk: Talk) -> None:
    """Refuses a step before the first reset."""
    with talk.begun() as line:
        line.send(line.step_request(line.actions(1)[0]))
        line.refused("order", "a step before the first reset")


def _answers_again(talk: Talk) -> None:
    """Answers a request that comes twice with the same bytes, and steps once."""
    with talk.begun() as line:
        line.reset()
        first, second = line.actions(2)
        request = line.step_request(first)
        rows = line.ask(request)
        line.send(request)
        if not _same(line.answer_to(request), rows):
            raise Wrong(f"answered step {request.number} with something else the second time, expected the same")
        line.step(second)


def _passes_over(talk: Talk) -> None:
    """Says nothing to a request whose number is long gone."""
    with talk.begun() as line:
        old = line.reset_request(1, line.lane)
        line.ask(old)
        line.step(line.actions(1)[0])
        line.send(old)
        line.send(Ping(5))
        line.expect(Pong, f"nothing but a pong after a reset with number {old.number}, which is long gone")


def _refuses_numbers(talk: Talk) -> None:
    """Refuses a request whose number is too high."""
    with talk.begun() as line:
        line.reset()
        line.send(replace(line.step_request(line.actions(1)[0]), number=9))
        line.refused("number", "step 9 where 2 is the next")


def _refuses_lanes(talk: Talk) -> None:
    """Refuses a request for a lane that it has not."""
    with talk.begun() as line:
        line.send(Reset(4711, 1, None, None))
        line.refused("number", "a reset of lane 4711, which there is not")


def _answers_pings(talk: Talk) -> None:
    """Answers a ping with its number."""
    with talk.begun() as line:
        line.send(Ping(77))
        pong = line.expect(Pong, "pong 77")
        if pong.number != 77:
            raise Wrong(f"sent pong {pong.number}, expected pong 77")


def _takes_pieces(talk: Talk) -> None:
    """Takes a frame that comes byte by byte."""
    with talk.begun() as line:
        request = line.reset_request(1, line.lane)
        line.session.ask(request)
        for byte in b"".join(encode(request)):
            line.sock.sendall(bytes([byte]))
        line.answer_to(request)


def _takes_two_at_once(talk: Talk) -> None:
    """Answers requests for all its lanes that come in one piece."""
    with talk.begun() as line:
        requests = {lane: line.reset_request(1, lane) for lane in line.session.lanes}
        for request in requests.values():
            line.session.ask(request)
        line.sock.sendall(b"".join(b"".join(encode(request)) for request in requests.values()))
        for _ in line.session.lanes:
            answer = line.next("rows for every lane")
            if not isinstance(answer, Rows | AgentRows) or answer.lane not in requests:
                raise Wrong(f"sent {shown(answer)}, expected rows for each of lanes {list(requests)}")
            del requests[answer.lane]


def _goes_on(talk: Talk) -> None:
    """Goes on where it was after a connection is lost, and takes nothing twice."""
    with talk.begun() as line:
        expected = [line.reset(), *(line.step(actions) for actions in line.actions(3))]
    with talk.begun() as line:
        first, second, third = line.actions(3)
        session = line.session
        rows = [line.reset(), line.step(first)]
        request = line.step_request(second)
        session.ask(request)
        line.send(request)
    with talk.begun(session) as line:  # which asks again
        rows += line.answer_to(request), line.step(third)
    for number, (one, other) in enumerate(zip(rows, expected, strict=True)):
        if not _same(one, other):
            raise Wrong(f"gave something else at step {number} than without the break, expected the same")


def _begins_anew(talk: Talk) -> None:
    """Begins anew where the gateway does not know its session any more."""
    with talk.begun() as line:
        line.reset()
        line.step(line.actions(1)[0])
    with talk.begun() as line:
        line.reset()


def _refuses_frames(talk: Talk) -> None:
    """Refuses a frame that is larger than it takes, and is there for the next connection."""
    with talk.begun() as line:
        line.sock.sendall((0xFFFFFFF8).to_bytes(4, "little"))
        line.refused("frame", "a frame of 4 GiB")
    _takes_part(talk)


def _refuses_noise(talk: Talk) -> None:
    """Refuses what is no frame."""
    with talk.begun() as line:
        line.sock.sendall(bytes.fromhex("0c000000 04000000 c1c1c1c1 00000000"))
        line.expect(Refused, "refused, after a header that is no msgpack")


def _refuses_gateways(talk: Talk) -> None:
    """Refuses a gateway that does not know the secret."""
    if talk.secret is None:
        return
    stranger = Talk(talk.opened, secrets.token_bytes(32), talk.patience_s)
    try:
        with stranger.begun():
            raise Wrong("took part with a gateway that has another secret, expected it to refuse")
    except WireError as error:
        if error.code != "secret":
            raise


def _says_goodbye(talk: Talk) -> None:
    """Closes the connection when it is told goodbye."""
    with talk.begun() as line:
        line.reset()
        line.send(Goodbye("checked"))
        message = None
        try:
            message = line.next("a goodbye, or the end")
        except Wrong:
            return
        if not isinstance(message, Goodbye):
            raise Wrong(f"sent {shown(message)}, expected a goodbye or the end")
        line.closed("the end after goodbye")


def _keeps_turns(talk: Talk) -> None:
    """Fails a step in which nobody acts, and can be reset then."""
    with talk.begun() as line:
        line.reset()
        request = line.step_request(line.actions(1)[0])
        nobody = tuple(np.zeros(0, np.int64) for _ in request.actions)
        none = [map_tree(lambda leaf: leaf[:0], part) for part in request.actions]
        request = replace(request, agent_slots=nobody, actions=none)
        line.session.ask(request)
        line.send(request)
        failed = line.expect(Failed, "failed, after a step in which nobody acts")
        line.session.take(failed)
        line.reset()


_CHECKS: tuple[Callable[[Talk], None], ...] = (
    _takes_part,
    _refuses_gateways,
    _resets,
    _steps,
    _repeats,
    _resets_first,
    _answers_again,
    _passes_over,
    _refuses_numbers,
    _refuses_lanes,
    _answers_pings,
    _takes_pieces,
    _takes_two_at_once,
    _goes_on,
    _begins_anew,
    _refuses_frames,
    _refuses_noise,
    _says_goodbye,
)


def _same(one: Rows | AgentRows, other: Rows | AgentRows) -> bool:
    """Whether two answers say the same, infos left out."""
    columns = [
        field.name for field in fields(one) if field.name not in ("lane", "number") and "infos" not in field.name
    ]
    mine, theirs = (leaves_of([getattr(rows, name) for name in columns]) for rows in (one, other))
    return len(mine) == len(theirs) and all(np.array_equal(a, b) for a, b in zip(mine, theirs, strict=True))
