"""Fragments that are alike go as one, and each is still one that comes, and is let go in shared memory, by itself."""

from collections.abc import Sequence
from contextlib import ExitStack, suppress
from typing import Any

import numpy as np
import pytest
from feeding_rollouts import SHORT, graph_over, in_lanes_order, running
from memory_lending import Pair, numbers, shared_address
from remote_rollouts import await_that
from wire_messages import TOKEN

from rollflow.nodes import Rollout
from rollflow.sinks import TrainerStream
from rollflow.sinks.trainer.messages.item_message import nbytes_of
from rollflow.sinks.trainer.messages.message_batching import MOST_ALIKE, MOST_BYTES, alike
from rollflow.sinks.trainer.rollout_side.lender import FragmentLender
from rollflow.sinks.trainer.trainer_side.borrower import fragments_in
from rollflow.stream import Fragment as StreamFragment
from rollflow.stream.data.errors import WireError
from rollflow.stream.wire import (
    Fragment,
    Lent,
    LentLeaf,
    Series,
    SourceSession,
    decode,
    encode,
    pack_columns,
    series_parts,
)


def lent_fragment(number: int, *, lane: int = 0, size: int = 3, **rest: Any) -> Fragment:
    """One that has nothing more to say than every one, unless it is given here."""
    begun = {"sequence": number - 1, "episode_start": np.array([-number]), "episode_number": np.array([number])}
    told = {"num_rows": 2, "forms": {}, "space": 0, "layout": {"lookback": 1, "episodes": f"lane {lane}"}}
    columns = {"obs": numbers(number, size), "done": np.array([True, False]), "none": np.zeros((2, 0))}
    return Fragment(lane, number, columns, begun | told | rest)


OTHERS = [
    lent_fragment(3, size=4),
    lent_fragment(3, num_rows=1),
    lent_fragment(3, forms={"obs": [np.zeros(0)]}),
    lent_fragment(3, losses=[[1, np.zeros(1, np.int64), np.zeros(1, np.int64), "gone"]]),
    Fragment(0, 3, {}, lent_fragment(3).rest),
    Fragment(0, 3, lent_fragment(3).columns, {"sequence": 2}),
]


def check_same(came: Sequence[Fragment], sent: Sequence[Fragment]) -> None:
    for theirs, mine in zip(came, sent, strict=True):
        assert (theirs.lane, theirs.number) == (mine.lane, mine.number)
        np.testing.assert_equal(theirs.rest, mine.rest)
        np.testing.assert_equal(theirs.columns, mine.columns)


def kinds_sent(ends: Pair, messages: Sequence[Fragment]) -> list[tuple[str, int]]:
    """Have messages sent; what goes, and which number it begins with."""
    ends.session.given = len(messages)
    ends.lender.send(messages)
    return [(each.kind, each.number) for each in ends.to_trainer() if isinstance(each, Lent | Series | Fragment)]


def test_fragments_that_lie_alike_go_together_and_are_given_back_one_by_one() -> None:
    ends = Pair(FragmentLender(1 << 20), SourceSession(TOKEN))
    sent = [lent_fragment(number, lane=number % 3) for number in range(1, 5)]
    ends.session.given = 4
    ends.lender.send(sent)
    came = ends.received()
    check_same(came, sent)
    assert ends.give_back() == ()
    for expected in (2, 0, 3, 1):
        came[expected] = sent[expected]
        assert ends.give_back() == (expected,)
    assert ends.lender.nbytes == 0
    ends.lose()


@pytest.mark.parametrize("other", OTHERS)
def test_a_fragment_that_does_not_ends_them(other: Fragment) -> None:
    ends = Pair(FragmentLender(1 << 20), SourceSession(TOKEN))
    others = [lent_fragment(number) for number in (1, 2, 4, 5)]
    expected = [("series", 1), ("lent", 3), ("series", 4)]
    assert kinds_sent(ends, [*others[:2], other, *others[2:]]) == expected
    ends.lose()


def test_fragments_beyond_what_may_be_lent_come_as_copies_in_their_order() -> None:
    sent = [lent_fragment(number) for number in range(1, 5)]
    ends = Pair(FragmentLender(2 * nbytes_of(sent[0])), SourceSession(TOKEN))
    assert kinds_sent(ends, sent) == [("series", 1), ("fragment", 3), ("fragment", 4)]
    ends.lose()


def as_sent(messages: Sequence[Fragment]) -> list[Fragment | Series]:
    """Send a message through a socket, and return what comes out."""
    sent: list[Fragment | Series] = []
    while messages:
        found = alike(messages[0], messages[1:], MOST_BYTES)
        sent.append(messages[0] if found is None else found.joined())
        messages = messages[1 if found is None else len(found.messages) :]
    came = [decode(bytearray(b"".join(encode(each)))) for each in sent]
    assert all(isinstance(each, Fragment | Series) for each in came)
    return came  # type: ignore[return-value]


