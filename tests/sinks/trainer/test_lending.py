"""Lent memory is written again once it was given back, and not before, whatever happens to the connection."""

import array
import os
import socket
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from memory_lending import Pair, file_of, files_mapped, numbers
from wire_messages import TOKEN, lent

from rollflow.sinks.trainer.lending import FragmentBorrower, FragmentLender
from rollflow.stream.data.blocks import BlockPool, SharedBlock
from rollflow.stream.data.errors import ColumnError, WireError
from rollflow.stream.net.descriptor_transport import Descriptor
from rollflow.stream.wire import Fragment, SenderSession

SIZE = 1 << 16
MUCH = 1 << 30


@pytest.fixture
def pair() -> Iterator[Callable[..., Pair]]:
    """Makes pairs, of a source that is new, or has had another connection before."""
    made: list[Pair] = []

    def make(most: int = MUCH, *, after: Pair | None = None) -> Pair:
        lender, session = (
            (FragmentLender(most), SenderSession(TOKEN)) if after is None else (after.lender, after.session)
        )
        made.append(Pair(lender, session))
        return made[-1]

    yield make
    for each in made:
        each.lose()


class Lane:
    """Fragments in blocks of a pool, as a lane has them."""

    def __init__(self) -> None:
        self.pool = BlockPool(SIZE, SharedBlock)

    def column(self, value: int) -> Any:
        _, block = self.pool.take()
        block[:] = value
        return block


@pytest.fixture
def ends(pair: Callable[..., Pair]) -> Pair:
    return pair()


@pytest.fixture
def lane() -> Lane:
    return Lane()


def test_an_array_in_shared_memory_is_seen_where_it_lies(ends: Pair, lane: Lane) -> None:
    column = lane.column(1)[64:640].view(np.float32).reshape(12, 12)
    ends.send(obs={"at": (column, column[3:])})
    (fragment,) = ends.received()
    first, rest = fragment.columns["obs"]["at"]
    np.testing.assert_array_equal(first, column)
    assert file_of(first) == file_of(column)
    assert file_of(rest) == file_of(column[3:])
    column[4] = 7  # as no rollout would do
    assert (first[4] == 7).all()


def test_tuples_come_as_tuples_each_time(ends: Pair, lane: Lane) -> None:
    for value in (1, 2):
        ends.send(obs=(lane.column(value), {"at": (numbers(0, 8),)}))
    first, second = (fragment.columns["obs"] for fragment in ends.received())
    for obs in (first, second):
        assert isinstance(obs, tuple)
        assert isinstance(obs[1]["at"], tuple)


def test_what_lies_elsewhere_is_copied_and_comes_whole(ends: Pair) -> None:
    columns = {"plain": numbers(0, 5000), "turned": numbers(1, 600).reshape(20, 30).T, "nothing": np.zeros((0, 3))}
    columns |= {"other end first": np.arange(10, dtype=">i4"), "truth": np.array([True, False])}
    ends.send(**columns)
    (fragment,) = ends.received()
    for name, column in columns.items():
        came = fragment.columns[name]
        np.testing.assert_array_equal(came, column)
        assert not came.size or file_of(came) is not None
    assert ends.lender.nbytes == sum(column.nbytes for column in columns.values())


def test_columns_may_be_views_of_one_array_that_fills_its_block(ends: Pair, lane: Lane) -> None:
    column = lane.column(1)
    ends.send(obs=column, seen=column)
    (fragment,) = ends.received()
    assert file_of(fragment.columns["obs"]) == file_of(fragment.columns["seen"]) == file_of(column)


def test_a_train_batch_is_copied_though_it_lies_in_shared_memory(ends: Pair, lane: Lane) -> None:
    column = lane.column(1)
    message = Fragment(0, 1, {"obs": column}, {"batch": True})
    ends.session.given = 1
    ends.lender.look_at(message)
    ends.lender.send(message)
    (batch,) = ends.received()
    batch.columns["obs"][:] = 9
    assert (column == 1).all()


@pytest.mark.parametrize("dtype", ["clongdouble", "U2", "S2", "O"])
def test_what_has_no_form_is_refused(ends: Pair, dtype: str) -> None:
    told = r"columns\['obs'\]: .* can't be sent; expected .* numpy arrays of bool, int, uint, float or complex"
    with pytest.raises(ColumnError, match=told):
        ends.send(seen=np.zeros(3), obs=np.zeros(3, dtype))


def test_a_block_is_written_again_only_once_it_was_given_back(ends: Pair, lane: Lane) -> None:
    ends.send(obs=lane.column(1))
    (fragment,) = ends.received()
    ends.session.done = ends.session.kept = 1  # which is not enough
    ends.send(obs=lane.column(2))
    assert len(lane.pool.blocks) == 2
    assert (fragment.columns["obs"] == 1).all()
    kept = fragment.columns["obs"][100:200:3]
    del fragment
    assert ends.give_back() == ()
    del kept
    assert ends.give_back() == (0,)
    assert (lane.column(3) == 3).all()
    assert len(lane.pool.blocks) == 2


