"""A host of role "rollout": what it is told beside its turns, before them and after a connection was lost."""

import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from property_examples import examples
from wire_ends import Ends, error_of, frame_as, greeted, running, taken_from
from wire_messages import EXAMPLES, hello

from rollflow.stream.data.errors import WireError
from rollflow.stream.wire import (
    ConnectionBroken,
    ConnectionPhase,
    Cut,
    Failed,
    Fragment,
    Hello,
    Settings,
    Turn,
    Welcome,
    decode,
)

SETTINGS = Settings({"fragment_length": 32, "lookback": 4})
LANES = (0, 1)
ALL = 1 << 20  # bytes
SOME = st.integers(0, 1000) | st.just(0) | st.just(ALL)


def rollout_ends() -> Ends:
    return running(said=hello(role="rollout"))


def turning() -> tuple[Ends, Turn]:
    """Two ends where turn 1 of lane 0 has come to the host."""
    ends = rollout_ends()
    ends.gateway.ask(Turn(0, 1))
    (turn,) = ends.to_host()
    assert isinstance(turn, Turn)
    return ends, turn


def fragment(turn: Turn) -> Fragment:
    return Fragment(turn.lane, turn.number, {}, {})


def next_of(ends: Ends) -> Ends:
    """The two ends of the next connection, before the handshake; this one is lost."""
    ends.host.ended()
    ends.gateway.ended()
    again = Ends(said=hello(role="rollout"), host_session=ends.host_session)
    again.session = ends.session
    return again


def welcomed_back(ends: Ends) -> Ends:
    """The two ends of the next connection, as the host is welcomed again."""
    again = next_of(ends)
    again.to_gateway()
    again.to_host()
    again.to_gateway()
    assert again.session is not None
    again.gateway.welcome(again.session)
    return again


@pytest.mark.parametrize("first", ["settings", "turn"])
def test_settings_come_before_or_after_the_first_turn(first: str) -> None:
    ends = rollout_ends()
    if first == "settings":
        ends.gateway.tell(SETTINGS)
    ends.gateway.ask(Turn(0, 1))
    if first == "turn":
        ends.gateway.tell(SETTINGS)
    told = {event.kind: event for event in ends.to_host() if not isinstance(event, ConnectionBroken)}
    assert next(iter(told)) == first
    settings = told["settings"]
    assert isinstance(settings, Settings)
    assert settings.settings == {"fragment_length": 32, "lookback": 4}


def test_settings_come_again_after_a_reconnect_behind_the_turn_that_was_lost() -> None:
    ends = rollout_ends()
    ends.gateway.tell(SETTINGS)
    ends.to_host()
    ends.gateway.ask(Turn(0, 1))
    taken_from(ends.gateway)  # which the host does not get
    again = welcomed_back(ends)
    again.gateway.tell(SETTINGS)
    welcome, turn, settings = again.to_host()
    assert isinstance(welcome, Welcome)
    assert welcome.resumed
    assert isinstance(turn, Turn)
    assert isinstance(settings, Settings)
    assert settings.settings == SETTINGS.settings


@pytest.mark.parametrize("kind", ["settings", "weights", "states", "cut"])
def test_a_host_of_environments_is_told_nothing_of_rollouts(kind: str) -> None:
    ends = running()
    message = EXAMPLES[kind]
    error = error_of(ends.host.receive(frame_as(message), 1.0))
    assert error.code == "order"
    assert f"{kind} to a host of role env" in str(error)


@pytest.mark.parametrize("kind", ["settings", "weights", "states", "cut"])
def test_a_host_is_told_nothing_before_its_welcome(kind: str) -> None:
    ends = greeted(said=hello(role="rollout"))
    message = EXAMPLES[kind]
    with pytest.raises(WireError, match=f"{kind}: the connection is handshake, expected running"):
        ends.gateway.tell(message)  # type: ignore[arg-type]
    assert taken_from(ends.gateway) == b""
    error = error_of(ends.host.receive(frame_as(message), 1.0))
    assert error.code == "order"
    assert f"{kind} in the handshake, expected welcome" in str(error)


@pytest.mark.parametrize("kind", ["settings", "weights", "states", "cut"])
def test_a_gateway_is_told_nothing_that_is_for_hosts(kind: str) -> None:
    error = error_of(rollout_ends().gateway.receive(frame_as(EXAMPLES[kind]), 1.0))
    assert error.code == "order"
    assert f"{kind} from a host, expected an answer or metrics" in str(error)


def test_a_lane_whose_turn_failed_gets_its_next_turn_and_no_reset() -> None:
    ends, turn = turning()
    assert ends.host.answer(turn, Failed.of(turn, ValueError("stuck")))
    assert [type(event) for event in ends.to_gateway()] == [Failed]
    ends.gateway.ask(Turn(0, 2))
    (second,) = ends.to_host()
    assert isinstance(second, Turn)
    assert second.number == 2
    assert ends.host.answer(second, fragment(second))
    assert isinstance(decode(taken_from(ends.host)), Fragment)


