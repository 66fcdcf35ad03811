"""Packed weights: they are those that were packed, whatever versions an end has had, or nothing at all."""

import dataclasses
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st
from wire_ends import StreamEnds, hello, running
from wire_messages import EXAMPLES
from wire_values import same

from rollflow.stream.data import zstd
from rollflow.stream.data.errors import WireError
from rollflow.stream.wire import ConnectionBroken, Weights, WeightsPacked, WeightsPacker, encode, ends, weights_packing
from rollflow.stream.wire.weights_packing import WeightsUnpacker

MOST = 1 << 20
FIELDS = [field.name for field in dataclasses.fields(Weights)]


def learnt(version: int, module: str | None = None, count: int = 4096) -> Weights:
    """Weights that change a little from version to version, as Adam has it; and some of other dtypes."""
    generator = np.random.default_rng(0)
    first = generator.standard_normal(count, np.float32)
    for _ in range(version):
        first = first + 3e-4 * generator.standard_normal(count, np.float32)
    tensors: dict[str, Any] = {"layer.weight": first, "scale": np.full(3, version, np.float64), "count": np.array(7)}
    tensors["mask"] = generator.integers(0, 2, 33).astype(bool)
    tensors["half"] = generator.integers(0, 1 << 16, 101).astype(np.uint16)
    return Weights(version, tensors, {"half": "bfloat16"}, {"note": "a"}, module=module)


def assert_same(left: Any, right: Any) -> None:
    assert type(left) is type(right)
    assert same([getattr(left, name) for name in FIELDS], [getattr(right, name) for name in FIELDS])


def size_of(message: Weights | WeightsPacked) -> int:
    return sum(map(len, encode(message)))


@given(st.lists(st.sets(st.integers(0, 3)), min_size=1, max_size=12))
def test_each_end_has_the_weights_that_were_packed_whichever_versions_it_was_sent(
    sent: list[set[int]],
) -> None:
    packer, ends, bases = WeightsPacker(), [WeightsUnpacker() for _ in range(4)], dict[tuple[int, str], int]()
    for version, chosen in enumerate(sent):
        for module in ("walker", "runner"):
            weights = learnt(version, module)
            for end in chosen:
                message = packer.packed(weights, bases.get((end, module)))
                assert isinstance(message, WeightsPacked)
                bases[end, module] = version
                assert_same(ends[end].unpacked(message, MOST), weights)


def test_the_next_version_takes_much_less_room_and_one_without_a_base_somewhat_less() -> None:
    packer = WeightsPacker()
    alone, then = packer.packed(learnt(0, count=1 << 16), None), packer.packed(learnt(1, count=1 << 16), 0)
    whole = size_of(learnt(0, count=1 << 16))
    assert size_of(then) < 0.65 * whole < size_of(alone) < 0.95 * whole


def test_few_weights_and_those_that_are_no_smaller_go_as_they_are() -> None:
    few, noise = learnt(1, count=64), np.random.default_rng(0).integers(0, 1 << 32, 4096, np.uint32)
    for weights in (few, Weights(1, {"noise": noise}, {}, {})):
        assert_same(WeightsPacker().packed(weights, None), weights)


def test_an_end_that_has_one_of_many_versions_before_gets_weights_without_a_base(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def based(versions: int, *bases: int) -> list[bool]:
        packer = WeightsPacker()
        for version in range(versions):
            packer.packed(learnt(version), None)
        messages = [packer.packed(learnt(versions), base) for base in bases]
        return [isinstance(message, WeightsPacked) and message.base is not None for message in messages]

    assert based(6, 2, 3, 4, 5) == [False, True, True, True]
    monkeypatch.setattr(weights_packing, "_MOST_BYTES", 1)
    assert based(6, 2, 3, 4, 5) == [False, False, False, True]


@given(st.data())
def test_what_was_changed_on_the_way_is_refused(data: st.DataObject) -> None:
    packer, end = WeightsPacker(), WeightsUnpacker()
    end.unpacked(packer.packed(learnt(0), None), MOST)  # type: ignore[arg-type]
    message: Any = packer.packed(learnt(1), 0)
    packed = message.packed.copy()
    change = data.draw(st.sampled_from(["bit", "cut", "size", "checksum", "version", "module", "base"]))
    if change == "bit":
        packed[data.draw(st.integers(0, len(packed) - 1))] ^= 1 << data.draw(st.integers(0, 7))
        message = replace(message, packed=packed)
    elif change == "cut":
        message = replace(message, packed=packed[: data.draw(st.integers(0, len(packed) - 1))])
    else:
        other = {"module": "walker"}.get(change, getattr(message, change) or 0)
        message = replace(message, **{change: other if change == "module" else other + 8})
    try:
        weights = end.unpacked(message, MOST)
    except WireError:
        return
    assert_same(weights, learnt(1))  # a bit of Zstandard's header that nobody looks at


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"size": MOST + 8}, f"version 7: a frame of {MOST + 4} bytes, expected at most {MOST}"),
        ({"base": 3}, "a difference from version 3, expected None, which came last"),
        ({"size": 148}, "a frame of Zstandard of .* bytes, expected 148"),
        ({"size": 147}, "a frame of 147 bytes in all, expected a multiple of 4"),
        ({"checksum": 1}, "their checksum is 0x.*, expected 0x00000001"),
        ({"version": 8}, "version 8: they are weights of version 7, module None, expected the same"),
        ({"packed": np.zeros(4)}, r"an array float64\[4\], expected uint8\[n\]"),
        ({"packed": np.zeros(4, np.uint8)}, "packed weights, version 7: error when"),
    ],
)
def test_a_message_that_makes_no_weights_is_refused(changes: dict[str, Any], told: str) -> None:
    example: Any = EXAMPLES["packed"]
    assert_same(WeightsUnpacker().unpacked(example, MOST), EXAMPLES["weights"])
    with pytest.raises(WireError, match=told) as caught:
        WeightsUnpacker().unpacked(replace(example, **changes), MOST)
    assert caught.value.code == "packed"


