"""Fragments that lie alike in shared memory go as one, and each is still one that comes and is let go by itself."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from lending import Pair, numbers
from wire_messages import TOKEN

from rollflow.sinks.trainer.item_message import nbytes_of
from rollflow.sinks.trainer.shared.lender import Lender
from rollflow.stream.errors import WireError
from rollflow.stream.wire import (
    Fragment,
    Lent,
    LentLeaf,
    Series,
    SourceSession,
    pack_columns,
    series_parts,
)


def lent_fragment(number: int, *, lane: int = 0, size: int = 3, **rest: Any) -> Fragment:
    begun = {"sequence": number - 1, "episode_start": np.array([-number]), "episode_number": np.array([number])}
    told = {"num_rows": 2, "forms": {}, "space": 0, "layout": {"lookback": 1}}
    columns = {"obs": numbers(number, size), "done": np.array([True, False]), "none": np.zeros((2, 0))}
    return Fragment(lane, number, columns, begun | told | rest)


def kinds_sent(ends: Pair, messages: Sequence[Fragment]) -> list[tuple[str, int]]:
    """Have messages sent; what goes, and which number it begins with."""
    ends.session.given = len(messages)
    ends.lender.send(messages)
    return [(each.kind, each.number) for each in ends.to_trainer() if isinstance(each, Lent | Series | Fragment)]


def test_fragments_that_lie_alike_go_together_and_are_given_back_one_by_one() -> None:
    ends = Pair(Lender(1 << 20), SourceSession(TOKEN))
    sent = [lent_fragment(number) for number in range(1, 5)]
    ends.session.given = 4
    ends.lender.send(sent)
    came = ends.received()
    for mine, theirs in zip(sent, came, strict=True):
        assert (theirs.lane, theirs.number) == (0, mine.number)
        np.testing.assert_equal(theirs.rest, mine.rest)
        np.testing.assert_equal(theirs.columns, mine.columns)
    del theirs
    assert ends.give_back() == ()
    for expected in (2, 0, 3, 1):
        came[expected] = sent[expected]
        assert ends.give_back() == (expected,)
    assert ends.lender.nbytes == 0
    ends.lose()


@pytest.mark.parametrize(
    "other",
    [
        lent_fragment(3, lane=1),
        lent_fragment(3, size=4),
        lent_fragment(3, num_rows=1),
        lent_fragment(3, forms={"obs": [np.zeros(0)]}),
        lent_fragment(3, layout={"lookback": 2}),
        lent_fragment(3, losses=[[1, np.zeros(1, np.int64), np.zeros(1, np.int64), "gone"]]),
        Fragment(0, 3, {}, lent_fragment(3).rest),
        Fragment(0, 3, lent_fragment(3).columns, {"sequence": 2}),
    ],
)
def test_a_fragment_that_does_not_ends_them(other: Fragment) -> None:
    ends = Pair(Lender(1 << 20), SourceSession(TOKEN))
    others = [lent_fragment(number) for number in (1, 2, 4, 5)]
    expected = [("series", 1), ("lent", 3), ("series", 4)]
    assert kinds_sent(ends, [*others[:2], other, *others[2:]]) == expected
    ends.lose()


def test_fragments_beyond_what_may_be_lent_come_as_copies_in_their_order() -> None:
    sent = [lent_fragment(number) for number in range(1, 5)]
    ends = Pair(Lender(2 * nbytes_of(sent[0])), SourceSession(TOKEN))
    assert kinds_sent(ends, sent) == [("series", 1), ("fragment", 3), ("fragment", 4)]
    ends.lose()


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
