"""Items of rollouts at a trainer: their layouts, which go together, and that none is lost before it is handed over."""

import sys
from contextlib import suppress
from dataclasses import replace
from types import FrameType
from typing import Any
from unittest.mock import Mock

import gymnasium as gym
import numpy as np
import pytest
from feeding_rollouts import trainer

from rollflow import Fragment as RolloutFragment, Rollout, TrainerStream
from rollflow.nodes.offloaded.fragment_message import PartSpaces
from rollflow.sinks.trainer.messages import layout_told, message_of_fragment
from rollflow.sinks.trainer.rollout_peer import ArrivedItem, PeerLife, RolloutPeer
from rollflow.sinks.trainer.stream import ItemRounds
from rollflow.stream.data.errors import RunError, WireError
from rollflow.stream.multi_agent.agent_part import AgentPart
from rollflow.stream.net.backoff import WaitReminder
from rollflow.stream.wire import Fragment, TrainerSession

ACTIONS = gym.spaces.Discrete(2)


TOLD: dict[str, Any] = {"num_slots": 2, "num_rows": 8, "lookback": 1, "resets_next_step": False, "episodes": "x"}


@pytest.mark.parametrize(
    ("told", "why"),
    [
        (None, "layout is None, expected a map"),
        (TOLD | {"episodes": np.zeros(2)}, r"layout.episodes is an array <f8\[2\], expected a string"),
        (TOLD | {"lookback": True}, "layout.lookback is True, expected a whole number"),
        ({name: value for name, value in TOLD.items() if name != "num_rows"}, "layout.num_rows is None"),
    ],
)
def test_a_layout_is_the_one_before_if_it_is_the_same_and_refused_if_it_is_none(told: Any, why: str) -> None:
    before = layout_told(TOLD, ACTIONS)
    assert layout_told(TOLD | {"new": 1}, ACTIONS, before) is before
    assert layout_told(TOLD | {"episodes": "y"}, ACTIONS, before) is not before
    with pytest.raises(WireError, match=why):
        layout_told(told, ACTIONS, before)


def test_what_comes_of_a_lane_that_is_gone_is_refused() -> None:
    source = RolloutPeer(TrainerSession(bytes(16)))
    source.lanes = {0, 1, 2}
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
    part = AgentPart(("agent",), spaces[0], fragment.layout.action_space)
    source.lanes = {0, 1}
    source.rollout = replace(source.rollout, parts=[PartSpaces(part, spaces)], has_fixed_lanes=False)
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


def taken_of(rounds: ItemRounds, *present: RolloutPeer) -> list[int]:
    """Have a round taken of what waits: the numbers of its items."""
    taken, rounds.waiting = rounds.take(lambda: present)
    return [item.number for item in taken]


def test_what_is_left_of_a_rollout_that_has_gone_is_not_waited_to_be_more() -> None:
    rounds = ItemRounds(None, by_lane=False)
    large, small = RolloutPeer(TrainerSession(bytes(16))), RolloutPeer(TrainerSession(bytes(range(16))))
    large.lanes, small.lanes = set(range(8)), {0}
    large.life, small.life = PeerLife.LEFT, PeerLife.HERE
    one, *others = ArrivedItem(large, 0, {}, None), *(ArrivedItem(small, number, {}, None) for number in range(1, 5))
    rounds.waiting = rounds.joined([one])
    assert taken_of(rounds, small) == []
    rounds.waiting = rounds.joined(others)
    assert [taken_of(rounds, small) for _ in range(4)] == [[0, 1], [2], [3], [4]]


def test_rounds_are_taken_that_are_whole() -> None:
    rounds, source = ItemRounds(2, by_lane=False), RolloutPeer(TrainerSession(bytes(16)))
    items = [ArrivedItem(source, number, {}, None) for number in range(1, 8)]
    rounds.waiting = rounds.joined(items[:5])
    assert [taken_of(rounds, source) for _ in range(3)] == [[1, 2], [3, 4], []]
    rounds.waiting = rounds.joined(items[5:])
    assert [taken_of(rounds, source), taken_of(rounds), taken_of(rounds)] == [[5, 6], [7], []]  # nothing more comes
    rounds, lanes = ItemRounds(1, by_lane=True), (2, 0, 2, 1, 0)
    items = [ArrivedItem(source, n, Mock(spec=RolloutFragment, lane=lane), None) for n, lane in enumerate(lanes)]
    rounds.waiting = rounds.joined(items)
    assert [taken_of(rounds, source), taken_of(rounds, source)] == [[0, 1, 3], [2, 4]]  # as they came


@pytest.mark.parametrize(("count", "by_lane"), [(2, False), (None, False), (1, True)], ids=["2", "lanes", "rounds"])
def test_an_interrupt_while_items_are_taken_loses_none(count: int | None, by_lane: bool) -> None:
    """The interrupt comes before each line in turn."""
    lines = 1
    while _is_interrupted(ItemRounds(count, by_lane=by_lane), lines):
        lines += 1
    assert lines > 20


def source_of(stream: TrainerStream, *items: Any) -> RolloutPeer:
    """A rollout that is here, and of which these items have come."""
    door, source = stream._listener, RolloutPeer(TrainerSession(bytes(16)), connection=Mock())
    source.lanes, source.life, source.session.taken = {0}, PeerLife.HERE, 9
    door.sources[bytes(16)] = source
    door.come.add(bytes(16))
    door.arrived += [ArrivedItem(source, number, item, None) for number, item in enumerate(items, 1)]
    return source


def _is_interrupted(rounds: ItemRounds, lines: int) -> bool:
    """Take items, and have an interrupt come before a line; False: there are fewer."""
    stream = trainer()
    source, door = source_of(stream, *[{}] * 4), stream._listener
    stream._rounds = rounds
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


def test_what_is_left_out_before_a_batch_that_fails_is_done_with_together_with_the_next() -> None:
    with trainer() as stream:
        source = source_of(stream, *(Mock(spec=RolloutFragment, lane=0, is_empty=each) for each in (True, False)))
        stream._item_maker = Mock(**{"item_of.side_effect": RunError("none")})
        stream._rounds = ItemRounds(2, by_lane=False)
        for _ in range(2):
            with pytest.raises(RunError, match="none"):
                stream._try_next(WaitReminder(None))
            stream.refuse("was never handed over")
            source.connection.refuse.assert_not_called()
            stream.put_back()
            stream._move_on()
            assert (source.session.done, source.session.kept) == (0, 0)
            assert stream.state_dict()["sources"][bytes(16).hex()]["done"] == 0
        stream._item_maker.item_of.side_effect = [None]  # a batch without steps
        stream._try_next(WaitReminder(None))
        assert (source.session.done, source.session.kept) == (2, 2)
        stream._listener.sources.clear()