def test_a_block_is_told_of_once_and_may_be_lent_more_than_once_at_a_time(ends: Pair, lane: Lane) -> None:
    column = lane.column(1)
    ends.send(obs=column[:8])
    ends.send(obs=column[8:16], more=column[16:])
    first, second = ends.received()
    del column, first
    assert ends.give_back() == (0,)
    assert len(lane.pool._free) == 0
    assert (second.columns["obs"] == 1).all()
    del second
    assert ends.give_back() == (0,)
    assert len(lane.pool._free) == 1
    assert ends.lender.nbytes == 0


def test_a_trainer_that_keeps_much_is_sent_copies(pair: Callable[..., Pair], caplog: pytest.LogCaptureFixture) -> None:
    ends, lane = pair(2 * SIZE), Lane()
    kept = []
    for value in range(4):
        ends.send(obs=lane.column(value))
        kept += ends.received()
    assert [file_of(fragment.columns["obs"]) is not None for fragment in kept] == [True, True, False, False]
    assert len(lane.pool.blocks) <= 3
    assert "still has 131072 bytes of fragments in shared memory, of at most 131072" in caplog.text
    del kept[0]
    ends.give_back()
    ends.send(obs=lane.column(4))
    kept += ends.received()
    assert file_of(kept[-1].columns["obs"]) is not None
    assert [int(fragment.columns["obs"][0]) for fragment in kept] == [1, 2, 3, 4]


def test_blocks_that_are_gone_are_forgotten_and_what_was_lent_in_them_is_not(pair: Callable[..., Pair]) -> None:
    others = files_mapped()
    ends, lane = pair(), Lane()
    ends.send(obs=lane.column(1))
    (held,) = ends.received()
    before = files_mapped() - others
    lane = Lane()  # that of another worker
    ends.send(obs=lane.column(2))
    (other,) = ends.received()
    assert len(files_mapped() - others - before) == 1
    assert (held.columns["obs"] == 1).all()
    del held
    ends.give_back()
    ends.send(obs=lane.column(3))
    ends.received()
    assert len(files_mapped() - others - before) == 2
    assert not before & files_mapped()
    assert (other.columns["obs"] == 2).all()


def test_blocks_that_there_are_no_more_are_forgotten_while_copies_are_sent(pair: Callable[..., Pair]) -> None:
    others = files_mapped()
    ends, gone, lane = pair(SIZE), Lane(), Lane()
    ends.send(obs=gone.column(1))
    assert ends.received()
    ends.give_back()
    ends.send(obs=lane.column(2))
    kept = ends.received()
    before = files_mapped() - others
    del gone
    ends.send(obs=lane.column(3))
    kept += ends.received()
    assert file_of(kept[1].columns["obs"]) is None
    assert (len(before), len(before & files_mapped())) == (2, 1)


