"""Requests are taken once and answered once, however often connections break."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from property_examples import examples
from wire_ends import Ends, taken_from
from wire_messages import EXAMPLES, TOKEN, first_rows, hello, rows

from rollflow.stream import wire
from rollflow.stream.data.errors import WireError
from rollflow.stream.wire.session import TakenRequest

LANES = (0, 1)
ALL = 1 << 20  # bytes
SOME = st.integers(0, 1000) | st.just(0) | st.just(ALL)


class TwoEnds(RuleBasedStateMachine):
    """A gateway that asks, a host that answers, and a network that delivers some bytes and loses the others.

    The host steps environments, or makes whole fragments, whose turns are cut short now and then.

    taken    by lane: the numbers of the requests that the host took
    given    by lane: the numbers of the answers that the gateway handed over, each with what its arrays say
    """

    @initialize(role=st.sampled_from(["env", "rollout"]))
    def begin(self, role: str) -> None:
        self.said = hello(role=role)
        self.host_session = wire.HostSession(TOKEN)
        self.session: wire.GatewaySession | None = None
        self.taken: dict[int, list[int]] = {lane: [] for lane in LANES}
        self.given: dict[int, list[tuple[int, float]]] = {lane: [] for lane in LANES}
        self.working: dict[int, wire.Request] = {}
        self.failed: set[int] = set()
        self.late: list[tuple[wire.GatewayConnection, bytes]] = []
        self.ends = Ends(said=self.said, host_session=self.host_session)

    @precondition(lambda self: self.session is not None and len(self.session.under_way) < len(LANES))
    @rule(lane=st.sampled_from(LANES), reset=st.booleans())
    def ask(self, lane: int, reset: bool) -> None:
        assert self.session is not None
        if any(request.lane == lane for request in self.session.under_way):
            return
        number = self.session.next_number(lane)
        if self.said.role == "rollout":
            request: wire.Request = wire.Turn(lane, number)
        elif number == 1 or lane in self.failed or reset:
            self.failed.discard(lane)
            request = wire.Reset(lane, number, (number, lane), None)
        else:
            request = wire.Step(lane, number, np.array([number % 2, lane]))
        if self.ends.gateway.hello is not None and self.ends.gateway.phase.name != "HANDSHAKE":
            self.ends.gateway.ask(request)
        else:
            self.session.ask(request)  # between two connections

    @rule(lane=st.sampled_from(LANES), back=st.integers(0, 2))
    def cut(self, lane: int, back: int) -> None:
        is_running = self.session is not None and self.ends.gateway.phase.name == "RUNNING"
        if self.said.role == "rollout" and is_running and self.asked(lane) > back:
            self.ends.gateway.tell(wire.Cut(lane, self.asked(lane) - back))

    @precondition(lambda self: self.working)
    @rule(lane=st.sampled_from(LANES), fails=st.booleans())
    def answer(self, lane: int, fails: bool) -> None:
        request = self.working.pop(lane, None)
        if request is None:
            return
        answer: wire.Answer
        obs = np.full((2, 3), request.number, np.float32)
        if fails:
            answer = wire.Failed.of(request, ValueError(str(request.number)))
        elif isinstance(request, wire.Turn):
            answer = wire.Fragment(lane, request.number, {"obs": obs}, {})
        elif isinstance(request, wire.Reset):
            answer = first_rows(lane=lane, number=request.number, obs=obs)
        else:
            answer = rows(lane=lane, number=request.number, obs=obs)
        assert self.ends.host.answer(request, answer)

    @rule(count=SOME)
    def carry_to_gateway(self, count: int) -> None:
        self.take_at_gateway(self.ends.gateway, self.ends.to_gateway(count))

    @rule(count=SOME)
    def carry_to_host(self, count: int) -> None:
        self.take_at_host(self.ends.to_host(count))

    @rule()
    def carry_everything(self) -> None:
        for _ in range(3):
            self.carry_to_gateway(ALL)
            self.carry_to_host(ALL)

    @rule(lost=SOME, again=st.booleans())
    def lose_the_connection(self, lost: int, again: bool) -> None:
        old = self.ends
        data = old.from_host + taken_from(old.host)
        self.late.append((old.gateway, data[: max(0, len(data) - lost)]))
        assert all(isinstance(event, wire.ConnectionBroken) for event in old.host.ended())
        self.ends = Ends(said=self.said, host_session=self.host_session)
        if again:
            self.carry_everything()

    @precondition(lambda self: self.late)
    @rule(count=SOME, ends=st.booleans())
    def carry_late_bytes(self, count: int, ends: bool) -> None:
        gateway, data = self.late.pop(0)
        self.take_at_gateway(gateway, gateway.receive(data[:count], 0.0))
        if ends or not data:
            gateway.ended()
        else:
            self.late.append((gateway, data[count:]))

    @invariant()
    def each_is_taken_once_and_given_once_in_order(self) -> None:
        for lane in LANES:
            assert self.taken[lane] == list(range(1, len(self.taken[lane]) + 1))
            assert self.given[lane] == [(number, number) for number in range(1, len(self.given[lane]) + 1)]
            assert len(self.given[lane]) <= len(self.taken[lane]) <= len(self.given[lane]) + 1

    def teardown(self) -> None:
        """A connection that holds brings everything to its end."""
        self.ends = Ends(said=self.said, host_session=self.host_session)
        for _ in range(4):
            self.carry_to_gateway(ALL)
            self.carry_to_host(ALL)
            for lane in LANES:
                self.cut(lane, 0)
                self.answer(lane, False)
        self.carry_to_gateway(ALL)
        self.each_is_taken_once_and_given_once_in_order()
        assert self.session is not None
        assert not self.session.under_way
        for lane in LANES:
            assert len(self.given[lane]) == self.asked(lane)

    def asked(self, lane: int) -> int:
        """The number of the lane's last request."""
        assert self.session is not None
        return self.session.next_number(lane) - 1

    def take_at_gateway(self, gateway: wire.GatewayConnection, events: list[wire.Event]) -> None:
        for event in events:
            if isinstance(event, wire.Hello):
                if self.session is None:
                    self.session = wire.GatewaySession(TOKEN, event, LANES, (0, 2))
                gateway.welcome(self.session)
            elif isinstance(event, wire.Rows | wire.Fragment):
                obs = event.obs if isinstance(event, wire.Rows) else event.columns["obs"]
                self.given[event.lane].append((event.number, float(obs[0, 0])))
            else:
                assert isinstance(event, wire.Failed), event
                self.failed.add(event.lane)
                self.given[event.lane].append((event.number, float(event.text)))

    def take_at_host(self, events: list[wire.Event]) -> None:
        for event in events:
            if isinstance(event, wire.Cut):
                assert self.working[event.lane].number == event.number
            elif isinstance(event, wire.Reset | wire.Step | wire.Turn):
                if isinstance(event, wire.Step):
                    assert event.actions.tolist() == [event.number % 2, event.lane]
                assert event.lane not in self.working
                self.taken[event.lane].append(event.number)
                self.working[event.lane] = event
            else:
                assert isinstance(event, wire.Welcome), event


