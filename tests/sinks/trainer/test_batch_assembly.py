"""Which items go together, and that none is lost between those that have come and those that are handed over."""

import sys
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any

import pytest
from feeding_rollouts import SHORT
from taken_batches import taken_of

from rollflow.sinks.trainer.intake import ArrivalOrder, Intake, LaneRounds
from rollflow.sinks.trainer.listener import TrainerListener
from rollflow.sinks.trainer.rollout_peer import ArrivedItem, PeerLife, RolloutPeer
from rollflow.sinks.trainer.staleness import StalenessBound
from rollflow.stream.net.backoff import WaitReminder
from rollflow.stream.wire import TrainerSession


def test_what_is_left_of_a_rollout_that_has_gone_is_not_waited_to_be_more() -> None:
    supply = ArrivalOrder(None)
    large, small = RolloutPeer(TrainerSession(bytes(16))), RolloutPeer(TrainerSession(bytes(range(16))))
    large.lanes, small.lanes = set(range(8)), {0}
    large.life, small.life = PeerLife.LEFT, PeerLife.HERE
    one, *others = ArrivedItem(large, 1, {}, None), *(ArrivedItem(small, number, {}, None) for number in range(1, 5))
    supply.waiting = supply.joined([one])
    assert taken_of(supply, [small]) == []
    supply.waiting = supply.joined(others)
    assert [taken_of(supply, [small]) for _ in range(4)] == [[[one, others[0]]], *([[other]] for other in others[1:])]


def test_as_many_sets_are_taken_as_are_whole() -> None:
    supply, source = ArrivalOrder(2), RolloutPeer(TrainerSession(bytes(16)))
    items = [ArrivedItem(source, number, {}, None) for number in range(1, 8)]
    supply.waiting = supply.joined(items[:5])
    assert taken_of(supply, [source]) == [items[:2], items[2:4]]
    assert taken_of(supply, [source]) == []
    supply.waiting = supply.joined(items[5:])
    assert taken_of(supply, [source]) == [items[4:6]]
    assert [taken_of(supply, []), taken_of(supply, [])] == [[items[6:]], []]  # nothing more comes


@pytest.mark.parametrize(
    "supply", [lambda: ArrivalOrder(2), lambda: ArrivalOrder(None), LaneRounds], ids=["2", "lanes", "rounds"]
)
def test_an_interrupt_while_items_are_taken_loses_none(supply: Callable[[], ArrivalOrder | LaneRounds]) -> None:
    """The interrupt comes before each line in turn."""
    lines = 1
    while _is_interrupted(supply(), lines):
        lines += 1
    assert lines > 20


def _is_interrupted(supply: ArrivalOrder | LaneRounds, lines: int) -> bool:
    """Take items, and have an interrupt come before a line; False: there are fewer."""
    door = TrainerListener(secret=None, tls=None, limits=SHORT, bound=StalenessBound(None, "drop"))
    source = door.sources[bytes(16)] = RolloutPeer(TrainerSession(bytes(16)))
    source.lanes, source.life = {0}, PeerLife.HERE
    source.session.taken = 9
    door.come.add(bytes(16))
    door.arrived += [ArrivedItem(source, number, {}, None) for number in range(1, 5)]
    intake = Intake(door, supply, is_gathered=True, sources=1, acks=False, where=str)
    left, taken = lines, list[int]()

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal left
        if not frame.f_code.co_filename.endswith(("intake.py", "supply.py")):
            return None
        left -= event == "line"
        if not left:
            sys.settrace(None)
            raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    with suppress(KeyboardInterrupt):
        intake.try_take(WaitReminder(None))
    sys.settrace(None)
    door.arrived += [ArrivedItem(source, number, {}, None) for number in range(5, 7)]
    while items := intake.try_take(WaitReminder(None)):
        taken += [item.number for item in items]
        intake.forget(items)
    assert taken == [1, 2, 3, 4, 5, 6]
    door.close(None)
    return left <= 0
