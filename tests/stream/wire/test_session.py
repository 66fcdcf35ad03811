"""Requests are taken once and answered once, however often connections break."""

from dataclasses import replace
from typing import Any

import pytest
from wire_messages import EXAMPLES, TOKEN, first_rows, hello

from rollflow.stream import wire
from rollflow.stream.data.errors import WireError

LANES = (0, 1)


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
    assert session.take(reset(1))


@pytest.mark.parametrize("name", ["slots", "autoreset", "role", "observation_space", "agents"])
def test_a_host_that_is_not_what_it_was_can_not_go_on(name: str) -> None:
    session = wire.GatewaySession(TOKEN, hello(), LANES, (0, 2))
    other: dict[str, Any] = {"slots": (4,), "autoreset": "DISABLED", "role": "rollout", "agents": ("a",)}
    other |= {"observation_space": {"kind": "MultiBinary"}}
    session.check_same(hello(name="another name"))
    with pytest.raises(WireError, match=f"hello.{name} is not what it was when the session began"):
        session.check_same(hello(**{name: other[name]}))
