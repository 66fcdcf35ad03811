"""Who of a trainer's processes gets what, and when it is done with."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollflow.sinks.trainer.deal import Deal
from rollflow.stream.errors import RunError


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


# Loops that are followed


def followed(world_size: int, items: int, workers: int = 1) -> tuple[Deal, list[Any]]:
    deal, done = dealt(world_size, items)
    for hand in deal.hands:
        hand.begin("loop", workers, is_followed=True)
    return deal, done


def test_what_a_loop_is_given_is_taken_and_done_with_when_it_moves_on() -> None:
    deal, done = followed(1, 3)
    hand = deal.hands[0]
    shares = [hand.take(0) for _ in range(3)]
    assert deal.taken() == []
    assert hand.take_up(1, is_last=False) is shares[0]
    assert deal.taken() == []
    assert hand.take_up(1, is_last=True) is shares[0]
    assert (deal.taken(), done) == ([0], [])
    hand.move_on(1)
    hand.move_on(1)
    assert (deal.taken(), done) == ([], [0])
    with pytest.raises(RunError, match="expected one at a time"):
        hand.take_up(1, is_last=True)


def test_what_ranks_were_given_is_taken_whatever_others_are_at() -> None:
    deal, done = followed(2, 4)
    for hand in deal.hands:
        hand.take(0)
        hand.take(0)
    deal.hands[1].take_up(2, is_last=True)
    deal.hands[1].move_on(2)
    deal.hands[1].take_up(4, is_last=True)
    assert (deal.taken(), done) == ([1, 3], [])
    deal.hands[0].take_up(1, is_last=True)
    deal.move_on()
    assert (deal.taken(), done) == ([3], [0, 1])


def test_what_nobody_gets_is_taken_with_its_round() -> None:
    done: list[Any] = []
    deal = Deal(2, done.extend)
    deal.add([0], [1])  # type: ignore[list-item]
    deal.add([2])  # type: ignore[list-item]
    for number, hand in enumerate(deal.hands, start=1):
        hand.begin("loop", 1, is_followed=True)
        hand.take(0)
        hand.take_up(number, is_last=True)
        assert deal.taken() == [[0], [0, 2, 1]][number - 1]


def test_what_a_loop_that_has_ended_has_not_taken_is_for_the_next() -> None:
    deal, done = followed(1, 3)
    hand = deal.hands[0]
    for _ in range(3):
        hand.take(0)
    hand.take_up(1, is_last=True)
    hand.has_ended = True
    hand.leave(0)
    deal.finish()
    assert (deal.taken(), done) == ([0], [])
    hand.begin("another loop", 1, is_followed=True)
    assert [taken(deal, 0, 0) for _ in range(3)] == [1, 2, None]
    assert done == [0]


@given(st.lists(st.tuples(st.sampled_from(["take", "up", "on", "leave", "begin"]), st.integers(0, 1)), max_size=40))
def test_a_followed_loop_is_given_everything_once(steps: list[tuple[str, int]]) -> None:
    deal, done = followed(1, 8, workers=2)
    hand, loops = deal.hands[0], 0
    given_to: dict[int, list[Any]] = {0: [], 1: []}
    got: list[Any] = []
    for step, worker in steps:
        if step == "take":
            share = hand.take(worker)
            given_to[worker] += [] if share is None else [share]
        elif step == "up" and given_to[worker]:
            share = given_to[worker].pop(0)
            got += hand.take_up(share.number, is_last=True).items
        elif step == "on":
            hand.move_on()
        elif step == "leave":
            hand.leave(worker)
            given_to[worker] = []
        elif step == "begin":
            loops += 1
            hand.begin(loops, 2, is_followed=True)
            given_to = {0: [], 1: []}
        assert sorted([*done, *deal.taken()]) == sorted(got)
    hand.begin("last", 1, is_followed=True)
    rest = list(iter(lambda: taken(deal, 0, 0), None))
    assert rest == sorted(rest)
    assert sorted(got + rest) == list(range(8))
