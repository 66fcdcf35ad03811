"""Clients that ask and servers that answer: numbers, windows, and requests that come again after a cut."""

import pytest
from hypothesis import given, strategies as st
from wire_ends import QueryEnds, taken_from
from wire_messages import EXAMPLES, GATEWAY_NONCE, SECRET, TOKEN, hello

from rollflow.stream import wire
from rollflow.stream.data.errors import WireError

SAMPLER = hello(role="sampler", slots=(1,), observation_space={}, action_space={}, autoreset="DISABLED")


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


@given(st.data())
def test_whatever_is_cut_each_request_is_taken_once_and_answered_once(data: st.DataObject) -> None:
    client_session, server_session = wire.ClientSession(TOKEN), wire.ServerSession(TOKEN, 4)
    taken: list[int] = []
    waiting: list[int] = []
    answers: list[int] = []

    def connected() -> tuple[wire.SamplerConnection, wire.ReplayConnection]:
        client = wire.SamplerConnection(SAMPLER, client_session, secret=SECRET, limits=wire.Limits(), now=0.0)
        server = wire.ReplayConnection(software="s", nonce=GATEWAY_NONCE, secret=SECRET, limits=wire.Limits(), now=0.0)
        for _ in range(2):
            server.receive(taken_from(client), 0.0)
            if server.hello is None:
                client.receive(taken_from(server), 0.0)
        server.welcome(server_session, credits=server_session.window)
        return client, server

    def carry(
        source: wire.SamplerConnection | wire.ReplayConnection, target: wire.SamplerConnection | wire.ReplayConnection
    ) -> None:
        sent = taken_from(source)
        if is_cut:
            sent = sent[: data.draw(st.integers(0, len(sent)))]
        for event in target.receive(sent, 0.0):
            assert not isinstance(event, wire.ConnectionBroken), event.error
            if isinstance(event, wire.Query):
                taken.append(event.number)
                waiting.append(event.number)
            elif isinstance(event, wire.Result):
                answers.append(event.number)
                assert event.problem == f"answer {event.number}"
            else:
                assert isinstance(event, wire.Welcome)

    client, server = connected()
    for step in range(data.draw(st.integers(1, 40))):
        is_cut = data.draw(st.booleans())
        while client_session.may_ask and data.draw(st.booleans()):
            client.ask(query(client_session.number + 1, client_session.done))
        carry(server, client)
        carry(client, server)
        while waiting and data.draw(st.booleans()):
            server.answer(result(waiting.pop(data.draw(st.integers(0, len(waiting) - 1)))))
        if is_cut or step == 0:
            client, server = connected()
    is_cut = False
    client, server = connected()
    for _ in range(3):
        carry(server, client)
        carry(client, server)
        while waiting:
            server.answer(result(waiting.pop()))
    assert sorted(taken) == sorted(answers) == list(range(1, client_session.number + 1))
    assert client_session.done == client_session.number
