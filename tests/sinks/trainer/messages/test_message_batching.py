"""Train batches that differ in their values alone go as one, and each is still handed over once, as it was."""

import secrets
import select
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from feeding_rollouts import HASTY, trainer
from hypothesis import Phase, given, settings, strategies as st
from memory_lending import Pair, file_of, numbers, shared_address
from property_examples import examples
from remote_hosts import BrokenWire
from wire_ends import StreamEnds
from wire_messages import TOKEN, hello

from rollflow.sinks import TrainerStream
from rollflow.sinks.trainer.messages.item_message import message_of_batch, nbytes_of
from rollflow.sinks.trainer.messages.message_batching import MOST_ALIKE, MOST_BYTES, alike
from rollflow.sinks.trainer.rollout_side.lender import FragmentLender
from rollflow.sinks.trainer.rollout_side.resend_buffer import ResendBuffer
from rollflow.sinks.trainer.rollout_side.uplink import TrainerLink, TrainerUplink
from rollflow.sinks.trainer.trainer_side.borrower import fragments_in
from rollflow.stream.data.errors import WireError
from rollflow.stream.wire import (
    SESSION_BYTES,
    Fragment,
    LentLeaf,
    Series,
    SharedAddress,
    SourceSession,
    decode,
    encode,
    pack_columns,
    parse_trainer_address,
    series_parts,
)

METADATA = {
    "has_fixed_lanes": True,
    "spaces": [hello().observation_space],
    "is_stateful": False,
    "module": "none",
    "weights": {},
    "version": 0,
    "sends": "batches",
    "compressions": [],
}


def batch(number: int, **more: Any) -> dict[str, Any]:
    obs = np.full((3, 2), number, np.float32)
    return {"obs": {"at": obs, "on": np.array([True, False, number % 2 == 0])}, "turned": obs.T, "none": obs[:0]} | more


def message(number: int, **more: Any) -> Fragment:
    return message_of_batch(number, batch(number, **more))


def counts_of(messages: Sequence[Fragment], most: int = MOST_BYTES) -> int:
    found = alike(messages[0], messages[1:], most)
    return 1 if found is None else len(found.messages)


def test_those_that_are_alike_go_together() -> None:
    same = [message(number) for number in range(1, 6)]
    assert counts_of(same) == 5
    assert counts_of(same[:1]) == 1
    size = nbytes_of(same[0])
    assert [counts_of(same, most) for most in (size, 2 * size, 3 * size - 1, 0)] == [1, 2, 2, 1]


@pytest.mark.parametrize(
    "other",
    [
        message(2, more=np.zeros(1)),
        message(2, none=np.zeros((1, 2), np.float32)),
        message(2, turned=np.zeros((2, 3))),
        message(2, turned=[np.zeros((2, 3), np.float32)]),
        message(2, policy_version=np.array([3])),
        Fragment(0, 2, message(2).columns, {"batch": True}),
    ],
)
def test_one_that_is_not_ends_them(other: Fragment) -> None:
    assert counts_of([message(1), other, message(3)]) == 1
    assert counts_of([message(0), message(1), other, message(3)]) == 2


def test_they_come_as_they_were() -> None:
    big = [message(number, big=numbers(number, 10_000), other=np.arange(3, dtype=">i4")) for number in range(1, 4)]
    found = alike(big[0], big[1:], MOST_BYTES)
    assert found is not None
    series = decode(bytearray(b"".join(encode(found.joined()))))
    assert isinstance(series, Series)
    for mine, theirs in zip(big, fragments_in(series, None), strict=True):
        assert (mine.number, mine.rest) == (theirs.number, theirs.rest)
        np.testing.assert_equal(theirs.columns, mine.columns)
        for leaf in (theirs.columns["big"], theirs.columns["obs"]["at"]):
            assert leaf.flags.writeable
            assert leaf.flags.aligned


