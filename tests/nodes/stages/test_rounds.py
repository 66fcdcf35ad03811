"""Rounds of one fragment of every lane: whatever the lanes' speeds, none is older than the bound, and none waits."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from rollflow.nodes.stages.rounds import FragmentCredits, FragmentRounds, LagBound, LaneGates
from rollflow.stream.data.column import Column
from rollflow.stream.data.errors import GraphError
from rollflow.stream.fragments.fragment import NoFragment


class Published(LagBound):
    """Knows the version by itself."""

    version = 0

    def lag(self, fragment: Any) -> int:
        return self.version - int(fragment.policy_version)


@dataclass(frozen=True)
class Given:
    lane: int
    sequence: int
    policy_version: int
    is_empty: bool = False
    num_steps: int = 1
    outline = SimpleNamespace(columns={"rewards": Column("rewards", np.zeros((1, 1)))})


def rounds_of(
    lanes: int, max_lag: int | None = None, prefetch: int = 0, *, has_fixed_lanes: bool = True
) -> tuple[FragmentRounds[Any], FragmentCredits]:
    lag = Published(lambda: {}, max_lag, "drop" if max_lag is None else "pace")
    environments: Any = SimpleNamespace(num_lanes=lanes, has_fixed_lanes=has_fixed_lanes)
    counting = SimpleNamespace(expect=lambda lanes: None)
    credits = FragmentCredits(environments, lag, prefetch, counting, None)
    return FragmentRounds(credits, lag, lambda fragment: None), credits


@dataclass
class SimulatedLane:
    index: int
    sequence: int = 0
    begun_with: int | None = None  # policy version, of a fragment that is under way

    @property
    def at_start(self) -> bool:
        return self.begun_with is None


@dataclass
class SimulatedRing:
    """Lanes that begin, give and leave in an order that is drawn, as far as the gate lets them.

    num_fragments    after so many a lane has given all
    """

    num_fragments: int
    draw: Callable[..., Any]
    lanes: list[SimulatedLane]
    lag: Published
    rounds: FragmentRounds[Any]
    credits: FragmentCredits
    given: Counter[int] = field(default_factory=Counter)

    def take(self) -> Given | NoFragment | None:
        """Go on until a lane gives something; None: all have left."""
        while self.lanes:
            can_go_on = [lane for lane in self.lanes if not lane.at_start or self.credits.admits(lane)]
            assert can_go_on, "the reader waits for lanes that may not go on"
            lane = self.draw(st.sampled_from(can_go_on))
            if lane.at_start:
                lane.begun_with = self.lag.version
            elif (given := self._given(lane)) is not None:
                return given
        return None

    def _given(self, lane: SimulatedLane) -> Given | NoFragment:
        assert lane.begun_with is not None
        fate = self.draw(st.sampled_from(["full"] * 6 + ["empty", "leaves with it", "leaves without"]))
        if fate == "leaves without":
            self.lanes.remove(lane)
            self.credits.leave(lane.index)
            self.credits.gone(lane.index, lane.sequence)
            return NoFragment(lane.index)
        given = Given(lane.index, lane.sequence, lane.begun_with, is_empty=fate == "empty")
        lane.sequence, lane.begun_with = lane.sequence + 1, None
        if fate == "leaves with it" or lane.sequence == self.num_fragments:
            self.lanes.remove(lane)
            self.credits.gone(lane.index, lane.sequence)
        self.given[lane.index] += not given.is_empty
        return given


def gather(rounds: Any, take: Callable[[], Any], release: Callable[[Sequence[int]], None]) -> None:
    for _ in rounds.missing(release):
        rounds.take(take(), release)


@given(lanes=st.integers(1, 4), ahead=st.integers(0, 2), data=st.data())
def test_every_round_has_one_fragment_of_every_lane_and_none_is_too_old(lanes: int, ahead: int, data: Any) -> None:
    rounds, credits = rounds_of(lanes, ahead, ahead)
    lag: Any = rounds.lag
    ring = SimulatedRing(6, data.draw, [SimulatedLane(index) for index in range(lanes)], lag, rounds, credits)
    handed: list[Given] = []
    for _ in range(12):
        gather(rounds, ring.take, credits.release)
        of_round = list(rounds.hand_out())
        lanes_of_round = [fragment.lane for fragment in of_round]
        assert len(set(lanes_of_round)) == len(lanes_of_round)
        assert {lane.index for lane in ring.lanes} <= set(lanes_of_round)  # no lane that is still there is left out
        handed += of_round
        lag.version += 1
    while of_round:  # those of later rounds, at the end
        gather(rounds, lambda: None, credits.release)
        of_round = list(rounds.hand_out())
        handed += of_round
    assert len({(fragment.lane, fragment.sequence) for fragment in handed}) == len(handed)
    assert Counter(fragment.lane for fragment in handed) == +ring.given


def test_a_lane_that_joins_is_in_the_round_that_is_being_made() -> None:
    rounds, credits = rounds_of(1, 1)
    given = iter([Given(0, 0, 0), Given(0, 1, 0), Given(1, 0, 0)])

    def take() -> Given:
        credits.lane_joined(SimulatedLane(1), fills_a_vacancy=False)
        return next(given)

    gather(rounds, take, lambda lanes: None)
    assert [each.lane for each in rounds.hand_out()] == [0, 1]
    credits.gone(1, 1)
    gather(rounds, lambda: None, lambda lanes: None)
    assert [(each.lane, each.sequence) for each in rounds.hand_out()] == [(0, 1)]


def test_after_the_last_lane_has_left_others_are_waited_for() -> None:
    rounds, credits = rounds_of(1, 1)
    credits.lane_left(SimulatedLane(0), was_the_last=True)
    credits.gone(0, 0)
    assert not rounds.is_full
    credits.lane_joined(SimulatedLane(1), fills_a_vacancy=True)
    given = iter([NoFragment(0), Given(1, 0, 0)])
    gather(rounds, lambda: next(given), lambda lanes: None)
    assert [each.lane for each in rounds.hand_out()] == [1]


@dataclass
class AbsentLanes:
    """Lanes in any order, some of which are absent for a while: they give nothing then, and begin nothing."""

    random: Random
    lanes: list[SimulatedLane]
    credits: FragmentCredits
    absent: list[SimulatedLane] = field(default_factory=list)

    def take(self) -> Given | NoFragment:
        """Go on until a lane gives a fragment, or is absent."""
        while True:
            if self.absent and self.random.random() < 0.2:
                self.credits.lane_back(self.absent.pop())
            there = [each for each in self.lanes if each not in self.absent]
            if len(there) > 1 and self.random.random() < 0.2:
                self.absent.append(self.random.choice(there))
                self.credits.lane_absent(self.absent[-1])
                return NoFragment(self.absent[-1].index)
            going = [each for each in there if not each.at_start or self.credits.admits(each)]
            assert going, "the reader waits in vain"
            for each in going:
                each.begun_with = 0
            lane = self.random.choice(going)
            if self.random.random() < 0.5:
                lane.sequence, lane.begun_with = lane.sequence + 1, None
                return Given(lane.index, lane.sequence - 1, 0)


@given(lanes=st.integers(2, 4), ahead=st.integers(0, 2), seed=st.integers(0, 1 << 32))
def test_rounds_go_on_without_lanes_that_are_absent(lanes: int, ahead: int, seed: int) -> None:
    rounds, credits = rounds_of(lanes, prefetch=ahead, has_fixed_lanes=False)
    simulated = [SimulatedLane(index) for index in range(lanes)]
    ring = AbsentLanes(Random(seed), simulated, credits)
    handed: list[Given] = []
    for _ in range(12):
        gather(rounds, ring.take, credits.release)
        of_round = list(rounds.hand_out())
        assert 1 <= len(of_round) <= lanes
        handed += of_round
    for lane in ring.absent:
        credits.lane_back(lane)
    rounds.give_back(credits.release)
    assert credits.limit == lanes * (1 + ahead)
    assert credits._begun == sum(not lane.at_start for lane in simulated)
    assert sorted((each.lane, each.sequence) for each in handed) == [
        (lane.index, sequence) for lane in simulated for sequence in range(lane.sequence)
    ]


def test_in_rounds_no_lane_begins_its_second_fragment_before_all_have_begun_their_first() -> None:
    (_, credits), asked = rounds_of(3), list[None]()
    credits.watch(lambda: asked.append(None))
    assert credits.admits(SimulatedLane(1))
    assert not credits.admits(SimulatedLane(1, 1))  # the others are still being reset
    assert credits.admits(SimulatedLane(2))
    assert not credits.admits(SimulatedLane(1, 1))
    assert not asked
    assert credits.admits(SimulatedLane(0))
    assert len(asked) == 1  # whoever was refused is asked about again
    assert not credits.admits(SimulatedLane(1, 1))  # there are as many as there are lanes
    credits.release([0])
    assert credits.admits(SimulatedLane(1, 1))


def test_in_rounds_a_lane_that_is_lost_before_it_has_begun_is_not_waited_for() -> None:
    (_, credits), asked = rounds_of(3), list[None]()
    credits.watch(lambda: asked.append(None))
    assert credits.admits(SimulatedLane(1))
    credits.lane_lost(0)
    credits.lane_lost(0)  # again
    assert not credits.admits(SimulatedLane(1, 1))
    assert credits.admits(SimulatedLane(2))
    assert len(asked) == 1
    assert credits.admits(SimulatedLane(1, 1))  # its credit goes to another


def test_ahead_of_the_reader_a_fast_lane_takes_what_credits_there_are() -> None:
    _, credits = rounds_of(2, prefetch=1)
    assert [credits.admits(SimulatedLane(1, sequence)) for sequence in range(5)] == [True, True, True, True, False]
    assert not credits.admits(SimulatedLane(0))
    credits.release([0])
    assert credits.admits(SimulatedLane(0))
    assert credits.admits(SimulatedLane(0))  # it had begun that one


def test_a_gate_of_any_class_hears_of_what_never_comes() -> None:
    environments: Any = SimpleNamespace(is_draining=False)
    gates, heard = LaneGates(environments), list[tuple[int, ...]]()
    gate, plain = (SimpleNamespace(admits=lambda lane: True, watch=lambda changed: None) for _ in range(2))
    gates.take([plain])  # has none of the methods
    assert not gates.wants_newest
    gate.leave, gate.gone, gate.wants_newest = lambda lane: heard.append((lane,)), lambda *of: heard.append(of), True
    gates.take([plain, gate])
    assert gates.wants_newest
    gates.fragment_missing(2)
    gates.lane_set_aside(2, 7)
    assert heard == [(2,), (2, 7)]
    gate.gone = lambda lane: None
    told = r"a gate of the rollout has gone\(lane\), expected .* gone\(lane, fragments\)"
    with pytest.raises(GraphError, match=told):
        gates.take([plain, gate])
