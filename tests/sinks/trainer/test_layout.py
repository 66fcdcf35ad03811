"""The layout of a rollout's fragments, which each of them tells of anew."""

from dataclasses import replace
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from rollflow import Rollout
from rollflow.sinks.trainer.messages import layout_told, message_of_fragment
from rollflow.sinks.trainer.rollout_peer import RolloutPeer
from rollflow.stream.data.errors import WireError
from rollflow.stream.wire import TrainerSession

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
