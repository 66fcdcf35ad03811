"""Streams of bytes that are nearly right, and what every end must hold whatever it is fed."""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from time import perf_counter
from typing import Any

import msgpack
from wire_ends import (
    QUERY,
    Ends,
    StreamEnds,
    allocated,
    asking,
    frame_as,
    greeted,
    running,
    running_agents,
    running_reset,
    taken_from,
)
from wire_messages import CHALLENGE, EXAMPLES, TOKEN, first_rows, hello

from rollflow.stream import wire
from rollflow.stream.data.errors import WireError
from rollflow.stream.wire.codec.frame import frame_of, taken_apart

LONGEST_S = 2.0  # for one input, on a machine that does other things as well
MOST_MEMORY = 1 << 21  # bytes that a decoder may hold beyond a few times what it was fed


def stream_of(*names: str) -> bytes:
    """The frames of some examples."""
    return b"".join(frame_as(EXAMPLES[name]) for name in names)


FRAMES = list(map(frame_as, EXAMPLES.values()))

# Without a secret, so that what follows a changed hello or challenge is looked at.
OPEN_PROOF = frame_as(wire.Proof(b""))
OPEN_CHALLENGE = frame_as(replace(CHALLENGE, secret=False))
OPEN_WELCOME = frame_as(wire.Welcome(b"", TOKEN, False, 0, (wire.LaneGrant(0, 2, 0, 0), wire.LaneGrant(1, 2, 2, 0))))


def _flushed(end: wire.Connection) -> wire.Connection:
    """An end that has nothing to send."""
    taken_from(end)
    return end


def _gateway_asking(ends: Ends, request: str) -> wire.Connection:
    """A gateway that has asked for an example, and sent a ping."""
    ends.to_gateway()
    ends.gateway.ask(EXAMPLES[request])  # type: ignore[arg-type]
    ends.gateway.tick(100.0)
    return _flushed(ends.gateway)


def _new_gateway() -> wire.Connection:
    return Ends(gateway_secret=None).gateway


ROLLOUT = hello(role="rollout")
# Ends, each with streams that it takes.
ENDS: list[tuple[Callable[[], wire.Connection], list[bytes]]] = [
    (_new_gateway, [stream_of("hello"), stream_of("hello") + OPEN_PROOF]),
    (lambda: Ends(host_secret=None).host, [OPEN_CHALLENGE, OPEN_CHALLENGE + OPEN_WELCOME + stream_of("reset")]),
    (lambda: greeted().gateway, [stream_of("goodbye"), stream_of("refused")]),
    (
        lambda: _gateway_asking(running_reset(), "step"),
        [stream_of("rows"), stream_of("metrics", "rows", "ping", "pong"), stream_of("rows", "refused")],
    ),
    (_new_gateway, [stream_of("agents hello") + OPEN_PROOF]),
    (
        lambda: _gateway_asking(running_agents(), "agents step"),
        [stream_of("agent rows"), stream_of("ping", "agent rows", "refused")],
    ),
    (lambda: _flushed(running_agents().host), [stream_of("agents step"), stream_of("agents step", "ping", "goodbye")]),
    (
        lambda: _gateway_asking(running(said=ROLLOUT), "turn"),
        [stream_of("fragment"), stream_of("metrics", "fragment", "metrics")],
    ),
    (
        lambda: _flushed(running_reset().host),
        [stream_of("step"), stream_of("ping", "reset", "step"), stream_of("step", "goodbye")],
    ),
    (
        lambda: running(said=ROLLOUT).host,
        [stream_of("settings", "states", "weights", "turn", "cut"), stream_of("turn", "ping", "refused")],
    ),
    (
        lambda: StreamEnds(given=50).trainer,
        [stream_of("fragment", "metrics"), stream_of("metrics", "ping", "goodbye")],
    ),
    (
        lambda: StreamEnds(known=wire.ReceiverSession(TOKEN, taken=50), given=50).source,
        [stream_of("settings", "weights", "done"), stream_of("done", "ping", "refused")],
    ),
    (lambda: _flushed(asking().source), [frame_as(QUERY), frame_as(QUERY) + stream_of("goodbye")]),
    (lambda: asking().trainer, [frame_as(QUERY), frame_as(QUERY) + stream_of("refused")]),
]
STREAMS = [*FRAMES, b"".join(FRAMES)]