def test_what_is_no_frame_of_weights_or_has_more_behind_it_is_refused() -> None:
    def told(frame: bytes, more: bytes = b"") -> str:
        whole = np.frombuffer(frame, np.uint8)
        planes = np.ascontiguousarray(whole.reshape(-1, 4).T).reshape(-1)
        packed = np.frombuffer(zstd.compressed(planes).tobytes() + more, np.uint8)
        with pytest.raises(WireError, match="packed weights, version 1: ") as caught:
            WeightsUnpacker().unpacked(WeightsPacked(1, None, whole.size, zlib.crc32(frame), packed), MOST)
        assert caught.value.code == "packed"
        return str(caught.value)

    frame = b"".join(encode(learnt(1)))
    told(frame[:-4])
    told(bytes(4096))
    told(np.random.default_rng(0).bytes(4096))
    assert "unused data" in told(frame, b"more")
    assert "unused data" in told(frame, zstd.compressed(np.zeros(9, np.uint8)).tobytes())


def test_who_writes_to_weights_that_came_changes_nothing_of_the_next_ones() -> None:
    packer, end = WeightsPacker(), WeightsUnpacker()
    for version in range(4):
        message = packer.packed(learnt(version), version - 1 if version else None)
        assert isinstance(message, WeightsPacked)
        weights = end.unpacked(message, MOST)
        assert_same(weights, learnt(version))
        for tensor in weights.tensors.values():
            tensor[...] = 0


def test_an_end_keeps_the_frames_of_so_many_modules_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    end, packer = WeightsUnpacker(), WeightsPacker()
    for owner in (weights_packing, ends):
        monkeypatch.setattr(owner, "MOST_MODULES", 2)
    messages: list[Any] = [packer.packed(learnt(0, module), None) for module in "abc"]
    for message in messages[:2]:
        end.unpacked(message, MOST)
    with pytest.raises(WireError, match="those of 2 modules already, expected no more"):
        end.unpacked(messages[2], MOST)
    pair = running(said=hello(role="rollout", unpacks=True))
    pair.gateway._packer = packer
    for version in range(2):
        for module in "abc":
            pair.gateway.tell(learnt(version, module))
        assert [each.module for each in pair.to_host()] == ["a", "b", "c"]


def test_weights_that_are_too_large_for_the_other_end_are_refused_where_they_are_sent() -> None:
    pair = running(said=hello(role="rollout", unpacks=True, max_frame=1 << 16))
    pair.gateway._packer = WeightsPacker()
    with pytest.raises(WireError, match=r"weights: frame of \d+ bytes, expected at most 65536: .*max_frame="):
        pair.gateway.tell(learnt(0, count=1 << 15))


def test_threads_that_pack_several_versions_at_once_have_those_that_they_asked_for() -> None:
    packer, plain = WeightsPacker(), WeightsUnpacker()
    versions = [*range(6)]

    def packed(version: int) -> Any:
        packer.prepare(learnt(version))
        return packer.packed(learnt(version), None)

    with ThreadPoolExecutor(3) as pool:
        for version, message in zip(versions, pool.map(packed, versions), strict=True):
            assert_same(plain.unpacked(message, MOST), learnt(version))


def test_weights_are_packed_before_a_lock_is_held_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    packer, made = WeightsPacker(), list[int]()
    pack = weights_packing._packed
    monkeypatch.setattr(weights_packing, "_packed", lambda *args: made.append(args[0].version) or pack(*args))
    for version in range(3):
        packer.prepare(learnt(version))
    assert made == [0, 1, 2]
    assert isinstance(packer.packed(learnt(2), 1), WeightsPacked)
    assert made == [0, 1, 2]


@pytest.mark.parametrize("unpacks", [True, False])
def test_a_connection_packs_for_an_end_that_unpacks(unpacks: bool) -> None:
    said = hello(role="rollout", unpacks=unpacks)
    pair = running(said=said)
    pair.gateway._packer = WeightsPacker()
    taken: list[int] = []
    for version in range(3):
        pair.gateway.tell(learnt(version))
        pair.to_host(0)
        taken.append(len(pair.from_gateway))
        (weights,) = pair.to_host()
        assert_same(weights, learnt(version))
    assert (taken[1] < 0.7 * size_of(learnt(1))) == unpacks


def test_packed_weights_break_the_connection_of_an_end_that_does_not_unpack() -> None:
    pair, stream = running(said=hello(role="rollout")), StreamEnds()
    pair.gateway.tell(EXAMPLES["packed"])
    stream.trainer.tell(EXAMPLES["packed"])
    for (event,) in (pair.to_host(), stream.to_source()):
        assert isinstance(event, ConnectionBroken)
        assert "has not said that it unpacks" in str(event.error)
