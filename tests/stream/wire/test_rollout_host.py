"""A host of role "rollout": what it is told beside its turns, before them and after a connection was lost."""

import pytest
from wire_ends import Ends, greeted, running, taken_from
from wire_messages import EXAMPLES, hello

from rollflow.stream.errors import WireError
from rollflow.stream.wire import (
    Broken,
    Event,
    Failed,
    Fragment,
    Message,
    Settings,
    Turn,
    Welcome,
    decode,
    encode,
)

SETTINGS = Settings({"fragment_length": 32, "lookback": 4})


def frame_as(message: Message) -> bytes:
    return b"".join(encode(message))


def error_of(events: list[Event]) -> WireError:
    assert isinstance(events[-1], Broken), events
    return events[-1].error


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


def back(ends: Ends) -> Ends:
    """The two ends of the next connection, before the gateway welcomes the host again."""
    ends.host.ended()
    ends.gateway.ended()
    again = greeted(said=hello(role="rollout"), host_session=ends.host_session)
    again.session = ends.session
    return again


def welcomed_back(ends: Ends) -> Ends:
    again = back(ends)
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
    told = {event.kind: event for event in ends.to_host() if not isinstance(event, Broken)}
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


@pytest.mark.parametrize("kind", ["settings", "weights", "states"])
def test_a_host_of_environments_is_told_nothing_of_rollouts(kind: str) -> None:
    ends = running()
    message = EXAMPLES[kind]
    with pytest.raises(WireError, match=f"{kind}: not for a host of environments") as caught:
        ends.gateway.tell(message)  # type: ignore[arg-type]
    assert caught.value.code == "role"
    error = error_of(ends.host.receive(frame_as(message), 1.0))
    assert error.code == "order"
    assert f"{kind} to a host of role env" in str(error)


@pytest.mark.parametrize("kind", ["settings", "weights", "states"])
def test_a_host_is_told_nothing_before_its_welcome(kind: str) -> None:
    ends = greeted(said=hello(role="rollout"))
    message = EXAMPLES[kind]
    with pytest.raises(WireError, match=f"{kind}: the connection is handshake, expected running"):
        ends.gateway.tell(message)  # type: ignore[arg-type]
    assert taken_from(ends.gateway) == b""
    error = error_of(ends.host.receive(frame_as(message), 1.0))
    assert error.code == "order"
    assert f"{kind} in the handshake, expected welcome" in str(error)


@pytest.mark.parametrize("kind", ["settings", "weights", "states"])
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