def test_fragments_go_together_through_a_socket_as_well() -> None:
    sent = [lent_fragment(number, lane=number // 2) for number in range(1, 5)]
    (series,) = as_sent(sent)
    check_same(fragments_in(series, None), sent)
    check_same(fragments_in(series, None), sent)  # nothing of the message is used up


@pytest.mark.parametrize("other", OTHERS)
def test_a_fragment_that_is_not_alike_ends_them_there_too(other: Fragment) -> None:
    sent = [lent_fragment(1), lent_fragment(2), other, lent_fragment(4), lent_fragment(5)]
    came = as_sent(sent)
    assert [each.kind for each in came] == ["series", "fragment", "series"]
    check_same([part for each in came for part in fragments_in(each, None)], sent)


def with_more() -> dict[str, Any]:
    """Return fresh fields that only some fragments have."""
    slots = np.zeros(1, np.int64)
    return {
        "losses": [[1, slots, slots, "gone"]],
        "infos": [{"a": np.zeros(2), "_a": np.ones(2, bool)}],
        "finals": {"rows": [1], "counts": [1], "slots": slots, "observations": np.zeros((1, 2)), "infos": None},
        "custom_data": [[0, 0, {"a": np.zeros(2)}]],
        "forms": {"obs": [np.zeros((0, 2))]},
    }


@pytest.mark.parametrize("name", with_more())
def test_those_that_have_more_to_say_go_by_themselves_however_alike_they_are(name: str) -> None:
    sent = [lent_fragment(number, **{name: with_more()[name]}) for number in (1, 2, 3)]
    check_same(as_sent(sent), sent)  # type: ignore[arg-type]
    ends = Pair(FragmentLender(1 << 20), SourceSession(TOKEN))
    assert kinds_sent(ends, sent) == [("lent", 1), ("lent", 2), ("lent", 3)]
    ends.lose()


def test_what_each_says_for_itself_counts_as_well() -> None:
    sent = [lent_fragment(number, episode_start=np.zeros(1 << 10, np.int64)) for number in (1, 2, 3)]
    size = nbytes_of(sent[0]) + sum(sent[0].rest[name].nbytes for name in ("episode_start", "episode_number"))
    assert alike(sent[0], sent[1:], 2 * size - 1) is None
    assert [len(found.messages) for most in (2 * size, 3 * size) if (found := alike(sent[0], sent[1:], most))] == [2, 3]


@pytest.mark.parametrize("lane", [-1, 1 << 53, True, 1.0, None, "0"])
def test_a_series_with_a_lane_that_is_none_is_refused(lane: Any) -> None:
    told = Series(7, 1, 2, (), 24, PACKED, {"each": [{}, {"lane": 8}]}, np.zeros(43, np.uint8))
    assert [each.lane for each in fragments_in(told, None)] == [7, 8]
    told.rest["each"][1]["lane"] = lane  # type: ignore[index]
    with pytest.raises(WireError, match=r"series: rest.each.lane is .*, expected a whole number"):
        fragments_in(told, None)


def cartpoles() -> Rollout:
    return Rollout("CartPole-v1", num_envs=4, lanes=2, fragment_length=8, num_fragments=20, seed=0)


def columns_of(fragment: StreamFragment) -> dict[str, Any]:
    return {name: column.rows(0, fragment.last_row) for name, column in fragment.columns.items()}


class _Lost(Exception):
    """A trainer that is gone without a goodbye."""


@pytest.mark.parametrize("scheme", ["tcp", "unix", "shm"])
def test_those_of_several_lanes_that_a_restarted_trainer_finds_ready_come_together(
    scheme: str, counts: list[int]
) -> None:
    told: dict[str, Any] = {"yields": "fragments", "prefetch": 30, "limits": SHORT}
    with shared_address() as shared, ExitStack() as stack:
        address = "tcp://127.0.0.1:0" if scheme == "tcp" else shared.replace("shm", scheme, 1)
        with suppress(_Lost), TrainerStream(address, **told) as stream:
            feed = stack.enter_context(running(*graph_over(cartpoles(), stream.address)))
            taken = [next(iter(stream))]
            state = stream.state_dict()
            await_that(lambda: feed.sink._session.given == 40)
            raise _Lost
        counts.clear()
        again = TrainerStream(str(stream.address), **told)
        again.load_state_dict(state)
        with again:
            taken += again
    with cartpoles() as rollout:
        for came, made in zip(in_lanes_order(taken), in_lanes_order(list(rollout.fragments())), strict=True):
            assert (came.lane, came.sequence) == (made.lane, made.sequence)
            np.testing.assert_equal(columns_of(came), columns_of(made))
            assert [episode.id_ for episode in came.episodes()] == [episode.id_ for episode in made.episodes()]
    assert sum(counts) == 39
    assert max(counts) == MOST_ALIKE


PACKED = pack_columns({"a": LentLeaf(np.dtype("f4"), (4,), 0, 0), "b": LentLeaf(np.dtype("?"), (3,), 0, 16)})


@pytest.mark.parametrize(
    ("sizes", "told"),
    [
        ((40, 40, 40), "3 blocks, expected as many for each of 2 fragments"),
        ((40,), "1 blocks, expected as many for each of 2 fragments"),
        ((40, 18), "does not lie in its blocks, of .18. bytes"),
    ],
)
def test_a_series_of_fragments_that_do_not_lie_in_blocks_of_their_own_is_refused(
    sizes: tuple[int, ...], told: str
) -> None:
    lent = Series(0, 1, 2, tuple(range(len(sizes))), 0, PACKED, {}, None)
    assert len(series_parts(lent, [np.zeros(19, np.uint8)] * 4)) == 2
    with pytest.raises(WireError, match=told):
        series_parts(lent, [np.zeros(size, np.uint8) for size in sizes])
    flags = [np.zeros(19, np.uint8), np.full(19, 2, np.uint8)]
    with pytest.raises(WireError, match="has a byte 2"):
        series_parts(lent, flags)
