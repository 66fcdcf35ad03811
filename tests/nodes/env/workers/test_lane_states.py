"""The state machine of lanes by itself, whatever nodes do with it: every lane is somewhere, and comes back once."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from property_examples import examples

from rollflow.nodes.env.environments import OneAgent
from rollflow.nodes.env.workers import watch
from rollflow.nodes.env.workers.lane_status import LanePhase, LaneStatus, RaisedError
from rollflow.nodes.env.workers.lanes_elsewhere import MAX_FAILURES, LanesElsewhere
from rollflow.nodes.env.workers.watch import Activity
from rollflow.stream import EnvError
from rollflow.stream.multi_agent.agent_part import AgentPart
from rollflow.stream.net import backoff

LENGTH = 2  # vector steps in a fragment
TIMEOUT_S, RESET_TIMEOUT_S = 8.0, 16.0
numbers = st.integers(0, 3)
BROKE = RaisedError("RuntimeError", "it broke", ["slot 0"], "Traceback …", "in a worker process")


class NoSpaces(OneAgent):
    def parts_of(self, *_: Any) -> tuple[AgentPart, ...]:
        return (AgentPart(("agent",), None, None),)  # type: ignore[arg-type]


class Supervisor(LanesElsewhere):
    """A node without environments: `progress` is a lane's."""

    def __init__(self, progress: Callable[[int], watch.ProgressMark], **times: float) -> None:
        self.progress = progress  # type: ignore[method-assign]
        super().__init__(None, kind=NoSpaces(), **times)

    def _made(self, *_: Any) -> list[Any]:
        return []


