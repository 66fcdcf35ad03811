"""Who of a trainer's processes gets what, and when it is done with."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollflow.sinks.trainer.deal import Deal


def dealt(world_size: int, items: int) -> tuple[Deal, list[Any]]:
    done: list[Any] = []
    deal = Deal(world_size, done.extend)
    for item in range(items):
        deal.add([item])  # type: ignore[list-item]  # a number will do
    return deal, done


def taken(deal: Deal, rank: int, worker: int) -> Any:
    share = deal.hands[rank].take(worker)
    return None if share is None else share.items[0]


def test_ranks_get_as_many_in_turn() -> None:
    deal, _ = dealt(2, 5)
    for rank in (0, 1):
        deal.hands[rank].begin("loop", 1)
    assert [taken(deal, 0, 0) for _ in range(3)] == [0, 2, None]
    assert [taken(deal, 1, 0) for _ in range(3)] == [1, 3, None]
    assert list(deal.left_over()) == [[4]]


def test_a_round_is_done_when_every_rank_has_moved_on() -> None:
    deal, done = dealt(2, 4)
    for rank in (0, 1):
        deal.hands[rank].begin("loop", 1)
        taken(deal, rank, 0)
        taken(deal, rank, 0)
    deal.hands[0].be_done_with(0, 2)
    assert done == []
    deal.hands[1].be_done_with(0, 1)
    assert done == [0, 1]
    deal.hands[1].be_done_with(0, 2)
    assert done == [0, 1, 2, 3]


@pytest.mark.parametrize("asking", [(0, 1, 0, 1), (1, 0, 1, 0), (1, 1, 0, 0)])
def test_whoever_asks_first_a_loop_gets_its_items_in_order(asking: tuple[int, ...]) -> None:
    deal, _ = dealt(1, 4)
    deal.hands[0].begin("loop", 2)
    got: dict[int, list[Any]] = {0: [], 1: []}
    for worker in asking:
        got[worker].append(taken(deal, 0, worker))
    assert got == {0: [0, 2], 1: [1, 3]}


def test_what_a_worker_had_is_for_others_and_never_done_twice() -> None:
    deal, done = dealt(1, 4)
    hand = deal.hands[0]
    hand.begin("loop", 2)
    assert [taken(deal, 0, 0), taken(deal, 0, 1), taken(deal, 0, 0)] == [0, 1, 2]
    hand.be_done_with(0, 1)
    hand.leave(0)
    assert hand.begin("another loop", 1)
    assert [taken(deal, 0, 0) for _ in range(4)] == [1, 2, 3, None]
    hand.be_done_with(0, 3)
    assert done == [0, 1, 2, 3]


def test_once_the_loop_has_ended_requests_prove_nothing_and_its_end_does() -> None:
    deal, done = dealt(1, 3)
    hand = deal.hands[0]
    hand.begin("loop", 2)
    assert [taken(deal, 0, 0), taken(deal, 0, 1), taken(deal, 0, 0)] == [0, 1, 2]
    hand.has_ended = True
    hand.be_done_with(0, 2)
    hand.leave(0)
    assert done == []
    deal.finish()
    assert sorted(done) == [0, 1, 2]


@given(st.lists(st.tuples(st.sampled_from(["take", "done", "leave", "begin"]), st.integers(0, 1)), max_size=40))
def test_nothing_is_lost_and_nothing_is_done_twice(steps: list[tuple[str, int]]) -> None:
    deal, done = dealt(1, 8)
    hand, loops = deal.hands[0], 0
    hand.begin(loops, 2)
    counts = {0: 0, 1: 0}
    for step, worker in steps:
        if step == "take":
            counts[worker] += taken(deal, 0, worker) is not None
        elif step == "done":
            hand.be_done_with(worker, counts[worker])
        else:
            if step == "begin":
                loops += 1
                hand.begin(loops, 2)
                counts = {0: 0, 1: 0}
            else:
                hand.leave(worker)
                counts[worker] = 0
    hand.begin("last", 1)
    rest = []
    while (item := taken(deal, 0, 0)) is not None:
        rest.append(item)
    assert sorted(rest) == rest
    assert sorted(done + rest) == list(range(8))