def test_what_is_lent_together_is_given_back_when_all_of_it_is_let_go() -> None:
    ends = Pair(FragmentLender(1 << 20), SourceSession(TOKEN))
    sent = [message(number, big=numbers(number, 2_000)) for number in range(1, 4)]
    found = alike(sent[0], sent[1:], MOST_BYTES)
    assert found is not None
    ends.session.given = 3
    ends.lender.send_alike(found)
    assert ends.lender.nbytes == sum(map(nbytes_of, sent))
    came = ends.received()
    np.testing.assert_equal([each.columns for each in came], [each.columns for each in sent])
    assert file_of(came[0].columns["big"]) is not None
    came[1].columns["big"][:] = 7  # as a trainer may, to what is its own
    np.testing.assert_equal([each.columns for each in came[::2]], [each.columns for each in sent[::2]])
    last = came.pop().columns["obs"]["on"]
    came.clear()
    assert ends.give_back() == ()
    del last
    assert ends.give_back() == (0,)
    assert ends.lender.nbytes == 0
    ends.lose()


def test_more_than_may_be_lent_comes_as_copies() -> None:
    sent = [message(number, big=numbers(number, 2_000)) for number in range(1, 5)]
    ends = Pair(FragmentLender(3 * nbytes_of(sent[0])), SourceSession(TOKEN))
    ends.session.given, came = 4, []
    for begin in (0, 2):
        found = alike(sent[begin], [sent[begin + 1]], MOST_BYTES)
        assert found is not None
        ends.lender.send_alike(found)
        came += ends.received()
    np.testing.assert_equal([each.columns for each in came], [each.columns for each in sent])
    assert [file_of(each.columns["big"]) is not None for each in came] == [True, True, False, False]
    ends.lose()


class BatchFeed:
    """A source of numbered batches of so many numbers each, in a thread of its own.

    is_ready    whether all are there before the first is sent
    """

    def __init__(self, address: Any, count: int, size: int = 100, *, is_ready: bool = False) -> None:
        target = parse_trainer_address(str(address))
        self.session, self.kept = SourceSession(secrets.token_bytes(SESSION_BYTES)), ResendBuffer(1 << 30)
        self._count, self._size, self._is_ready = count, size, is_ready
        shares = isinstance(target, SharedAddress)
        told = METADATA | {"shares_memory": shares}
        self.link = TrainerUplink(
            TrainerLink(target, HASTY, lender=FragmentLender(1 << 26) if shares else None),
            lambda: hello(
                role="source",
                slots=(1,),
                session=self.session.token,
                nonce=secrets.token_bytes(32),
                metadata=told,
            ),
            self.session,
            self.kept,
            lambda version, weights: False,
        )
        self._thread = threading.Thread(target=self._run)
        self._has_left = False

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self.link.bell.fileno(), select.POLLIN)
        if not self._is_ready:
            self._give()
        while self.session.done < self._count and not self._has_left:
            poll.poll(100)
            self.link.bell.silence()

    def _give(self) -> None:
        for number in range(1, self._count + 1):
            self.kept.add(message(number, big=numbers(number, self._size)), 1, 1)
            self.session.given = number
            self.link.wake()
        self.link.finish()

    def __enter__(self) -> "BatchFeed":
        if self._is_ready:
            self._give()
        self.link.start()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._has_left = True
        self._thread.join()
        self.link.close("the end")
        self.link.release()


@settings(max_examples=examples(6), phases=[Phase.explicit, Phase.generate])
@given(cuts=st.lists(st.integers(0, 60_000), max_size=5))
def test_connections_that_are_cut_lose_nothing_and_double_nothing(cuts: list[int]) -> None:
    left = list(cuts)
    with trainer(limits=HASTY, prefetch=30) as stream:
        wire = BrokenWire(stream.address, lambda: left.pop() if left else None)
        try:
            with BatchFeed(wire.address, 200):
                taken = list(stream)
        finally:
            wire.close()
    for number, came in enumerate(taken, 1):
        np.testing.assert_equal(came, batch(number, big=numbers(number, 100)))
    assert len(taken) == 200


def test_several_come_as_one(counts: list[int]) -> None:
    with shared_address() as address, TrainerStream(address, prefetch=30, limits=HASTY) as stream:
        with BatchFeed(address, 200):
            taken = list(stream)
    for number, came in enumerate(taken, 1):
        np.testing.assert_equal(came, batch(number, big=numbers(number, 100)))
    assert (sum(counts), len(taken)) == (200, 200)
    assert max(counts) > 1
    assert max(counts) <= MOST_ALIKE


LARGE = MOST_BYTES // numbers(0, 1).nbytes  # numbers of a batch that is as large as small ones may be together


