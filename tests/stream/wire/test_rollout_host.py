"""A host of role "rollout": what it is told beside its turns, before them and after a connection was lost."""

import pytest
from wire_ends import Ends, check_broken, error_of, frame_as, greeted, refusing, running, taken_from
from wire_messages import EXAMPLES, hello

from rollflow.stream import wire
from rollflow.stream.data.errors import WireError

SETTINGS = wire.Settings({"fragment_length": 32, "lookback": 4})


def rollout_ends() -> Ends:
    return running(said=hello(role="rollout"))


def turning() -> tuple[Ends, wire.Turn]:
    """Two ends where turn 1 of lane 0 has come to the host."""
    ends = rollout_ends()
    ends.gateway.ask(wire.Turn(0, 1))
    (turn,) = ends.to_host()
    assert isinstance(turn, wire.Turn)
    return ends, turn


def fragment(turn: wire.Turn) -> wire.Fragment:
    return wire.Fragment(turn.lane, turn.number, {}, {})


def welcomed_back(ends: Ends) -> Ends:
    """The two ends of the next connection, as the host is welcomed again; this one is lost."""
    ends.host.ended()
    ends.gateway.ended()
    again = Ends(said=hello(role="rollout"), host_session=ends.host_session)
    again.session = ends.session
    again.to_gateway()
    again.to_host()
    again.to_gateway()
    assert again.session is not None
    again.gateway.welcome(again.session)
    return again


@pytest.mark.parametrize("kind", ["settings", "weights", "states"])
@pytest.mark.parametrize("is_first", [True, False])
def test_news_come_before_or_after_the_first_turn(kind: str, *, is_first: bool) -> None:
    ends, news, turn = rollout_ends(), EXAMPLES[kind], wire.Turn(0, 1)
    for message in (news, turn) if is_first else (turn, news):
        if message is turn:
            ends.gateway.ask(turn)
        else:
            ends.gateway.tell(message)  # type: ignore[arg-type]
    assert [event.kind for event in ends.to_host()] == ([kind, "turn"] if is_first else ["turn", kind])  # type: ignore[union-attr]


def test_settings_come_again_after_a_reconnect_behind_the_turn_that_was_lost() -> None:
    ends = rollout_ends()
    ends.gateway.tell(SETTINGS)
    ends.to_host()
    ends.gateway.ask(wire.Turn(0, 1))
    taken_from(ends.gateway)  # which the host does not get
    again = welcomed_back(ends)
    again.gateway.tell(SETTINGS)
    welcome, turn, settings = again.to_host()
    assert isinstance(welcome, wire.Welcome)
    assert welcome.resumed
    assert isinstance(turn, wire.Turn)
    assert isinstance(settings, wire.Settings)
    assert settings.settings == SETTINGS.settings


@pytest.mark.parametrize("kind", ["settings", "weights", "states", "cut"])
def test_what_is_for_a_welcomed_host_of_rollouts_is_for_nobody_else(kind: str) -> None:
    message, stranger = EXAMPLES[kind], greeted(said=hello(role="rollout"))
    with pytest.raises(WireError, match=f"{kind}: the connection is handshake, expected running"):
        stranger.gateway.tell(message)  # type: ignore[arg-type]
    assert taken_from(stranger.gateway) == b""
    for end, told in (
        (running().host, "to a host of role env"),
        (stranger.host, "in the handshake, expected welcome"),
        (rollout_ends().gateway, "from a host, expected an answer or metrics"),
    ):
        check_broken(end.receive(frame_as(message), 1.0), "order", f"{kind} {told}")


@pytest.mark.parametrize(
    ("cut", "told"),
    [
        (wire.Cut(0, 2), "cut 2 of lane 0: expected number 1 or less"),
        (wire.Cut(1, 1), "cut 1 of lane 1: expected number 0 or less"),
        (wire.Cut(9, 1), r"lane 9, expected one of \[0, 1\]"),
    ],
)
def test_a_cut_of_what_was_never_asked_for_is_refused_at_both_ends(cut: wire.Cut, told: str) -> None:
    ends, _ = turning()
    with refusing("number", told):
        ends.gateway.tell(cut)
    assert taken_from(ends.gateway) == b""
    assert ends.gateway.is_open
    with refusing("number", f"^gateway: {told}"):
        raise error_of(ends.host.receive(frame_as(cut), 1.0))


def test_a_cut_of_a_turn_that_was_answered_is_not_sent() -> None:
    ends, turn = turning()
    ends.host.answer(turn, fragment(turn))
    ends.to_gateway()
    ends.gateway.tell(wire.Cut(0, 1))
    assert taken_from(ends.gateway) == b""
    ends.gateway.ask(wire.Turn(0, 2))
    taken_from(ends.gateway)
    ends.gateway.tell(wire.Cut(0, 1))
    assert taken_from(ends.gateway) == b""
    ends.gateway.tell(wire.Cut(0, 2))
    assert taken_from(ends.gateway) == frame_as(wire.Cut(0, 2))


@pytest.mark.parametrize("answer", ["not made", "lost", "there"])
def test_a_host_owes_an_answer_that_the_gateway_has_not_got(answer: str) -> None:
    ends, turn = turning()
    if answer != "not made":
        ends.host.answer(turn, fragment(turn))
        taken_from(ends.host) if answer == "lost" else ends.to_gateway()
    assert ends.host_session.owed == set()
    again = welcomed_back(ends)
    while not (events := again.to_host(1)):
        pass
    assert [type(event) for event in events] == [wire.Welcome]
    assert again.host_session.owed == ({0} if answer == "lost" else set())
    assert again.to_host() == []  # it is asked once more
    if answer == "not made":
        again.host.answer(turn, fragment(turn))
    assert again.host_session.owed == set()
    assert [type(event) for event in again.to_gateway()] == [wire.Fragment] * (answer != "there")
