"""Ranks get items in turn, and a round is done with when all have moved on from it."""

from typing import Any

import pytest
from hypothesis import given, strategies as st

from rollflow.sinks.trainer.ranks.rank_dispatch import RankDispatch
from rollflow.stream.data.errors import RunError


def dispatched(world_size: int, items: int) -> tuple[RankDispatch, list[Any]]:
    done: list[Any] = []
    dispatch = RankDispatch(world_size, done.extend)
    for item in range(items):
        dispatch.add([item])  # type: ignore[list-item]  # a number will do
    return dispatch, done


def taken(dispatch: RankDispatch, rank: int, worker: int) -> Any:
    share = dispatch.queues[rank].take(worker)
    return None if share is None else share.items[0]


def test_ranks_get_as_many_in_turn() -> None:
    dispatch, _ = dispatched(2, 5)
    for rank in (0, 1):
        dispatch.queues[rank].begin("loop", 1)
    assert [taken(dispatch, 0, 0) for _ in range(3)] == [0, 2, None]
    assert [taken(dispatch, 1, 0) for _ in range(3)] == [1, 3, None]
    assert list(dispatch.left_over()) == [[4]]


def test_a_round_is_done_when_every_rank_has_moved_on() -> None:
    dispatch, done = dispatched(2, 4)
    for rank in (0, 1):
        dispatch.queues[rank].begin("loop", 1)
        taken(dispatch, rank, 0)
        taken(dispatch, rank, 0)
    dispatch.queues[0].be_done_with(0, 2)
    assert done == []
    dispatch.queues[1].be_done_with(0, 1)
    assert done == [0, 1]
    dispatch.queues[1].be_done_with(0, 2)
    assert done == [0, 1, 2, 3]


@pytest.mark.parametrize("asking", [(0, 1, 0, 1), (1, 0, 1, 0), (1, 1, 0, 0)])
def test_whoever_asks_first_a_loop_gets_its_items_in_order(asking: tuple[int, ...]) -> None:
    dispatch, _ = dispatched(1, 4)
    dispatch.queues[0].begin("loop", 2)
    got: dict[int, list[Any]] = {0: [], 1: []}
    for worker in asking:
        got[worker].append(taken(dispatch, 0, worker))
    assert got == {0: [0, 2], 1: [1, 3]}


def test_what_a_worker_had_is_for_others_and_never_done_twice() -> None:
    dispatch, done = dispatched(1, 4)
    queue = dispatch.queues[0]
    queue.begin("loop", 2)
    assert [taken(dispatch, 0, 0), taken(dispatch, 0, 1), taken(dispatch, 0, 0)] == [0, 1, 2]
    queue.be_done_with(0, 1)
    queue.leave(0)
    assert queue.begin("another loop", 1)
    assert [taken(dispatch, 0, 0) for _ in range(4)] == [1, 2, 3, None]
    queue.be_done_with(0, 3)
    assert done == [0, 1, 2, 3]


def test_once_the_loop_has_ended_requests_prove_nothing_and_its_end_does() -> None:
    dispatch, done = dispatched(1, 3)
    queue = dispatch.queues[0]
    queue.begin("loop", 2)
    assert [taken(dispatch, 0, 0), taken(dispatch, 0, 1), taken(dispatch, 0, 0)] == [0, 1, 2]
    queue.has_ended = True
    queue.be_done_with(0, 2)
    queue.leave(0)
    assert done == []
    dispatch.finish()
    assert sorted(done) == [0, 1, 2]


def test_a_loop_has_as_many_workers_as_it_began_with() -> None:
    dispatch, _ = dispatched(1, 3)
    queue = dispatch.queues[0]
    assert queue.begin("loop", 2)
    with pytest.raises(RunError, match="workers is 5, expected 2: the loop has begun with so many"):
        queue.begin("loop", 5)
    assert not queue.begin("loop", 2)
    assert [taken(dispatch, 0, worker) for worker in (0, 1, 0)] == [0, 1, 2]


