"""Frames, out of bytes that come in any pieces."""

from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st
from wire_ends import allocated, refusing

from rollflow.stream.data.errors import WireError
from rollflow.stream.wire import FrameDecoder
from rollflow.stream.wire.codec.frame import frame_of, taken_apart
from rollflow.stream.wire.codec.limits import MAX_HEADER

FRAMES = st.lists(
    st.tuples(st.binary(min_size=1, max_size=40), st.lists(st.binary(max_size=40), max_size=3)), max_size=5
)


def bytes_of(header: bytes, arrays: Iterable[bytes] = ()) -> bytes:
    return b"".join(frame_of(header, [np.frombuffer(array, np.uint8) for array in arrays]))


def pieces_of(data: bytes, cuts: Iterable[int]) -> list[bytes]:
    at = sorted({min(cut, len(data)) for cut in cuts} | {0, len(data)})
    return [data[begin:end] for begin, end in pairwise(at)]


def received(decoder: FrameDecoder, pieces: Iterable[bytes], most: int) -> list[bytes]:
    """The frames, where as much is received at a time as there is room for, but no more than `most`."""
    frames: list[bytes] = []
    for piece in pieces:
        rest = piece
        while rest:
            room = decoder.buffer()
            count = min(len(room), len(rest), most)
            room[:count] = rest[:count]
            rest = rest[count:]
            frames += map(bytes, decoder.filled(count))
    return frames


@given(FRAMES, st.lists(st.integers(0, 600), max_size=20), st.integers(1, 50))
def test_frames_are_the_same_in_whatever_pieces_they_come(
    told: list[tuple[bytes, list[bytes]]], cuts: list[int], most: int
) -> None:
    frames = [bytes_of(*each) for each in told]
    pieces = pieces_of(b"".join(frames), cuts)
    fed, filled = FrameDecoder(1 << 16), FrameDecoder(1 << 16)
    assert [bytes(frame) for piece in pieces for frame in fed.feed(piece)] == frames
    assert received(filled, pieces, most) == frames
    assert fed.half == filled.half == 0


@given(st.binary(max_size=100), st.lists(st.integers(0, 100), max_size=10))
def test_any_bytes_are_frames_or_refused_or_half_a_frame(data: bytes, cuts: list[int]) -> None:
    decoder = FrameDecoder(1 << 16)
    frames: list[bytes] = []
    try:
        for piece in pieces_of(data, cuts):
            frames += map(bytes, decoder.feed(piece))
    except WireError:
        assert data.startswith(b"".join(frames))
    else:
        assert sum(map(len, frames)) + decoder.half == len(data)


@pytest.mark.parametrize("sizes", [(1 << 20,), (300_000, 10, 70_000, 200_000), (65_520, 65_536, 65_552)])
def test_large_frames_come_through_between_small_ones(sizes: tuple[int, ...]) -> None:
    frames = [bytes_of(b"h", [bytes([index]) * size]) for index, size in enumerate(sizes)]
    for most in (1 << 20, 4096):
        assert received(FrameDecoder(1 << 24), [b"".join(frames)], most) == frames
    assert [bytes(frame) for frame in FrameDecoder(1 << 24).feed(b"".join(frames))] == frames


@pytest.mark.parametrize("inbox", [64, 4096])
@pytest.mark.parametrize("before", [0, 1, 2])
def test_a_decoder_with_a_small_inbox_is_widened_between_frames(inbox: int, before: int) -> None:
    frames = [bytes_of(b"h", [bytes([index]) * size]) for index, size in enumerate((1000, 10, 100_000, 20))]
    first, rest = b"".join(frames[:before]), b"".join(frames[before:])
    decoder = FrameDecoder(1 << 20, inbox)
    taken = [bytes(frame) for frame in decoder.feed(first)]
    taken += map(bytes, decoder.feed(rest[:11]))  # half a frame of the next
    decoder.widen(1 << 24)
    taken += map(bytes, decoder.feed(rest[11:]))
    assert taken == frames
    assert len(decoder.buffer()) == 1 << 16


def test_a_frame_has_memory_of_its_own() -> None:
    decoder = FrameDecoder(1 << 16)
    first, second = decoder.feed(bytes_of(b"1", [b"a" * 8]) + bytes_of(b"2", [b"b" * 8]))
    first[:] = bytes(len(first))
    assert taken_apart(second)[1].tobytes() == b"b" * 8