@pytest.mark.parametrize(
    ("cut", "told"),
    [
        (Cut(0, 2), "cut 2 of lane 0: expected number 1 or less"),
        (Cut(1, 1), "cut 1 of lane 1: expected number 0 or less"),
        (Cut(9, 1), r"lane 9, expected one of \[0, 1\]"),
    ],
)
def test_a_cut_of_what_was_never_asked_for_is_refused_at_both_ends(cut: Cut, told: str) -> None:
    ends, _ = turning()
    with pytest.raises(WireError, match=told) as caught:
        ends.gateway.tell(cut)
    assert caught.value.code == "number"
    assert taken_from(ends.gateway) == b""
    assert ends.gateway.is_open
    error = error_of(ends.host.receive(frame_as(cut), 1.0))
    assert error.code == "number"
    with pytest.raises(WireError, match=f"^gateway: {told}"):
        raise error


def test_a_cut_of_a_turn_that_was_answered_is_not_sent() -> None:
    ends, turn = turning()
    ends.host.answer(turn, fragment(turn))
    ends.to_gateway()
    ends.gateway.tell(Cut(0, 1))
    assert taken_from(ends.gateway) == b""
    ends.gateway.ask(Turn(0, 2))
    taken_from(ends.gateway)
    ends.gateway.tell(Cut(0, 1))
    assert taken_from(ends.gateway) == b""
    ends.gateway.tell(Cut(0, 2))
    assert taken_from(ends.gateway) == frame_as(Cut(0, 2))


class TurnsAndCuts(RuleBasedStateMachine):
    """A gateway that asks for turns and cuts them short, whatever a network that loses connections delivers of it.

    working    by lane: the turn that the host is at
    given      by lane: the numbers of the fragments that the gateway handed over
    """

    @initialize()
    def begin(self) -> None:
        self.ends = running(said=hello(role="rollout"))
        self.working: dict[int, Turn] = {}
        self.given: dict[int, list[int]] = {lane: [] for lane in LANES}

    @rule(lane=st.sampled_from(LANES))
    def ask(self, lane: int) -> None:
        if len(self.given[lane]) == self.asked(lane) and self.ends.gateway.phase is ConnectionPhase.RUNNING:
            self.ends.gateway.ask(Turn(lane, self.asked(lane) + 1))

    @rule(lane=st.sampled_from(LANES), back=st.integers(0, 2))
    def cut(self, lane: int, back: int) -> None:
        if self.asked(lane) > back and self.ends.gateway.phase is ConnectionPhase.RUNNING:
            self.ends.gateway.tell(Cut(lane, self.asked(lane) - back))

    @rule(lane=st.sampled_from(LANES))
    def answer(self, lane: int) -> None:
        turn = self.working.pop(lane, None)
        if turn is not None:
            assert self.ends.host.answer(turn, fragment(turn))

    @rule(count=SOME)
    def carry_to_gateway(self, count: int) -> None:
        for event in self.ends.to_gateway(count):
            if isinstance(event, Hello):
                assert self.ends.session is not None
                self.ends.gateway.welcome(self.ends.session)
            else:
                assert isinstance(event, Fragment), event
                self.given[event.lane].append(event.number)

    @rule(count=SOME)
    def carry_to_host(self, count: int) -> None:
        for event in self.ends.to_host(count):
            if isinstance(event, Cut):
                assert self.working[event.lane].number == event.number
            elif isinstance(event, Turn):
                assert event.lane not in self.working
                self.working[event.lane] = event
            else:
                assert isinstance(event, Welcome), event

    @rule()
    def carry_everything(self) -> None:
        for _ in range(3):
            self.carry_to_gateway(ALL)
            self.carry_to_host(ALL)

    @rule(again=st.booleans())
    def lose_the_connection(self, again: bool) -> None:
        self.ends = next_of(self.ends)
        if again:
            self.carry_everything()

    @invariant()
    def each_turn_is_given_once_in_order(self) -> None:
        for given in self.given.values():
            assert given == list(range(1, len(given) + 1))

    def teardown(self) -> None:
        """A connection that holds brings every turn to its end."""
        self.lose_the_connection(again=False)
        for _ in range(4):
            self.carry_to_gateway(ALL)
            self.carry_to_host(ALL)
            for lane in LANES:
                self.cut(lane, 0)
                self.answer(lane)
        self.carry_to_gateway(ALL)
        assert [len(self.given[lane]) for lane in LANES] == [self.asked(lane) for lane in LANES]

    def asked(self, lane: int) -> int:
        """The number of the lane's last turn."""
        assert self.ends.session is not None
        return self.ends.session.next_number(lane) - 1


TestTurnsAndCuts = TurnsAndCuts.TestCase
TestTurnsAndCuts.settings = settings(max_examples=examples(100), stateful_step_count=50, deadline=None)


@pytest.mark.parametrize("is_answered", [False, True])
def test_a_host_owes_an_answer_that_the_gateway_has_not_got(*, is_answered: bool) -> None:
    ends, turn = turning()
    if is_answered:
        ends.host.answer(turn, fragment(turn))
        taken_from(ends.host)  # which the gateway does not get
    assert ends.host_session.owed == set()
    again = welcomed_back(ends)
    while not (events := again.to_host(1)):
        pass
    assert [type(event) for event in events] == [Welcome]
    assert again.host_session.owed == ({0} if is_answered else set())
    assert again.to_host() == []  # it is asked once more
    if not is_answered:
        again.host.answer(turn, fragment(turn))
    assert again.host_session.owed == set()
    (answer,) = again.to_gateway()
    assert isinstance(answer, Fragment)


def test_a_host_whose_answers_have_come_owes_none() -> None:
    ends, turn = turning()
    ends.host.answer(turn, fragment(turn))
    ends.to_gateway()
    again = welcomed_back(ends)
    again.to_host()
    assert again.host_session.owed == set()