class Fuzzed:
    """Results of the inputs so far.

    counts    what they came to: kinds of messages, codes of errors
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def take(self, data: bytes) -> None:
        """Feed one input to the decoder or to an end, as its first byte says, in pieces as its second one says.

        Raises whatever is not a WireError, and AssertionError where something grew, took long, or went on after the
        end.
        """
        began = perf_counter()
        which, seed, stream = data[:1], data[1:2], data[2:]
        pieces = _pieces(stream, random.Random(seed))
        number = int.from_bytes(which) % (2 * len(ENDS))
        if number < len(ENDS):
            self._feed_end(ENDS[number][0](), pieces)
        else:
            self._feed_decoder(pieces)
        took = perf_counter() - began
        assert took < LONGEST_S, f"{took} s"

    def _feed_decoder(self, pieces: list[bytes]) -> None:
        decoder = wire.FrameDecoder(1 << 26)
        fed = 0
        try:
            for piece in pieces:
                fed += len(piece)
                for frame in decoder.feed(piece):
                    self.counts[wire.decode(frame).kind] += 1
                assert allocated(decoder) <= MOST_MEMORY + 3 * fed
        except WireError as error:
            self.counts[error.code] += 1

    def _feed_end(self, end: wire.Connection, pieces: list[bytes]) -> None:
        fed, sent = 0, 0
        for at, piece in enumerate(pieces):
            fed += len(piece)
            for event in end.receive(piece, float(at)):
                if isinstance(event, WireError):
                    self.counts[event.code] += 1
                    assert end.phase is wire.ConnectionPhase.BROKEN
                else:
                    self.counts[event.kind] += 1
                    self._react(end, event)
            sent += len(taken_from(end))
            assert sent <= MOST_MEMORY + 3 * fed
            if end.phase is wire.ConnectionPhase.BROKEN:
                break
        end.ended()
        taken_from(end)
        if end.phase is wire.ConnectionPhase.BROKEN:
            assert end.receive(b"".join(FRAMES), 1e9) == []
            assert end.tick(1e9) == []
            assert end.outgoing() == []

    def _react(self, end: wire.Connection, event: Any) -> None:
        """Do what a program would do."""
        try:
            if isinstance(event, wire.Hello):
                session = wire.GatewaySession(TOKEN, event, range(len(event.slots)), range(len(event.slots)))
                end.welcome(session)  # type: ignore[attr-defined]
            elif isinstance(end, wire.HostConnection) and isinstance(event, wire.Reset | wire.Turn):
                answer: wire.Answer = first_rows(lane=event.lane, number=event.number)
                if isinstance(event, wire.Turn):
                    answer = wire.Fragment(event.lane, event.number, {}, {})
                end.answer(event, answer)
        except WireError as error:
            self.counts[f"local {error.code}"] += 1


def _pieces(stream: bytes, rng: random.Random) -> list[bytes]:
    cuts = sorted({0, len(stream), *(rng.randrange(len(stream) + 1) for _ in range(rng.choice((0, 1, 3, 20))))})
    return [stream[begin:end] for begin, end in pairwise(cuts)]


class Mutator:
    """Makes inputs for `Fuzzed.take` out of valid streams; the same ones for the same seed."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)

    def input(self) -> bytes:
        """The next one."""
        rng = self._rng
        number = rng.randrange(2 * len(ENDS))
        fitting = number < len(ENDS) and rng.random() < 0.8
        frames = _frames_of(rng.choice(ENDS[number][1] if fitting else STREAMS))
        for _ in range(rng.choice((1, 1, 1, 2, 4))):
            at = rng.randrange(len(frames))
            ways = (self._with_other_fields, self._with_other_header, self._with_other_bytes)
            (way,) = rng.choices(ways, (6, 3, 1))
            frames[at] = way(frames[at])
            if rng.random() < 0.1:
                frames.insert(at, rng.choice(FRAMES))
            if rng.random() < 0.1:
                rng.shuffle(frames)
        stream = b"".join(frames)
        if rng.random() < 0.1:
            stream = stream[: rng.randrange(len(stream) + 1)]
        return bytes([number, rng.randrange(256)]) + stream

    def _with_other_bytes(self, frame: bytes) -> bytes:
        """Some bytes changed, put in or taken out, lengths among them."""
        rng, changed = self._rng, bytearray(frame)
        for _ in range(rng.choice((1, 1, 2, 8))):
            at = rng.randrange(len(changed) + 1)
            length = rng.choice((1, 1, 2, 4, 8))
            some = rng.choice((rng.randbytes(length), rng.choice(_BYTES), changed[at : at + length] * 2))
            changed[at : at + rng.choice((0, length))] = some
        return bytes(changed)

    def _with_other_header(self, frame: bytes) -> bytes:
        """A header with other bytes, in a frame whose lengths are right."""
        try:
            header, body = taken_apart(frame)
            return b"".join(frame_of(self._with_other_bytes(header), [body]))
        except Exception:  # it is no frame any more
            return frame

    def _with_other_fields(self, frame: bytes) -> bytes:
        """A header that is msgpack and has something else in one place."""
        try:
            header, body = taken_apart(frame)
            told = self._replaced(msgpack.unpackb(header, strict_map_key=False))
        except Exception:  # it is no frame any more
            return frame
        return b"".join(frame_of(msgpack.packb(told, unicode_errors="replace"), [body]))

    def _replaced(self, value: Any) -> Any:
        rng = self._rng
        if isinstance(value, msgpack.ExtType) and rng.random() < 0.8:
            inner = self._replaced(msgpack.unpackb(value.data, strict_map_key=False))
            return msgpack.ExtType(rng.choice((value.code, value.code, rng.randrange(7))), msgpack.packb(inner))
        if isinstance(value, dict) and value and rng.random() < 0.9:
            key = rng.choice(list(value))
            if rng.random() < 0.05:
                return {name: part for name, part in value.items() if name != key}
            return value | {key: self._replaced(value[key])}
        if isinstance(value, list) and value and rng.random() < 0.9:
            at = rng.randrange(len(value))
            return [*value[:at], self._replaced(value[at]), *value[at + 1 :]]
        if isinstance(value, int) and rng.random() < 0.5:
            return max(-(2**63), min(2**64 - 1, value + rng.choice((-1, 1, 8, 2**31, 2**62))))
        return rng.choice(_VALUES)


