"""Items of rollouts at a trainer: their layouts, which go together, and that none is lost before it is handed over."""

import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from types import FrameType
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from feeding_rollouts import trainer
from taken_batches import taken_of

from rollflow import Rollout
from rollflow.sinks.trainer.messages import layout_told, message_of_fragment
from rollflow.sinks.trainer.rollout_peer import ArrivedItem, PeerLife, RolloutPeer
from rollflow.sinks.trainer.stream import ArrivalOrder, LaneRounds
from rollflow.stream.data.errors import WireError
from rollflow.stream.net.backoff import WaitReminder
from rollflow.stream.wire import Fragment, TrainerSession

ACTIONS = gym.spaces.Discrete(2)


TOLD: dict[str, Any] = {"num_slots": 2, "num_rows": 8, "lookback": 1, "resets_next_step": False, "episodes": "x"}


@pytest.mark.parametrize("more", [{}, {"new": 1}, {"new": np.zeros(3)}])
def test_the_same_is_the_one_before_whatever_else_is_told(more: dict[str, Any]) -> None:
    before = layout_told(TOLD, ACTIONS)
    assert layout_told(TOLD | more, ACTIONS, before) is before


@pytest.mark.parametrize(
    ("name", "value"),
    [("num_slots", 3), ("num_rows", 4), ("lookback", 0), ("resets_next_step", True), ("episodes", "y")],
)
def test_another_is_another(name: str, value: Any) -> None:
    layout = layout_told(TOLD | {name: value}, ACTIONS, before := layout_told(TOLD, ACTIONS))
    if name == "episodes":
        assert layout.episode_id(0, 1) != before.episode_id(0, 1)
    else:
        assert getattr(layout, name) == value


@pytest.mark.parametrize(
    ("told", "why"),
    [
        (None, "layout is None, expected a map"),
        (TOLD | {"episodes": np.zeros(2)}, r"layout.episodes is an array <f8\[2\], expected a string"),
        (TOLD | {"lookback": True}, "layout.lookback is True, expected a whole number"),
        ({name: value for name, value in TOLD.items() if name != "num_rows"}, "layout.num_rows is None"),
    ],
)
def test_what_is_none_is_refused_behind_a_good_one_as_well(told: Any, why: str) -> None:
    for before in (None, layout_told(TOLD, ACTIONS)):
        with pytest.raises(WireError, match=why):
            layout_told(told, ACTIONS, before)


def test_what_comes_of_a_lane_that_is_gone_is_refused() -> None:
    source = RolloutPeer(TrainerSession(bytes(16)))
    source.action_space, source.lanes = ACTIONS, {0, 1, 2}
    source.set_aside(1, 4)
    with pytest.raises(WireError, match="fragment 5 of lane 1, which is set aside behind 4, expected another lane"):
        source.read(Fragment(1, 5, {}, {}))
    with pytest.raises(WireError, match="lane 3 is set aside, expected one of 3"):
        source.set_aside(3, 0)


def test_of_lanes_that_come_and_go_those_that_there_are_are_remembered() -> None:
    with Rollout("CartPole-v1", num_envs=2, fragment_length=4, num_fragments=1, seed=0) as rollout:
        (fragment,) = rollout.fragments()
    spaces = [fragment.observation_space]
    message = message_of_fragment(1, fragment, spaces)
    source = RolloutPeer(TrainerSession(bytes(16)))
    source.spaces, source.action_space = spaces, fragment.layout.action_space
    source.has_fixed_lanes, source.lanes = False, {0, 1}
    for number, lane in enumerate([0, 1, 7, 8, 9], 1):
        arrived = source.read(replace(message, number=number, lane=lane))
        assert (arrived.number, arrived.lane) == (number, lane)
    assert source._layouts.keys() == {0, 1}
    source.set_aside(1, 2)
    source.move_on(1)
    source.move_on(2)
    source.keep()
    source.take_lane(5)
    assert source._layouts.keys() == {0}


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
    stream = trainer()
    stream._supply, door = supply, stream._listener
    source = door.sources[bytes(16)] = RolloutPeer(TrainerSession(bytes(16)))
    source.lanes, source.life = {0}, PeerLife.HERE
    source.session.taken = 9
    door.come.add(bytes(16))
    door.arrived += [ArrivedItem(source, number, {}, None) for number in range(1, 5)]
    left, taken = lines, list[int]()

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal left
        if not frame.f_code.co_filename.endswith("trainer/stream.py"):
            return None
        left -= event == "line"
        if not left:
            sys.settrace(None)
            raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    with suppress(KeyboardInterrupt):
        stream._try_take(WaitReminder(None))
    sys.settrace(None)
    door.arrived += [ArrivedItem(source, number, {}, None) for number in range(5, 7)]
    while items := stream._try_take(WaitReminder(None)):
        taken += [item.number for item in items]
        stream._taken.clear()
    assert taken == [1, 2, 3, 4, 5, 6]
    door.close(None)
    return left <= 0
