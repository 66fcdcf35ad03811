"""Frames out of bytes that come in any pieces, and values of their headers; hostile bytes too."""

import struct
import tracemalloc
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given, strategies as st
from wire_ends import allocated, refusing
from wire_values import ARRAYS, VALUES, same

from rollflow.stream.data.errors import ColumnError, WireError
from rollflow.stream.data.infos import SlotInfos
from rollflow.stream.wire import FrameDecoder
from rollflow.stream.wire.codec.frame import frame_of, taken_apart
from rollflow.stream.wire.codec.limits import MAX_DEPTH, MAX_EXT_DEPTH, MAX_HEADER, MAX_OTHER_KEYS, MAX_VALUES
from rollflow.stream.wire.codec.value import decode_value, encode_value

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


NOTHING = np.zeros(0, np.uint8)


def there_and_back(value: Any) -> Any:
    return decode_value(*taken_apart(b"".join(frame_of(*encode_value(value, "value")))))


def ext(code: int, *values: Any) -> bytes:
    packed: bytes = msgpack.packb(msgpack.ExtType(code, msgpack.packb(list(values))))
    return packed


@given(VALUES)
def test_decoding_undoes_encoding_and_encoding_again_gives_the_same_bytes(value: Any) -> None:
    frame = b"".join(frame_of(*encode_value(value, "value")))
    decoded = decode_value(*taken_apart(frame))
    assert same(value, decoded)
    assert b"".join(frame_of(*encode_value(decoded, "value"))) == frame


@given(ARRAYS)
def test_big_endian_and_strided_arrays_go_out_little_endian_and_in_c_order(array: Any) -> None:
    turned = array.astype(array.dtype.newbyteorder(">")).T
    assert same(turned.astype(turned.dtype.newbyteorder("<")), there_and_back(turned))


@given(st.binary(max_size=64), st.integers(0, 64))
def test_any_bytes_are_a_value_or_refused(header: bytes, body: int) -> None:
    try:
        decode_value(header, np.zeros(body, np.uint8))
    except WireError:
        pass


@given(VALUES, st.data())
def test_a_changed_byte_gives_a_value_or_is_refused(value: Any, data: st.DataObject) -> None:
    header, _ = encode_value(value, "value")
    at = data.draw(st.integers(0, len(header) - 1))
    changed = header[:at] + bytes([data.draw(st.integers(0, 255))]) + header[at + 1 :]
    try:
        decode_value(changed, np.zeros(64, np.uint8))
    except WireError:
        pass


def test_arrays_are_views_of_the_body_aligned_to_8() -> None:
    frame = bytearray(b"".join(frame_of(*encode_value([np.zeros(3, np.uint8), np.arange(4.0)], "value"))))
    _, array = decode_value(*taken_apart(frame))
    array[0] = 7.0
    assert array.flags.aligned
    assert struct.pack("<d", 7.0) in frame


def test_large_arrays_are_not_copied() -> None:
    array = np.zeros(1 << 20, np.uint8)
    buffers = frame_of(*encode_value({"a": array, "b": 1}, "value"))
    assert any(np.shares_memory(np.frombuffer(buffer, np.uint8), array) for buffer in buffers)


def test_strings_of_numpy_arrive_as_strings() -> None:
    assert same(there_and_back([np.str_("a"), np.bytes_(b"b")]), ["a", b"b"])
    assert there_and_back(np.array(["left", "right"])).tolist() == ["left", "right"]


@pytest.mark.parametrize(
    ("value", "where"),
    [
        ({"a": [1, object()]}, r"value\['a'\]\[1\]: <object .* of type object can't be sent"),
        ({"a": np.zeros(2, "M8[s]")}, r"value\['a'\]: an array datetime64\[s\]\[2\] of type ndarray can't be sent"),
        (SlotInfos([{}, {"x": {1}}]), r"value of slot 1\['x'\]: \{1\} of type set can't be sent"),
        (2**64, r"value: 18446744073709551616 of type int can't be sent"),
        ("\ud800", r"value: .* of type str can't be sent"),
    ],
)
def test_what_cant_be_sent_is_named(value: Any, where: str) -> None:
    with pytest.raises(ColumnError, match=where):
        encode_value(value, "value")


@pytest.mark.slow
def test_what_is_inside_itself_cant_be_sent() -> None:
    value: list[Any] = []
    value.append((value,))
    with pytest.raises((ColumnError, WireError)):
        encode_value(value, "value")


def nested(depth: int) -> bytes:
    return b"\x91" * depth + b"\xc0"


def nested_ext(depth: int) -> bytes:
    data = b"\xc0"
    for _ in range(depth):
        data = b"\x91" + data
        data = struct.pack(">BIB", 0xC9, len(data), 3) + data
    return data


def test_nesting_has_a_limit() -> None:
    assert decode_value(nested(MAX_DEPTH), NOTHING)
    with pytest.raises(WireError, match=f"more than {MAX_DEPTH} lists, maps and ext values inside each other"):
        decode_value(nested(MAX_DEPTH + 1), NOTHING)
    assert decode_value(nested_ext(MAX_EXT_DEPTH), NOTHING)
    with pytest.raises(WireError, match=f"or {MAX_EXT_DEPTH} ext"):
        decode_value(nested_ext(MAX_EXT_DEPTH + 1), NOTHING)