def _frames_of(stream: bytes) -> list[bytes]:
    return [bytes(frame) for frame in wire.FrameDecoder(1 << 26).feed(stream)]


_BYTES = [bytes([first]) for first in (0, 0x7F, 0x80, 0x8F, 0x90, 0x9F, 0xC1, 0xC7, 0xD4, 0xD8, 0xDC, 0xDE, 0xFF)] + [
    b"\xdd\xff\xff\xff\xff",
    b"\xdf\x00\x01\x00\x00",
    b"\xc9\x00\x00\x00\x05\x03",
    b"\xc6\x7f\xff\xff\xff",
    b"\x91" * 40,
    b"\xd4\x03" * 20,
    b"\xff\xff\xff\x7f",
]


def _deep(depth: int) -> Any:
    value: Any = None
    for _ in range(depth):
        value = [value]
    return value


def _deep_ext(depth: int) -> Any:
    value: Any = None
    for _ in range(depth):
        value = msgpack.ExtType(3, msgpack.packb([value]))
    return value


def _array(*told: Any) -> Any:
    return msgpack.ExtType(1, msgpack.packb(list(told)))


_VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 255, 2**31, 2**53, 2**63, 2**64 - 1, -(2**63)),
    *(0.5, float("nan"), float("inf"), "", "x", "<f4", "\0", "é" * 300, "|O", "Box", b"", b"x", bytes(16), bytes(32)),
    *([], [1], [0, 0], [2**40, 2**40], [None] * 300, {}, {"a": 1}, {1: 2}, {None: None}),
    *(_deep(31), _deep(40), _deep_ext(7), _deep_ext(9), msgpack.Timestamp(1, 1)),
    *(_array("<f4", [2, 3], 0), _array("<i8", [2], 0), _array("|b1", [2], 0), _array("|u1", [0, 2**39], 0)),
    *(_array("<f8", [2**20, 2**20], 0), _array("<f4", [], 0), _array("<f4", [2], 2**63), _array("<c16", [1] * 32, 0)),
    *({"kind": "Tuple", "parts": []}, {"kind": "Dict", "parts": [["a", {"kind": "MultiBinary", "shape": [1]}]]}),
    *({"kind": "Box", "low": ["<f4", [], bytes(4)], "high": ["<f4", [], b"\xff" * 4]},),
    *({"kind": "MultiDiscrete", "nvec": ["<i8", [1], bytes(8)], "start": ["<i8", [1], bytes(8)]},),
    *({"x": _array("<f4", [2], 0), "_x": _array("|b1", [1], 0)}, msgpack.ExtType(5, b"\x92\x80\x80")),
    *(msgpack.ExtType(4, b"\x92\x91\x02\x92\xc0\xc0"), msgpack.ExtType(2, b"\x92\xa3<f4\xc4\x04\x00\x00\xc0\x7f")),
]