@pytest.mark.parametrize(
    ("is_shared", "size", "most"),
    [(True, LARGE // 5, 4), (True, LARGE, 3), (False, LARGE // 5, 4), (False, LARGE, 1)],
)
def test_larger_ones_come_as_one_through_shared_memory(
    counts: list[int], is_shared: bool, size: int, most: int
) -> None:
    with shared_address() as shared:
        address = shared if is_shared else "tcp://127.0.0.1:0"
        with TrainerStream(address, prefetch=11, limits=HASTY) as stream:
            with BatchFeed(stream.address, 12, size, is_ready=True):
                taken = [came["big"][0].item() for came in stream]
    assert taken == [numbers(number, 1)[0] for number in range(1, 13)]
    assert max(counts) == most


# What is refused


def series(**changed: Any) -> Series:
    packed = pack_columns({"a": LentLeaf(np.dtype("f4"), (4,), 0, 0), "b": LentLeaf(np.dtype("?"), (3,), 0, 16)})
    told = {"count": 2, "blocks": (), "stride": 24, "columns": packed, "data": np.zeros(43, np.uint8)}
    return Series(**{"lane": 0, "number": 1, "rest": {}} | told | changed)


NONE = pack_columns({"a": LentLeaf(np.dtype("f4"), (0,), 0, 0)})


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"stride": 16}, "stride 16, expected a multiple of 8 of at least 19 bytes"),
        ({"stride": 28}, "stride 28, expected a multiple of 8"),
        ({"stride": 32}, "does not lie in its blocks, of .43. bytes"),
        ({"stride": 1 << 52}, "does not lie in its blocks"),
        ({"count": 3}, "3 of LentLeaf.* at every 24 bytes does not lie in its blocks"),
        ({"data": np.full(43, 2, np.uint8)}, r"array \|b1\[3\] has a byte 2, expected 0 or 1"),
        ({"data": None}, "series with data and blocks, or with none of them"),
        ({"blocks": (0,)}, "series with data and blocks, or with none of them"),
        ({"blocks": (0,), "data": None}, "series through a socket that no memory is shared by"),
        ({"columns": b"\x01"}, "lent.columns is 1, expected a map"),
        (
            {"columns": pack_columns({"a": [LentLeaf(np.dtype("f4"), (0,), 0, 0)] * 300}), "count": 1000},
            "1000 trees of 302 nodes, expected at most 262144",
        ),
    ],
)
def test_a_series_whose_arrays_lie_nowhere_or_in_each_other_is_refused(changed: dict[str, Any], told: str) -> None:
    assert len(fragments_in(series(), None)) == 2
    assert len(fragments_in(series(columns=NONE, count=1000, stride=0), None)) == 1000
    with pytest.raises(WireError, match=told):
        fragments_in(series(**changed), None)


def test_a_flag_in_a_later_one_is_looked_at() -> None:
    data = np.zeros(43, np.uint8)
    data[24 + 16] = 2
    with pytest.raises(WireError, match="has a byte 2"):
        series_parts(series(), [data])


@pytest.mark.parametrize(
    ("window", "number", "code"), [(3, 1, "credit"), (None, 3, ""), (3, 3, "credit"), (8, 3, ""), (8, 0, "message")]
)
def test_a_series_that_goes_too_far_is_refused_and_none_of_it_taken(window: int | None, number: int, code: str) -> None:
    ends = StreamEnds(given=10)
    ends.known.window = window
    frame = encode(series(count=4, number=max(1, number), data=np.zeros(91, np.uint8)))
    if number == 0:
        frame = [b"".join(frame).replace(b"\xa5count\x04", b"\xa5count\x00")]
    (event,) = ends.trainer.receive(b"".join(frame), 0.0)
    error = ends.trainer.error
    if code:
        assert error is not None
        assert error.code == code
    else:
        assert isinstance(event, Series)
    assert ends.known.taken == (0 if code else number + 3)


def test_a_source_sends_the_next_ones_alone() -> None:
    ends = StreamEnds(given=3)
    four = series(count=4, data=np.zeros(91, np.uint8))
    with pytest.raises(WireError, match="fragment 4, expected 3 at most"):
        ends.source.send(four)
    ends.source.send(series(count=2))
    assert ends.source.next == 3
    (came,) = ends.to_trainer()
    assert isinstance(came, Series)
    assert ends.known.taken == 2
