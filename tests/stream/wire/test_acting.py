"""Clients and servers of policies: numbers, windows, and requests that come again after a cut."""

import pytest
from hypothesis import given, strategies as st
from wire_ends import ActingEnds, taken_from
from wire_messages import EXAMPLES, GATEWAY_NONCE, SECRET, TOKEN, hello

from rollflow.stream.data.errors import WireError
from rollflow.stream.wire import (
    Act,
    Acted,
    ClientConnection,
    ClientSession,
    ConnectionBroken,
    Limits,
    Query,
    ReplayConnection,
    Result,
    ServerConnection,
    ServerSession,
    Step,
    Welcome,
    encode,
)

CLIENT = hello(role="client", slots=(1,), observation_space={}, action_space={}, autoreset="DISABLED")


def act(number: int, done: int = 0) -> Act:
    example = EXAMPLES["act"]
    assert isinstance(example, Act)
    return Act(number, done, "pole", None, example.sessions, example.begins, example.rewards, example.obs)


def acted(number: int) -> Acted:
    return Acted(number, (), None, (), (), ([None, 500, f"answer {number}"],))


def test_a_request_comes_once_and_its_answer_too() -> None:
    ends = ActingEnds()
    (request,) = ends.to_server()
    assert isinstance(request, Act)
    ends.server.answer(acted(7))
    (answer,) = ends.to_client()
    assert isinstance(answer, Acted)
    assert answer.refused == ([None, 500, "answer 7"],)


@pytest.mark.parametrize(
    ("message", "code"),
    [("welcome", "order"), ("step", "order"), ("acted", "order"), ("weights", "order")],
)
def test_what_a_server_must_not_be_sent_is_refused(message: str, code: str) -> None:
    ends = ActingEnds()
    ends.to_server()
    (event,) = ends.server.receive(b"".join(encode(EXAMPLES[message])), 0.0)
    assert isinstance(event, ConnectionBroken)
    assert event.error.code == code


def test_an_answer_that_nobody_asked_for_is_refused_and_one_that_was_given_up_is_dropped() -> None:
    ends = ActingEnds()
    ends.client._session.drop(7)
    assert ends.client.receive(b"".join(encode(acted(7))), 0.0) == []
    (event,) = ends.client.receive(b"".join(encode(acted(8))), 0.0)
    assert isinstance(event, ConnectionBroken)
    assert event.error.code == "number"


def test_a_host_is_no_client() -> None:
    server = ServerConnection(software="s", nonce=GATEWAY_NONCE, secret=None, limits=Limits(), now=0.0)
    host = ClientConnection(hello(), ClientSession(TOKEN), secret=None, limits=Limits(), now=0.0)
    for _ in range(2):
        events = server.receive(taken_from(host), 0.0)
        host.receive(taken_from(server), 0.0)
    assert isinstance(events[-1], ConnectionBroken)
    assert events[-1].error.code == "role"


def test_a_query_comes_once_and_its_result_too() -> None:
    ends = ActingEnds("query")
    (request,) = ends.to_server()
    assert isinstance(request, Query)
    result = EXAMPLES["result"]
    assert isinstance(result, Result)
    ends.server.answer(result)
    (answer,) = ends.to_client()
    assert isinstance(answer, Result)
    assert answer.columns["ids"].tolist() == [7, 9]
    (again,) = ends.server.receive(b"".join(encode(EXAMPLES["act"])), 0.0)
    assert isinstance(again, ConnectionBroken)
    assert again.error.code == "order"


def test_a_client_of_policies_and_a_replay_host_refuse_each_other() -> None:
    host = ReplayConnection(software="s", nonce=GATEWAY_NONCE, secret=None, limits=Limits(), now=0.0)
    client = ClientConnection(CLIENT, ClientSession(TOKEN), secret=None, limits=Limits(), now=0.0)
    for _ in range(2):
        events = host.receive(taken_from(client), 0.0)
        client.receive(taken_from(host), 0.0)
    assert isinstance(events[-1], ConnectionBroken)
    assert "hello.role is 'client', expected 'sampler': this is a replay host" in str(events[-1].error)


def test_requests_beyond_the_window_are_refused_on_both_sides() -> None:
    session = ClientSession(TOKEN)
    session.window = 2
    session.ask(act(1))
    session.ask(act(2))
    assert not session.may_ask
    with pytest.raises(WireError, match="act 3, expected 3, and at most 2"):
        session.ask(act(3))
    assert session.drop(2)  # the oldest is still under way
    assert not session.may_ask
    session.drop(1)
    session.ask(act(3, session.done))
    server = ServerSession(TOKEN, 2)
    server.take(act(1))
    server.take(act(2))
    with pytest.raises(WireError, match="act 3, expected at most 2"):
        server.take(act(3))
    server.take(act(3, done=1))
    with pytest.raises(WireError, match=r"act\.done is 4, expected less than 4"):
        server.take(act(4, done=4))
    assert isinstance(EXAMPLES["step"], Step)


@given(st.data())
def test_whatever_is_cut_each_request_is_taken_once_and_answered_once(data: st.DataObject) -> None:
    client_session, server_session = ClientSession(TOKEN), ServerSession(TOKEN, 4)
    taken: list[int] = []
    waiting: list[int] = []
    answers: list[int] = []

    def connected() -> tuple[ClientConnection, ServerConnection]:
        client = ClientConnection(CLIENT, client_session, secret=SECRET, limits=Limits(), now=0.0)
        server = ServerConnection(software="s", nonce=GATEWAY_NONCE, secret=SECRET, limits=Limits(), now=0.0)
        for _ in range(2):
            server.receive(taken_from(client), 0.0)
            if server.hello is None:
                client.receive(taken_from(server), 0.0)
        server.welcome(server_session)
        return client, server

    def carry(source: ClientConnection | ServerConnection, target: ClientConnection | ServerConnection) -> None:
        sent = taken_from(source)
        if is_cut:
            sent = sent[: data.draw(st.integers(0, len(sent)))]
        for event in target.receive(sent, 0.0):
            assert not isinstance(event, ConnectionBroken), event.error
            if isinstance(event, Act):
                taken.append(event.number)
                waiting.append(event.number)
            elif isinstance(event, Acted):
                answers.append(event.number)
                assert event.refused[0][2] == f"answer {event.number}"
            else:
                assert isinstance(event, Welcome)

    client, server = connected()
    for step in range(data.draw(st.integers(1, 40))):
        is_cut = data.draw(st.booleans())
        while client_session.may_ask and data.draw(st.booleans()):
            client.ask(act(client_session.number + 1, client_session.done))
        carry(server, client)
        carry(client, server)
        while waiting and data.draw(st.booleans()):
            server.answer(acted(waiting.pop(data.draw(st.integers(0, len(waiting) - 1)))))
        if is_cut or step == 0:
            client, server = connected()
    is_cut = False
    client, server = connected()
    for _ in range(3):
        carry(server, client)
        carry(client, server)
        while waiting:
            server.answer(acted(waiting.pop()))
    assert sorted(taken) == sorted(answers) == list(range(1, client_session.number + 1))
    assert client_session.done == client_session.number