def test_unsent_news_comes_with_the_next_fragment(ends: Pair, lane: Lane, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(ends.source, "send", Mock(side_effect=WireError("too large", "frame")))
        with pytest.raises(WireError, match="too large"):
            ends.send(obs=lane.column(1))
    assert ends.lender.nbytes == 0
    ends.session.given -= 1
    ends.send(obs=lane.column(2))
    (fragment,) = ends.received()
    assert (fragment.columns["obs"] == 2).all()


@pytest.mark.parametrize("is_forked", [False, True])
def test_what_was_lent_is_not_written_again_after_the_connection_is_lost_while_somebody_has_it(
    pair: Callable[..., Pair], ends: Pair, lane: Lane, is_forked: bool
) -> None:
    """Somebody has it here, or in a process that was forked off."""
    ends.send(obs=lane.column(1))
    held, lender = ends.received(), ends.lender
    here, there = socket.socketpair()
    if is_forked and not (pid := os.fork()):
        here.close()
        there.recv(1)
        os._exit(0)
    there.close()
    ends.lose()
    if is_forked:
        held.clear()
    later = pair(after=ends)
    later.send(obs=lane.column(2))
    (other,) = later.received()
    assert lender.nbytes == 2 * SIZE
    assert all((fragment.columns["obs"] == 1).all() for fragment in held)
    held.clear()
    here.close()
    if is_forked:
        os.waitpid(pid, 0)
    later.send(obs=lane.column(3))  # looks after what is over
    assert lender.nbytes == 2 * SIZE
    assert len(lane.pool._free) == 1
    assert (other.columns["obs"] == 2).all()


def test_a_connection_that_lent_nothing_leaves_nothing(pair: Callable[..., Pair], ends: Pair) -> None:
    open_before = len(os.listdir("/proc/self/fd"))
    lender = ends.lender
    ends.lose()
    later = pair(after=ends)
    later.send(obs=numbers(0, 10))
    assert len(lender._left) == 0
    later.lose()
    assert len(os.listdir("/proc/self/fd")) <= open_before


def test_descriptors_keep_their_order_when_bytes_come_one_by_one(ends: Pair, lane: Lane) -> None:
    wide = [lane.column(value) for value in range(70)]  # more than come at a time
    for value, column in enumerate(wide):
        ends.send(obs=column, copied=numbers(value, 20))
    relay, end = socket.socketpair()
    ends.source_end.write()
    fragments = []
    while True:
        try:
            data, told, _, _ = ends.far.recvmsg(1, 4096, socket.MSG_DONTWAIT)
        except BlockingIOError:
            if not ends.source_end.waits_to_write:
                break
            ends.source_end.write()
            continue
        relay.sendmsg([data], told)
        for _, _, fds in told:
            for fd in array.array("i", fds):
                os.close(fd)
        ends.trainer_end._sock, original = end, ends.trainer_end._sock
        end.setblocking(False)
        fragments += ends.received()
        ends.trainer_end._sock = original
    assert [int(fragment.columns["obs"][0]) for fragment in fragments] == list(range(70))
    for value, fragment in enumerate(fragments):
        np.testing.assert_array_equal(fragment.columns["copied"], numbers(value, 20))
    relay.close()
    end.close()


# What is refused


def unsealed(size: int) -> int:
    fd = os.memfd_create("other", os.MFD_CLOEXEC)
    os.ftruncate(fd, size)
    return fd


def sealed(size: int) -> int:
    block = SharedBlock(size)
    return os.dup(block.fd)


def lent_in(columns: bytes = b"\x80", **told: Any) -> Fragment:
    """A fragment whose columns are lent, by a header and the numbers of blocks."""
    return Fragment(0, 1, {}, {"lent": {"new": [], "gone": [], "blocks": [], "columns": columns, **told}})


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: unsealed(4096), "block 0 of 4096 bytes: its file has 4096, expected as many for good"),
        (lambda: sealed(100), "block 0 of 4096 bytes: its file has 100, expected as many for good"),
        (lambda: os.open("/dev/null", os.O_RDONLY), "block 0 of 4096 bytes: its file has 0, expected as many for good"),
    ],
)
def test_a_block_that_might_be_taken_away_is_refused(ends: Pair, make: Any, told: str) -> None:
    life, other = os.pipe()
    os.close(other)
    for fd in (life, make()):
        ends.source_end.hand_over(Descriptor(fd))
    ends.session.given = 1
    ends.source.send(lent_in(new=[[0, 4096]]))
    with pytest.raises(WireError, match=told):
        ends.received()


def test_blocks_that_nobody_has_named_are_refused(ends: Pair, lane: Lane) -> None:
    ends.send(obs=lane.column(1))
    ends.received()
    borrower = ends.borrower
    assert borrower is not None
    for nonsense in ({"blocks": [7]}, {"gone": [7]}):
        with pytest.raises(KeyError, match="7"):
            borrower.fragment(lent_in(**nonsense))
    with pytest.raises(WireError, match="no descriptor has come, expected one before what is said of it"):
        borrower.fragment(lent_in(new=[[1, 4096]]))
    with pytest.raises(KeyError, match="7"):
        ends.lender.take_back((7,))
    for count, index in ((SIZE, 0), (1, 1)):
        columns = lent({"obs": np.zeros(count, np.float32)}, (index, 0))
        with pytest.raises(WireError, match=f"expected no end behind block {index}'s") as caught:
            borrower.fragment(lent_in(columns, blocks=[0]))
        assert caught.value.code == "memory"


@pytest.mark.parametrize(
    ("packed", "told"),
    [
        (b"\x81\xa1a\xd4\x02\xc0", "ext value 2 of a NoneType, expected a list"),
        (b"\x81\xa1a\xd4\x01\xc0", "ext value 1 of a NoneType, expected a list"),
        (b"\x81\xa1a\xc7\x08\x01\x93\xa3<f4\x91\x01\x00", r"expected \[dtype, shape, index, offset\]"),
        (b"\x81\xa1a\xc7\x09\x01\x94\xa3<f4\x91\x01\x00\x04", "expected a multiple of 8"),
        (b"\x81\xa1a", "end inside a value"),
    ],
)
def test_columns_that_are_none_are_refused(pair: Callable[..., Pair], packed: bytes, told: str) -> None:
    borrower = pair().borrower
    assert isinstance(borrower, FragmentBorrower)
    with pytest.raises(WireError, match=told):
        borrower.fragment(lent_in(packed))


def test_flags_are_looked_at(ends: Pair, lane: Lane) -> None:
    ends.send(obs=lane.column(2).view(np.bool_))
    with pytest.raises(WireError, match=r"array \|b1\[65536\] has a byte 2, expected 0 or 1"):
        ends.received()


def test_descriptors_that_nobody_has_asked_for_are_refused_and_closed(ends: Pair) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for byte in (20).to_bytes(4, "little") + bytes(16):
        socket.send_fds(ends.near, [bytes([byte])], [0] * 60)
    while ends.trainer.error is None:
        assert ends.trainer_end.read(0.0) == []
    assert "descriptors that nobody has asked for, expected none" in str(ends.trainer.error)
    ends.trainer_end.close()
    assert len(os.listdir("/proc/self/fd")) <= before