TestTwoEnds = TwoEnds.TestCase
TestTwoEnds.settings = settings(max_examples=examples(200), stateful_step_count=50, deadline=None)


def session_of_host(**changed: Any) -> wire.HostSession:
    session = wire.HostSession(TOKEN)
    session.begin(welcome(**changed), hello())
    return session


def welcome(**changed: Any) -> Any:
    return replace(EXAMPLES["welcome"], **changed)


def reset(number: int) -> wire.Reset:
    return wire.Reset(0, number, None, None)


def test_an_answer_of_a_session_that_is_over_is_not_waited_for() -> None:
    session = session_of_host()
    old, new = reset(1), reset(1)
    session.take(old)
    session.begin(welcome(), hello())  # the gateway was started again
    session.take(new)
    assert not session.waits_for(old)
    assert session.waits_for(new)


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        (
            {"lanes": (wire.LaneGrant(0, 2, 0, 0),)},
            r"lanes \[0\] of \[2\] slots, expected different ids, and \[2, 2\] slots",
        ),
        ({"lanes": (wire.LaneGrant(0, 2, 0, 0), wire.LaneGrant(0, 2, 2, 0))}, "expected different ids"),
        (
            {"lanes": (wire.LaneGrant(0, 2, 0, 1), wire.LaneGrant(1, 2, 2, 0))},
            "lane 0 at number 1, expected 0 in a new session",
        ),
    ],
)
def test_a_welcome_that_does_not_fit_is_refused(changed: dict[str, Any], told: str) -> None:
    with pytest.raises(WireError, match=told):
        session_of_host(**changed)


def test_a_session_goes_on_only_where_both_ends_stood() -> None:
    session = session_of_host()
    for number in range(1, 4):
        session.take(reset(number))
        session.keep(first_rows(number=number))

    def resumed(number: int, **changed: Any) -> None:
        lanes = (wire.LaneGrant(0, 2, 0, number), wire.LaneGrant(1, 2, 2, 0))
        session.begin(welcome(**{"resumed": True, "lanes": lanes} | changed), hello())

    resumed(2)
    resumed(3)
    for number in (1, 4):
        with pytest.raises(WireError, match=f"lane 0 at number {number}, expected 3 or 2"):
            resumed(number)
    with pytest.raises(WireError, match="resumes other lanes than this host's"):
        resumed(3, lanes=(wire.LaneGrant(0, 2, 0, 3), wire.LaneGrant(5, 2, 2, 0)))


def test_a_host_that_never_got_its_first_welcome_begins_with_the_second() -> None:
    session = wire.HostSession(TOKEN)
    session.begin(welcome(resumed=True), hello())
    assert session.take(reset(1)) is TakenRequest.NEW


@pytest.mark.parametrize("name", ["slots", "autoreset", "role", "observation_space", "agents"])
def test_a_host_that_is_not_what_it_was_can_not_go_on(name: str) -> None:
    session = wire.GatewaySession(TOKEN, hello(), LANES, (0, 2))
    other: dict[str, Any] = {"slots": (4,), "autoreset": "DISABLED", "role": "rollout", "agents": ("a",)}
    other |= {"observation_space": {"kind": "MultiBinary"}}
    session.check_same(hello(name="another name"))
    with pytest.raises(WireError, match=f"hello.{name} is not what it was when the session began"):
        session.check_same(hello(**{name: other[name]}))