class Lanes(RuleBasedStateMachine):
    """A node without anything behind it: says what a lane's environments do next, and checks where each lane is."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.waits = ExitStack()
        self.waits.enter_context(backoff.waiting(clock=lambda: self.now))
        self.supervisor = Supervisor(self.progress, step_timeout=TIMEOUT_S, reset_timeout=RESET_TIMEOUT_S)
        self.out: dict[int, int] = {}  # by lane: how often it has come back and not been handed over since

    def progress(self, lane: int) -> watch.ProgressMark:
        phase = self.supervisor.remotes[lane].phase
        return 0, Activity.STEP if phase is LanePhase.STEPPING else Activity.RESET

    @initialize(count=st.integers(1, 4))
    def start(self, count: int) -> None:
        for index in range(count):
            self.supervisor.remotes.append(LaneStatus(index, LanePhase.READY))
            self.out[index] = 1

    def lane(self, number: int) -> LaneStatus:
        return self.supervisor.remotes[number % len(self.supervisor.remotes)]

    def come_back(self, lane: LaneStatus) -> None:
        self.supervisor.come_back(lane)
        self.out[lane.index] += 1

    @rule(number=numbers)
    def hand_over(self, number: int) -> None:
        lane = self.lane(number)
        if not self.out[lane.index]:
            return
        self.out[lane.index] -= 1
        self.supervisor.wait_for(lane)
        if lane.phase is LanePhase.READY:
            self.supervisor.begin(lane, LanePhase.STEPPING)
        elif lane.phase is LanePhase.ASIDE or self.supervisor.is_draining:
            self.supervisor.give_back(lane)
            self.out[lane.index] += 1
        else:
            self.supervisor.watch(lane)  # it may be resetting already, since it was lost while it was out

    @rule(number=numbers)
    def answer(self, number: int) -> None:
        lane = self.lane(number)
        if lane.phase in (LanePhase.STEPPING, LanePhase.RESETTING):
            if lane.phase is LanePhase.STEPPING:
                lane.made_step(LENGTH)
                assert lane.failures == 0 or lane.whole_steps < LENGTH
            lane.phase = LanePhase.READY
            if lane.is_waited:
                self.come_back(lane)

    @rule(number=numbers)
    def lose(self, number: int) -> None:
        lane = self.lane(number)
        if lane.phase in (LanePhase.LOST, LanePhase.ASIDE):
            return
        before = lane.failures
        self.supervisor.fail(lane)
        assert (lane.failures, lane.whole_steps) == (before + 1, 0)
        assert (lane.phase is LanePhase.ASIDE) == (lane.failures > MAX_FAILURES)
        if lane.phase is LanePhase.LOST:
            assert lane.due - self.now == pytest.approx(backoff.times.first_pause_s * 2**before)  # it grows
        if lane.is_waited and (lane.phase is LanePhase.ASIDE or self.supervisor.is_draining):
            self.supervisor.give_back(lane)
            self.out[lane.index] += 1

    @rule(seconds=st.floats(0.0, 10.0))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        for lane in self.supervisor.due():
            assert lane.phase is LanePhase.LOST
            assert lane.due <= self.now
            self.supervisor.begin(lane, LanePhase.RESETTING)
        for index in self.supervisor.deadlines.overdue():
            late = self.supervisor.remotes[index]
            assert late.is_waited
            assert late.phase in (LanePhase.STEPPING, LanePhase.RESETTING)
            self.lose(index)

    @precondition(lambda self: not self.supervisor.is_draining)
    @rule()
    def drain(self) -> None:
        self.supervisor.is_draining = True
        for lane in self.supervisor.remotes:
            if lane.is_waited and lane.phase is not LanePhase.STEPPING:
                self.supervisor.give_back(lane)
                self.out[lane.index] += 1

    @invariant()
    def every_lane_is_in_flight_or_out_and_never_both(self) -> None:
        lanes = self.supervisor.remotes
        assert self.supervisor.in_flight == sum(lane.is_waited for lane in lanes) >= 0
        assert all(self.out[lane.index] == (not lane.is_waited) for lane in lanes)

    @invariant()
    def something_comes_of_every_lane_in_flight(self) -> None:
        waited = [lane for lane in self.supervisor.remotes if lane.is_waited]
        assert all(lane.phase is not LanePhase.ASIDE for lane in waited)
        if waited:
            assert self.supervisor.patience is not None
        if self.supervisor.is_draining:
            assert list(self.supervisor.due()) == []
            assert all(lane.phase is LanePhase.STEPPING for lane in waited)

    @invariant()
    def the_next_look_is_never_later_than_what_is_due(self) -> None:
        lost = [lane.due - self.now for lane in self.supervisor.remotes if lane.phase is LanePhase.LOST]
        if lost and not self.supervisor.is_draining:
            assert self.supervisor.patience is not None
            assert 0.0 <= self.supervisor.patience <= max(0.0, min(lost))

    def teardown(self) -> None:
        """Drain the run: each lane that is in flight must come back."""
        if self.supervisor.remotes:
            self.supervisor.is_draining or self.drain()
            for lane in self.supervisor.remotes:
                self.answer(lane.index)
            assert self.supervisor.in_flight == 0
            assert set(self.out.values()) == {1}
        self.waits.close()


Lanes.TestCase.settings = settings(max_examples=examples(100), stateful_step_count=40, deadline=None)
TestLanes = Lanes.TestCase


def supervisor_of(count: int) -> Supervisor:
    supervisor = Supervisor(lambda lane: (0, Activity.STEP))
    supervisor.remotes += [LaneStatus(index, LanePhase.READY) for index in range(count)]
    return supervisor


@pytest.mark.wait_times(first_pause_s=0.0)
def test_lanes_that_begin_with_another_are_not_due_once_more() -> None:
    supervisor = supervisor_of(3)
    for lane in supervisor.remotes:
        supervisor.fail(lane)
    begun = []
    for lane in supervisor.due():
        begun.append(lane.index)
        for other in supervisor.remotes:  # as where they share a worker process
            if other.phase is LanePhase.LOST:
                supervisor.begin(other, LanePhase.MAKING)
    assert begun == [0]


def test_the_run_ends_where_every_lane_raised_before_it_made_a_step() -> None:
    supervisor = supervisor_of(3)
    for lane in supervisor.remotes[:2]:
        lane.raised = BROKE
        supervisor.check_first_errors()
    supervisor.set_aside(supervisor.remotes[2])  # with its host: it has not failed itself
    with pytest.raises(EnvError, match="had made a step: lane 0: RuntimeError: it broke; lane 1: Run") as raised:
        supervisor.check_first_errors()
    assert raised.value.__notes__ == ["slot 0", "lane 0, in a worker process:\nTraceback …"]


@pytest.mark.parametrize("what", ["a step", "a loss without an error", "the end of the run"])
def test_it_goes_on_where_that_may_be_an_accident(what: str) -> None:
    supervisor = supervisor_of(2)
    for lane in supervisor.remotes:
        lane.raised = BROKE
    if what == "a step":
        supervisor.remotes[1].made_step(LENGTH)
    elif what == "a loss without an error":
        supervisor.remotes[1].raised = None
        supervisor.fail(supervisor.remotes[1])
    else:
        supervisor.is_draining = True
    supervisor.check_first_errors()