def test_what_is_too_deep_is_refused_before_it_is_sent() -> None:
    value: Any = 0
    for _ in range(MAX_DEPTH + 1):
        value = [value]
    with pytest.raises(WireError, match="inside each other"):
        encode_value(value, "value")


def test_lists_that_claim_more_than_there_is_take_no_memory() -> None:
    claim = b"\xdd\x00\x00\x10\x00"  # 4096 values
    header = claim * 1000 + b"\xc0" * 4096  # the unpacker would make room for 4 million
    tracemalloc.start()
    try:
        with pytest.raises(WireError, match="inside each other"):
            decode_value(header, NOTHING)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("header", "told"),
    [
        (b"", "its 0 bytes end inside a value"),
        (b"\xc0\xc0", "go on behind the value"),
        (b"\x92\xc0", "end inside a value"),
        (b"\xdd\xff\xff\xff\xff", f"more than {MAX_VALUES} values"),
        (b"\xdf\xff\xff\xff\xff", f"more than {MAX_VALUES} values"),
        (b"\xc1", "byte 0xc1 begins no value"),
        (b"\xa2\xff\xff", "codec can't decode"),
        (b"\xa5ab", "end inside a value"),
        (b"\xc6\xff\xff\xff\xff", "end inside a value"),
        (b"\x81\x90\xc0", "a map's key begins with byte 0x90, expected a plain value"),
        (b"\xd4\xff\x00", "ext code 255, expected 1 to 5"),
        (b"\xd4\x06\x00", "ext code 6, expected 1 to 5"),
        (b"\xd5\x03\xc0\xc0", "an ext value does not hold one value"),
        (b"\xd4\x03\xc0", "ext value 3 of a NoneType, expected a list"),
        (b"\xd4\x01\xc0", "ext value 1 of a NoneType, expected a list"),
        (ext(1, "<f4", [2]), r"a list of 2 values, expected \[dtype, shape, offset\]"),
        (ext(1, "|O", [2], 0), r"dtype '\|O', expected one of \|b1"),
        (ext(1, ">f4", [2], 0), r"dtype '>f4', expected one of"),
        (ext(1, 4, [2], 0), r"dtype 4, expected one of"),
        (ext(1, "<f4", 2, 0), "shape 2, expected a list of at most 32 numbers"),
        (ext(1, "<f4", [1] * 33, 0), "expected a list of at most 32 numbers"),
        (ext(1, "<f4", [-1], 0), r"shape \[-1\], expected numbers of 0 or more"),
        (ext(1, "<f4", [True], 0), r"expected numbers of 0 or more"),
        (ext(1, "<f4", [1 << 33, 1 << 33], 0), r"expected fewer than 2\*\*40 items"),
        (ext(1, "<f4", [0, 1 << 62], 0), r"expected fewer than 2\*\*40 items"),
        (ext(1, "<f4", [5], 0), "of 20 bytes at 0, expected no end behind the body's 16 bytes"),
        (ext(1, "<f4", [2], 16), "of 8 bytes at 16, expected no end behind"),
        (ext(1, "<f4", [2], 4), "array at 4, expected a multiple of 8"),
        (ext(1, "<f4", [2], 0, 8), r"a list of 4 values, expected \[dtype, shape, offset\]"),
        (ext(1, "<f4", [2], -8), "array at -8, expected a multiple of 8"),
        (ext(1, "<f4", [2], b"12345678"), "expected a multiple of 8"),
        (ext(1, msgpack.ExtType(3, b"\x90"), [2], 0), "described with ext value 3"),
        (ext(2, "<f4", b"123"), "expected 4 bytes"),
        (ext(2, "|b1", b"\x02"), "has a byte 2, expected 0 or 1"),
        (ext(4, [3], [1, 2]), r"object array \[3\] of 2 values"),
        (ext(4, [3], 3), "ext value 4 of a int, expected a list"),
        (ext(5, {}, 1), "infos of slot 1: a int, expected a map"),
        (msgpack.packb(dict.fromkeys(range(MAX_OTHER_KEYS + 1))), "keys of maps are no strings"),
        (b"\x92" + ext(1, "|u1", [16], 0) + ext(1, "|u1", [1], 0), "arrays of more than the body's 16 bytes in all"),
    ],
)
def test_what_is_no_value_is_refused(header: bytes, told: str) -> None:
    with refusing("frame", told):
        decode_value(header, np.zeros(16, np.uint8))


def test_a_bool_is_a_byte_of_0_or_1() -> None:
    header = ext(1, "|b1", [2], 0)
    assert decode_value(header, np.array([1, 0], np.uint8)).tolist() == [True, False]
    with pytest.raises(WireError, match=r"array \|b1\[2\] has a byte 255, expected 0 or 1"):
        decode_value(header, np.array([1, 255], np.uint8))