@given(st.lists(st.tuples(st.sampled_from(["take", "done", "leave", "begin"]), st.integers(0, 1)), max_size=40))
def test_nothing_is_lost_and_nothing_is_done_twice(steps: list[tuple[str, int]]) -> None:
    dispatch, done = dispatched(1, 8)
    queue, loops = dispatch.queues[0], 0
    queue.begin(loops, 2)
    counts = {0: 0, 1: 0}
    for step, worker in steps:
        if step == "take":
            counts[worker] += taken(dispatch, 0, worker) is not None
        elif step == "done":
            queue.be_done_with(worker, counts[worker])
        else:
            if step == "begin":
                loops += 1
                queue.begin(loops, 2)
                counts = {0: 0, 1: 0}
            else:
                queue.leave(worker)
                counts[worker] = 0
    queue.begin("last", 1)
    rest = []
    while (item := taken(dispatch, 0, 0)) is not None:
        rest.append(item)
    assert sorted(rest) == rest
    assert sorted(done + rest) == list(range(8))


# Loops that are followed


def followed(world_size: int, items: int, workers: int = 1) -> tuple[RankDispatch, list[Any]]:
    dispatch, done = dispatched(world_size, items)
    for queue in dispatch.queues:
        queue.begin("loop", workers, is_followed=True)
    return dispatch, done


def test_what_a_loop_is_given_is_taken_and_done_with_when_it_moves_on() -> None:
    dispatch, done = followed(1, 3)
    queue = dispatch.queues[0]
    shares = [queue.take(0) for _ in range(3)]
    assert dispatch.taken() == []
    assert queue.take_up(1, is_last=False) is shares[0]
    assert dispatch.taken() == []
    assert queue.take_up(1, is_last=True) is shares[0]
    assert (dispatch.taken(), done) == ([0], [])
    queue.move_on(1)
    queue.move_on(1)
    assert (dispatch.taken(), done) == ([], [0])
    with pytest.raises(RunError, match="expected one at a time"):
        queue.take_up(1, is_last=True)


def test_what_ranks_were_given_is_taken_whatever_others_are_at() -> None:
    dispatch, done = followed(2, 4)
    for queue in dispatch.queues:
        queue.take(0)
        queue.take(0)
    dispatch.queues[1].take_up(2, is_last=True)
    dispatch.queues[1].move_on(2)
    dispatch.queues[1].take_up(4, is_last=True)
    assert (dispatch.taken(), done) == ([1, 3], [])
    dispatch.queues[0].take_up(1, is_last=True)
    dispatch.move_on()
    assert (dispatch.taken(), done) == ([3], [0, 1])


def test_what_nobody_gets_is_taken_with_its_round() -> None:
    done: list[Any] = []
    dispatch = RankDispatch(2, done.extend)
    dispatch.add([0], [1])  # type: ignore[list-item]
    dispatch.add([2])  # type: ignore[list-item]
    for number, queue in enumerate(dispatch.queues, start=1):
        queue.begin("loop", 1, is_followed=True)
        queue.take(0)
        queue.take_up(number, is_last=True)
        assert dispatch.taken() == [[0], [0, 2, 1]][number - 1]


def test_what_a_loop_that_has_ended_has_not_taken_is_for_the_next() -> None:
    dispatch, done = followed(1, 3)
    queue = dispatch.queues[0]
    for _ in range(3):
        queue.take(0)
    queue.take_up(1, is_last=True)
    queue.has_ended = True
    queue.leave(0)
    dispatch.finish()
    assert (dispatch.taken(), done) == ([0], [])
    queue.begin("another loop", 1, is_followed=True)
    assert [taken(dispatch, 0, 0) for _ in range(3)] == [1, 2, None]
    assert done == [0]


@given(st.lists(st.tuples(st.sampled_from(["take", "up", "on", "leave", "begin"]), st.integers(0, 1)), max_size=40))
def test_a_followed_loop_is_given_everything_once(steps: list[tuple[str, int]]) -> None:
    dispatch, done = followed(1, 8, workers=2)
    queue, loops = dispatch.queues[0], 0
    given_to: dict[int, list[Any]] = {0: [], 1: []}
    got: list[Any] = []
    for step, worker in steps:
        if step == "take":
            share = queue.take(worker)
            given_to[worker] += [] if share is None else [share]
        elif step == "up" and given_to[worker]:
            share = given_to[worker].pop(0)
            got += queue.take_up(share.number, is_last=True).items
        elif step == "on":
            queue.move_on()
        elif step == "leave":
            queue.leave(worker)
            given_to[worker] = []
        elif step == "begin":
            loops += 1
            queue.begin(loops, 2, is_followed=True)
            given_to = {0: [], 1: []}
        assert sorted([*done, *dispatch.taken()]) == sorted(got)
    queue.begin("last", 1, is_followed=True)
    rest = list(iter(lambda: taken(dispatch, 0, 0), None))
    assert rest == sorted(rest)
    assert sorted(got + rest) == list(range(8))
