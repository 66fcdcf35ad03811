"""Clients that ask and servers that answer: numbers, windows, and requests that come again after a cut."""

import pytest
from wire_ends import QueryEnds
from wire_messages import EXAMPLES, TOKEN

from rollflow.stream import wire
from rollflow.stream.data.errors import WireError


def query(number: int, done: int = 0) -> wire.Query:
    return wire.Query(number, done, "sample", {"count": 8}, {})


def result(number: int) -> wire.Result:
    return wire.Result(number, {}, {}, f"answer {number}")


@pytest.mark.parametrize("message", ["welcome", "step", "result", "weights"])
def test_what_a_server_must_not_be_sent_is_refused(message: str) -> None:
    ends = QueryEnds()
    ends.to_server()
    (event,) = ends.server.receive(b"".join(wire.encode(EXAMPLES[message])), 0.0)
    assert isinstance(event, wire.ConnectionBroken)
    assert event.error.code == "order"


def test_an_answer_that_nobody_asked_for_is_refused_and_one_that_was_given_up_is_dropped() -> None:
    ends = QueryEnds()
    ends.client.session.drop(3)
    assert ends.client.receive(b"".join(wire.encode(result(3))), 0.0) == []
    (event,) = ends.client.receive(b"".join(wire.encode(result(4))), 0.0)
    assert isinstance(event, wire.ConnectionBroken)
    assert event.error.code == "number"


def test_requests_beyond_the_window_are_not_made_and_are_refused() -> None:
    session = wire.ClientSession(TOKEN)
    session.window = 2
    session.ask(query(1))
    session.ask(query(2))
    assert not session.may_ask
    assert session.drop(2)  # the oldest is still under way
    assert not session.may_ask
    session.drop(1)
    session.ask(query(3, session.done))
    server = wire.ServerSession(TOKEN, 2)
    server.take(query(1))
    server.take(query(2))
    with pytest.raises(WireError, match="query 3, expected at most 2"):
        server.take(query(3))
    server.take(query(3, done=1))
    with pytest.raises(WireError, match=r"query\.done is 4, expected less than 4"):
        server.take(query(4, done=4))