def test_a_large_frame_is_received_straight_into_its_own_memory() -> None:
    frame = bytes_of(b"h", [bytes(1 << 20)])
    decoder = FrameDecoder(1 << 24)
    assert not list(decoder.feed(frame[:-1000]))
    room = decoder.buffer()
    assert len(room) == 1000
    room[:] = b"x" * 1000
    (received_frame,) = decoder.filled(1000)
    assert bytes(received_frame)[-1000:] == b"x" * 1000
    assert len(received_frame) == len(frame)


def test_only_so_much_memory_of_large_frames_is_kept_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollflow.stream.wire.codec.frame._MOST_SPARE_BYTES", 5 << 19)
    decoder = FrameDecoder(1 << 24)
    frames = [frame for _ in range(4) for frame in decoder.feed(bytes_of(b"h", [bytes(1 << 20)]))]
    del frames[:]
    assert 2 << 20 <= sum(map(len, decoder._spare)) <= 5 << 19
    frames += decoder.feed(bytes_of(b"h", [bytes(3 << 20)]))
    del frames[:]
    assert sum(map(len, decoder._spare)) <= 5 << 19


def test_a_claim_of_2_gb_and_silence_cost_nothing() -> None:
    decoder = FrameDecoder(0xFFFFFFFF)
    claim = (2**31 - 4).to_bytes(4, "little") + (100).to_bytes(4, "little")
    assert not list(decoder.feed(claim))
    assert len(decoder.buffer()) <= 1 << 18
    assert allocated(decoder) < 1 << 19
    for _ in range(10):
        assert not list(decoder.feed(bytes(1 << 17)))
    assert allocated(decoder) <= 2 * 10 * (1 << 17) + (1 << 19)


@pytest.mark.parametrize(
    ("claim", "told"),
    [
        ((1 << 16) + 4, r"frame of 65540 bytes, expected at most 65536"),
        (2**31, r"frame of 2147483648 bytes, expected at most 65536"),
        (4, r"frame of 4 bytes, expected 12, 20, 28, …"),
        (13, r"frame of 13 bytes, expected 12, 20, 28, …"),
        (0, r"frame of 0 bytes, expected 12"),
    ],
)
def test_a_length_is_refused_before_anything_behind_it_has_come(claim: int, told: str) -> None:
    with refusing("frame", told):
        list(FrameDecoder(1 << 16).feed(claim.to_bytes(4, "little")))


def test_a_header_longer_than_its_frame_is_refused_at_once() -> None:
    with pytest.raises(WireError, match=r"header of 25 bytes in a frame of 28, expected at most 24"):
        list(FrameDecoder(1 << 16).feed((28).to_bytes(4, "little") + (25).to_bytes(4, "little")))
    with pytest.raises(WireError, match=f"header of {MAX_HEADER + 1} bytes"):
        list(FrameDecoder(1 << 30).feed((1 << 24 | 4).to_bytes(4, "little") + (MAX_HEADER + 1).to_bytes(4, "little")))
    with pytest.raises(WireError, match=f"header of {MAX_HEADER + 1} bytes, expected at most {MAX_HEADER}"):
        frame_of(bytes(MAX_HEADER + 1))


def test_the_frames_before_one_that_is_refused_are_given() -> None:
    good = bytes_of(b"good")
    frames = FrameDecoder(1 << 16).feed(good + b"\xff\xff\xff\xff")
    assert next(frames) == good
    with pytest.raises(WireError, match="frame of 4294967295 bytes"):
        next(frames)


def test_memory_of_a_large_frame_is_used_again_once_nobody_refers_to_it() -> None:
    decoder = FrameDecoder(1 << 24)

    def received(byte: int) -> Any:
        (frame,) = decoder.feed(b"".join(frame_of(b"\x80", [np.full(1 << 20, byte, np.uint8)])))
        return taken_apart(frame)[1]

    def place(body: Any) -> int:
        address: int = body.__array_interface__["data"][0]
        return address

    first, second = received(1), received(2)
    where = place(first)
    kept = first[10:20]
    del first
    third = received(3)
    assert place(third) != where
    assert (kept == 1).all()
    del kept
    fourth = received(4)
    assert place(fourth) == where
    assert [int(body[0]) for body in (second, third, fourth)] == [2, 3, 4]
