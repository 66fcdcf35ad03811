"""A connection: its handshake, what may come and what must not, how it ends, and hosts of whole rollouts."""

import hashlib
import hmac
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st
from wire_ends import (
    Ends,
    allocated,
    check_broken,
    error_of,
    frame_as,
    greeted,
    refusing,
    running,
    running_reset,
    taken_from,
    told_by,
)
from wire_messages import EXAMPLES, GATEWAY_NONCE, SECRET, TOKEN, agent_rows, first_rows, hello, rows

from rollflow.stream import wire
from rollflow.stream.data.errors import WireError
from rollflow.stream.wire.codec.handshake import GATEWAY, prove

RESET = wire.Reset(0, 1, (1, 2), None)
STEP = wire.Step(0, 2, np.array([1, 0]))


def stepping() -> tuple[Ends, wire.Step]:
    """Two ends where a step has come to the host."""
    ends = running_reset()
    ends.to_gateway()
    ends.gateway.ask(STEP)
    (request,) = ends.to_host()
    assert isinstance(request, wire.Step)
    return ends, request


def test_a_lane_that_failed_is_reset_next() -> None:
    ends, step = stepping()
    ends.host.answer(step, wire.Failed.of(step, ValueError("stuck")))
    error = error_of(ends.host.receive(frame_as(wire.Step(0, 3, np.array([1, 0]))), 1.0))
    assert "step 3 of lane 0: expected a reset first" in str(error)


@pytest.mark.parametrize(
    ("answer", "code", "told"),
    [
        (rows(number=3), "number", "rows 3 of lane 0: nothing above number 2 was asked for"),
        (rows(lane=1, number=1), "number", "rows 1 of lane 1: nothing above number 0 was asked for"),
        (rows(lane=9), "number", r"lane 9, expected one of \[0, 1\]"),
        (wire.Fragment(0, 2, {}, {}), "number", "fragment 2 of lane 0, expected rows or failed 2 of lane 0"),
        (agent_rows(), "number", "agent_rows 2 of lane 0, expected rows or failed 2 of lane 0"),
        (rows(obs=np.full((2, 3), np.nan, np.float32)), "rows", "step 2 of lane 0: obs of slot 0 has a NaN"),
        (wire.Step(0, 3, np.array([1, 1])), "order", "step from a host, expected an answer or metrics"),
        (wire.Pong(1), "order", "pong 1, expected at most 0"),
        (hello(), "order", "hello from a host"),
    ],
)
def test_a_host_that_breaks_the_protocol_is_refused_for_good(answer: wire.Message, code: str, told: str) -> None:
    ends, _ = stepping()
    good = frame_as(wire.Failed(0, 2, "E", "", (), ""))
    events = ends.gateway.receive(frame_as(answer) + good, 1.0)
    assert [type(event) for event in events] == [WireError]
    with refusing(code, f"^host 'sim-1': .*{told}"):
        raise error_of(events)
    assert ends.gateway.receive(good, 1.0) == []
    assert ends.gateway.phase is wire.ConnectionPhase.BROKEN
    assert told_by(ends.gateway).code == code
    assert ends.gateway.tick(1e9) == []
    assert ends.gateway.ended() == []


@pytest.mark.parametrize(
    ("request_", "code", "told"),
    [
        (wire.Step(0, 4, np.array([1, 1])), "number", "step 4 of lane 0: expected number 3 or less"),
        (wire.Step(0, 3, np.array([1, 1])), "number", "number 2 has not been answered yet"),
        (wire.Reset(0, 2, None, None), "number", "reset 2 of lane 0: number 2 was another kind of request"),
        (wire.Step(7, 1, np.array([1, 1])), "number", "lane 7, expected one of [0, 1]"),
        (wire.Step(1, 1, np.array([1, 1])), "order", "step 1 of lane 1: expected a reset first"),
        (wire.Step(0, 3, np.array([0.5, 1])), "request", "actions is an array <f8"),
        (wire.Turn(0, 3), "order", "turn to a host of role env"),
        (wire.Weights(1, {}, {}, {}), "order", "weights to a host of role env"),
        (rows(), "order", "rows to a host of role env"),
    ],
)
def test_a_gateway_that_breaks_the_protocol_is_refused(request_: wire.Message, code: str, told: str) -> None:
    ends, _ = stepping()
    with refusing(code, f"^gateway: .*{re.escape(told)}"):
        raise error_of(ends.host.receive(frame_as(request_), 1.0))


def test_what_came_before_a_breach_is_handed_over() -> None:
    ends, step = stepping()
    ends.host.answer(step, rows())
    events = ends.gateway.receive(taken_from(ends.host) + bytes(16), 1.0)
    assert [type(event) for event in events] == [wire.Rows, WireError]
    assert error_of(events).code == "frame"


def test_a_refusal_is_raised_as_the_others_words() -> None:
    ends, _ = stepping()
    ends.gateway.refuse("busy", "too many hosts")
    (broken,) = ends.to_host()
    assert isinstance(broken, WireError)
    assert (str(broken), broken.code) == ("gateway: refuses: too many hosts", "busy")
    assert taken_from(ends.host) == b""


def test_a_wrong_answer_is_refused_where_it_is_made_and_a_right_one_may_follow() -> None:
    ends, step = stepping()
    with pytest.raises(WireError, match="step 2 of lane 0: obs of slot 0 has a NaN"):
        ends.host.answer(step, rows(obs=np.full((2, 3), np.nan, np.float32)))
    with pytest.raises(WireError, match="rows 3 of lane 0, expected rows or failed 2 of lane 0"):
        ends.host.answer(step, rows(number=3))
    assert taken_from(ends.host) == b""
    assert ends.host.answer(step, rows(infos={"x": object(), "y": [1, 2]}))
    assert not ends.host.answer(step, rows())
    [taken] = ends.to_gateway()
    assert isinstance(taken, wire.Rows)
    assert taken.infos == {"y": [1, 2]}  # without what can't be sent


def test_what_is_larger_than_the_other_end_takes_is_not_sent() -> None:
    ends = running(limits=wire.Limits(max_frame=1 << 16), said=hello(max_frame=1 << 16))
    ends.gateway.ask(RESET)
    (request,) = ends.to_host()
    assert isinstance(request, wire.Reset)
    with pytest.raises(WireError, match=r"rows: frame of .* bytes, expected at most 65536: gateway takes no more"):
        ends.host.answer(request, first_rows(infos={"image": np.zeros(1 << 16, np.uint8)}))
    with pytest.raises(WireError, match=r"reset: frame of .* bytes, expected at most 65536: host 'sim-1' takes"):
        ends.gateway.ask(wire.Reset(1, 1, None, {"map": np.zeros(1 << 16, np.uint8)}))
    assert ends.host.answer(request, first_rows())
    ends.gateway.ask(wire.Reset(1, 1, None, None))


# Time


def test_a_quiet_peer_is_asked_and_one_that_answers_is_kept() -> None:
    ends = running(limits=wire.Limits(heartbeat_s=10))
    for now in (10.0, 20.0, 30.0, 40.0):
        assert ends.gateway.next_deadline() == now
        assert ends.gateway.tick(now - 0.1) == []
        assert ends.gateway.tick(now) == []
        ends.now = now
        assert ends.to_host() == []
        assert ends.to_gateway() == []
    assert ends.host.is_open


def test_a_peer_that_is_silent_for_three_heartbeats_is_given_up() -> None:
    half, _ = stepping()
    half.gateway.receive(frame_as(rows())[:100], 0.0)  # half a frame, and silence
    for connection in (running().gateway, running().host, half.gateway):
        taken_from(connection)
        for now in (10.0, 20.0):
            assert connection.tick(now) == []
            assert isinstance(wire.decode(taken_from(connection)), wire.Ping)
        check_broken(connection.tick(30.0), "silent", "silent for 30 s or more")
        assert told_by(connection).code == "silent"


@pytest.mark.parametrize("is_queued", [False, True])
@pytest.mark.parametrize("leaves", [False, True])
def test_a_peer_that_still_takes_what_is_sent_is_not_silent(is_queued: bool, leaves: bool) -> None:
    """A frame that takes longer than three heartbeats on a slow line: what is asked behind it is answered behind it.

    is_queued    it waits where the system keeps what was sent
    """
    ends = running(said=hello(role="rollout"))
    taken_from(ends.gateway)
    ends.gateway.tell(wire.Weights(1, {"w": np.zeros(1 << 10, np.uint8)}, {}, {}))
    if leaves:
        ends.gateway.goodbye("it is over")
    left = size = len(b"".join(ends.gateway.outgoing()))
    if is_queued:
        ends.gateway.queued = lambda: left
        ends.gateway.sent(size)
    for now in range(10, 100, 10):
        left -= size // 10
        if not is_queued:
            ends.gateway.sent(size // 10)
        assert ends.gateway.tick(float(now)) == []
        assert not ends.gateway.outgoing() or now == 10  # it is asked once
    if not leaves:  # from now on it takes no more
        assert ends.gateway.tick(100.0) == []
        assert ends.gateway.tick(110.0) == []
    assert error_of(ends.gateway.tick(100.0 if leaves else 120.0)).code == "silent"


@pytest.mark.parametrize("is_queued", [False, True])
def test_one_that_takes_nothing_is_silent_however_much_it_is_sent(is_queued: bool) -> None:
    """All that was sent counts as taken where the system does not say what the other end has taken."""
    ends, sent = running(said=hello(role="rollout")), 0
    taken_from(ends.gateway)
    ends.gateway.queued = lambda: sent if is_queued else 0
    for now in (10.0, 20.0):
        ends.gateway.tell(wire.Weights(1, {"w": np.zeros(1 << 10, np.uint8)}, {}, {}))
        sent += len(taken_from(ends.gateway))
        assert ends.gateway.tick(now) == []
        sent += len(taken_from(ends.gateway))
    assert error_of(ends.gateway.tick(30.0)).code == "silent"


def test_whoever_was_stopped_for_long_asks_again_before_giving_up() -> None:
    ends = running()
    assert ends.gateway.tick(1000.0) == []
    assert ends.gateway.next_deadline() == 1010.0
    ends.now = 1001.0
    ends.to_host()
    ends.to_gateway()
    assert ends.gateway.tick(1010.0) == []
    assert ends.gateway.is_open


def test_the_gateways_heartbeat_holds_for_the_host() -> None:
    ends = Ends(limits=wire.Limits(heartbeat_s=3))
    ends.host.limits = wire.Limits(heartbeat_s=99)
    ends.to_gateway()
    ends.to_host()
    assert ends.host._heartbeat_s == 3


# Endings


def test_goodbye_ends_a_connection_for_both() -> None:
    ends, step = stepping()
    ends.host.answer(step, rows())
    ends.gateway.goodbye("the run is over")
    events = ends.to_gateway()
    assert [type(event) for event in events] == [wire.Rows]  # what was under way still comes
    (goodbye,) = ends.to_host()
    assert isinstance(goodbye, wire.Goodbye)
    assert goodbye.reason == "the run is over"
    assert ends.host.phase is wire.ConnectionPhase.ENDED
    assert ends.host.ended() == []
    assert ends.gateway.ended() == []
    assert ends.gateway.phase is wire.ConnectionPhase.ENDED


def test_who_says_goodbye_takes_no_more_requests() -> None:
    ends = running()
    ends.host.goodbye("going home")
    ends.gateway.ask(RESET)
    assert ends.to_host() == []


def test_more_after_a_goodbye_is_a_breach() -> None:
    for rest, at_once in ((frame_as(wire.Ping(1)), True), (frame_as(wire.Ping(1)), False), (b"x", False)):
        ends = running()
        goodbye = frame_as(wire.Goodbye("bye"))
        events = ends.gateway.receive(goodbye + rest, 1.0) if at_once else ends.gateway.receive(goodbye, 1.0)
        assert isinstance(events[0], wire.Goodbye)
        if not at_once:
            events = ends.gateway.receive(rest, 1.0)
        assert "more bytes after its goodbye" in str(error_of(events))


@pytest.mark.parametrize(
    ("data", "told"),
    [(b"", "connection lost without a goodbye"), (b"123", "in the middle of a frame, 3 bytes of which had come")],
)
def test_a_connection_that_ends_without_a_goodbye_is_lost(data: bytes, told: str) -> None:
    ends = running()
    ends.gateway.receive(data, 1.0)
    check_broken(ends.gateway.ended(), "lost", told)
    assert taken_from(ends.gateway) == b""
    assert ends.gateway.ended() == []


def test_a_peer_that_does_not_read_is_given_up_before_memory_is() -> None:
    ends = running(limits=wire.Limits(undelivered=1 << 20), said=hello(role="rollout"))
    taken_from(ends.gateway)
    weights = wire.Weights(1, {"w": np.zeros(1 << 18, np.uint8)}, {}, {})
    for _ in range(9):
        ends.gateway.tell(weights)
        taken_from(ends.gateway)  # what was sent makes room
    for _ in range(3):
        ends.gateway.tell(weights)
    assert ends.gateway.undelivered < 1 << 20
    buffers = ends.gateway.outgoing()
    with refusing("undelivered", r"^host 'sim-1': .* bytes not delivered yet and .* more, expected at most"):
        ends.gateway.tell(weights)
    assert ends.gateway.phase is wire.ConnectionPhase.BROKEN
    assert ends.gateway.outgoing() == []
    ends.gateway.sent(sum(map(len, buffers)))


def test_requests_and_answers_that_wait_break_nothing_since_the_session_keeps_them() -> None:
    ends = running(limits=wire.Limits(undelivered=1000), said=hello(slots=(2,) * 8))
    requests = [wire.Reset(lane, 1, None, {"said": "x" * 200}) for lane in range(8)]
    for request in requests:
        ends.gateway.ask(request)
    assert ends.gateway.undelivered > 1000
    for event in ends.to_host():
        assert isinstance(event, wire.Reset)
        ends.host.answer(event, first_rows(lane=event.lane, infos={"said": "x" * 200}))
    answers = ends.host.undelivered
    assert answers > 1000
    ends.host.receive(frame_as(wire.Ping(1)), 0.0)
    ends.host.outgoing()
    ends.host.sent(100)
    ends.host.sent(answers - 100)
    assert ends.host.undelivered == len(frame_as(wire.Pong(1)))
    ends.host.sent(ends.host.undelivered)
    assert ends.host.phase is wire.ConnectionPhase.RUNNING


def test_who_asks_again_and_again_and_does_not_read_is_given_up() -> None:
    ends = running_reset(limits=wire.Limits(undelivered=1000))
    events: list[wire.Event] = []
    for _ in range(20):
        events += ends.host.receive(frame_as(RESET), 0.0)
    assert error_of(events).code == "undelivered"


def test_who_asks_on_and_on_and_does_not_read_is_given_up_and_the_answer_waits_for_the_next_connection() -> None:
    ends = running_reset(limits=wire.Limits(undelivered=1000))
    for number in range(2, 20):
        (request,) = ends.host.receive(frame_as(wire.Step(0, number, np.array([1, 0]))), 0.0)
        assert isinstance(request, wire.Step)
        try:
            ends.host.answer(request, rows(number=number))
        except WireError as error:
            assert error.code == "undelivered"
            break
    assert number > 2
    assert ends.host.phase is wire.ConnectionPhase.BROKEN
    assert not ends.host_session.take(request)


@pytest.mark.parametrize("state", ["broken", "leaving"])
def test_nothing_is_sent_through_a_connection_that_is_not_running(state: str) -> None:
    ends = running(said=hello(role="rollout"))
    for end in (ends.host, ends.gateway):
        end.goodbye("done") if state == "leaving" else end.ended()
        taken_from(end)
    with pytest.raises(WireError, match=f"metrics: the connection is {state}, expected running"):
        ends.host.tell(wire.Metrics({}))
    with pytest.raises(WireError, match=f"settings: the connection is {state}, expected running"):
        ends.gateway.tell(wire.Settings({}))
    assert taken_from(ends.host) + taken_from(ends.gateway) == b""


@pytest.mark.parametrize("secret", [None, SECRET])
def test_two_ends_with_one_secret_or_none_come_together(secret: bytes | None) -> None:
    ends = running(host_secret=secret, gateway_secret=secret)
    assert ends.host.phase is ends.gateway.phase is wire.ConnectionPhase.RUNNING
    assert ends.host_session.token == TOKEN


def test_the_secret_is_not_sent_and_the_proofs_are_those_of_the_documentation() -> None:
    ends = Ends()
    hello_frame = taken_from(ends.host)
    ends.gateway.receive(hello_frame, 0.0)
    challenge_frame = taken_from(ends.gateway)
    ends.host.receive(challenge_frame, 0.0)
    proof_frame = taken_from(ends.host)
    transcript = hashlib.sha256(hello_frame + challenge_frame).digest()
    assert wire.decode(proof_frame).mac == hmac.new(SECRET, b"rollflow host" + transcript, "sha256").digest()  # type: ignore[union-attr]
    ends.gateway.receive(proof_frame, 0.0)
    ends.gateway.welcome(wire.GatewaySession(TOKEN, hello(), (0, 1), (0, 2)))
    welcome_frame = taken_from(ends.gateway)
    assert wire.decode(welcome_frame).mac == hmac.new(SECRET, b"rollflow gateway" + transcript, "sha256").digest()  # type: ignore[union-attr]
    assert SECRET not in hello_frame + challenge_frame + proof_frame + welcome_frame


@pytest.mark.parametrize(
    ("host_secret", "gateway_secret", "told"),
    [
        (b"other", SECRET, "proof.mac: the host has another secret, or somebody has changed what it said"),
        (None, SECRET, "the gateway asks for a secret, and this host has none"),
        (SECRET, None, "the gateway asks for no secret, and this host has one"),
    ],
)
def test_secrets_that_differ_are_told_both(host_secret: bytes | None, gateway_secret: bytes | None, told: str) -> None:
    ends = Ends(host_secret=host_secret, gateway_secret=gateway_secret)
    events = [event for _ in range(3) for event in [*ends.to_gateway(), *ends.to_host()]]
    errors = [event for event in events if isinstance(event, WireError)]
    assert len(errors) == 2
    for broken in errors:
        assert told in str(broken)
        assert broken.code == "secret"
    assert not ends.host.is_open
    assert not ends.gateway.is_open


@pytest.mark.parametrize(
    ("mac_of", "token", "code", "told"),
    [
        (lambda ends: bytes(32), TOKEN, "secret", "welcome.mac: the gateway does not know the secret"),
        (lambda ends: wire.decode(taken_from(ends.host)).mac, TOKEN, "secret", "the gateway does not know the secret"),
        (
            lambda ends: prove(SECRET, GATEWAY, ends.gateway._transcript),
            bytes(16),
            "session",
            "welcome.session is not the one in the hello",
        ),
    ],
    ids=["no proof", "the host's own proof", "another session"],
)
def test_a_welcome_is_refused_that_is_not_for_this_host_by_its_gateway(
    mac_of: Callable[[Ends], bytes], token: bytes, code: str, told: str
) -> None:
    ends = Ends()
    ends.to_gateway()
    ends.to_host()
    lanes = wire.GatewaySession(TOKEN, hello(), (0, 1), (0, 2)).grants()
    error = error_of(ends.host.receive(frame_as(wire.Welcome(mac_of(ends), token, False, 0, lanes)), 0.0))
    assert told in str(error)
    assert ends.host_session.send is None
    assert told_by(ends.host).code == code


@given(st.data())
def test_whoever_changes_the_hello_or_the_challenge_on_its_way_is_found_out(data: st.DataObject) -> None:
    ends = Ends()
    of_host = data.draw(st.booleans())
    frame = bytearray(taken_from(ends.host))
    if not of_host:
        ends.gateway.receive(frame, 0.0)
        frame = bytearray(taken_from(ends.gateway))
    at = data.draw(st.integers(0, len(frame) - 1))
    frame[at] ^= data.draw(st.integers(1, 255))
    (ends.gateway if of_host else ends.host).receive(frame, 0.0)
    ends.to_host()
    assert not any(isinstance(event, wire.Hello) for event in ends.to_gateway())


@pytest.mark.parametrize(
    ("changed", "code", "told"),
    [
        ({"versions": (2, 3)}, "version", "hello.versions is 2 to 3, expected some with 1"),
        ({"slots": ()}, "message", "hello.slots is empty"),
    ],
)
def test_a_hello_that_can_not_be_met_is_refused_by_host_name(changed: dict[str, Any], code: str, told: str) -> None:
    ends = Ends()
    events = ends.gateway.receive(frame_as(hello(**changed)), 0.0)
    with refusing(code, f"^host 'sim-1': {told}"):
        raise error_of(events)
    refused = told_by(ends.gateway)
    assert refused.code == code
    (broken,) = ends.host.receive(frame_as(refused), 0.0)
    assert isinstance(broken, WireError)
    assert broken.code == code
    assert str(broken).startswith(f"gateway: refuses: {refused.text}")


def test_spaces_are_read_once_their_host_has_proved_itself() -> None:
    said = hello(observation_space={"kind": "Text"})
    with pytest.raises(WireError, match=r"hello.observation_space is .*, expected a space"):
        Ends(said=said)
    gateway = Ends(gateway_secret=None).gateway
    assert gateway.receive(frame_as(said), 0.0) == []
    with refusing("spaces", "^host 'sim-1': hello.observation_space is "):
        raise error_of(gateway.receive(frame_as(wire.Proof(b"")), 0.0))


def test_a_gateway_of_another_version_is_refused() -> None:
    ends = Ends()
    ends.to_gateway()
    challenge = wire.Challenge(2, "later", GATEWAY_NONCE, True, 1 << 20, 1.0, 1.0)
    error = error_of(ends.host.receive(frame_as(challenge), 0.0))
    assert str(error) == "gateway: challenge.version is 2, expected 1 to 1"


@pytest.mark.parametrize(
    "message", [wire.Ping(1), wire.Proof(b""), wire.Reset(0, 1, None, None), wire.Welcome(b"", TOKEN, False, 0, ())]
)
def test_a_message_out_of_turn_is_refused(message: wire.Message) -> None:
    for connection in (Ends().host, Ends().gateway):
        check_broken(connection.receive(frame_as(message), 0.0), "order", f"{message.kind} in the handshake")
        assert told_by(connection).code == "order"


def test_nothing_is_taken_of_a_host_before_its_welcome() -> None:
    ends = greeted()
    error = error_of(ends.gateway.receive(frame_as(wire.Proof(bytes(32))), 0.0))
    assert "proof in the handshake, expected nothing before the welcome" in str(error)


def test_the_handshake_has_a_time_limit_at_both_ends() -> None:
    ends = Ends(limits=wire.Limits(handshake_s=5), now=100.0)
    ends.to_gateway()
    for connection in (ends.host, ends.gateway):
        assert connection.next_deadline() == 105.0
        assert connection.tick(104.9) == []
        check_broken(connection.tick(105.0), "handshake", "the handshake is not over after 5 s")
        assert connection.next_deadline() is None
        assert told_by(connection).code == "handshake"


def test_a_host_comes_back_to_its_session_and_a_stranger_does_not() -> None:
    ends = running()
    token = ends.host_session.token
    again = greeted(host_session=ends.host_session)
    assert again.gateway.hello is not None
    assert again.gateway.hello.session == token == TOKEN
    with pytest.raises(WireError, match="the session is not the one that the host named"):
        again.gateway.welcome(wire.GatewaySession(bytes(16), again.gateway.hello, (5, 6), (0, 2)))
    again.gateway.welcome(wire.GatewaySession(TOKEN, again.gateway.hello, (5, 6), (0, 2)))
    (welcome,) = again.to_host()
    assert isinstance(welcome, wire.Welcome)
    assert not welcome.resumed


def test_a_busy_host_takes_no_welcome_but_one_to_go_on() -> None:
    before = running()
    other = greeted(host_session=before.host_session)
    other.host.is_busy = True
    other.gateway.welcome(wire.GatewaySession(TOKEN, hello(), (0, 1), (0, 2)))
    check_broken(other.to_host(), "busy", "the host is busy with another gateway")
    assert told_by(other.host).code == "busy"
    same = greeted(host_session=before.host_session)
    same.host.is_busy = True
    assert before.session is not None
    same.gateway.welcome(before.session)
    (welcome,) = same.to_host()
    assert isinstance(welcome, wire.Welcome)
    assert welcome.resumed


def test_little_is_taken_of_an_end_that_has_not_proved_itself() -> None:
    ends = Ends(limits=wire.Limits(max_frame=1 << 30))
    for end in (ends.host, ends.gateway):
        error = error_of(end.receive((2 << 20).to_bytes(4, "little"), 0.0))
        assert "frame of 2097152 bytes, expected at most 1048576" in str(error)
    welcomed = running()
    assert welcomed.host.receive(((2 << 20) + 4).to_bytes(4, "little"), 0.0) == []


def test_where_not_a_word_has_come_it_may_be_that_one_end_uses_tls() -> None:
    doubt = "nothing has come: expected the other end to be at work, and both to use TLS, or neither"
    assert doubt in str(error_of(Ends().gateway.tick(1e3)))
    assert doubt in str(error_of(Ends().gateway.ended()))
    ends = Ends()
    ends.gateway.may_use_tls = False  # over a socket of this machine
    assert str(error_of(ends.gateway.ended())).endswith("nothing has come: expected the other end to be at work")
    ends = Ends()
    ends.to_gateway(1)
    assert doubt not in str(error_of(ends.gateway.tick(1e3)))


def test_a_host_that_changed_is_not_welcomed_to_its_session() -> None:
    session = running().session
    assert session is not None
    again = greeted(said=hello(autoreset="DISABLED"))
    with pytest.raises(WireError, match=r"hello.autoreset is not what it was"):
        again.gateway.welcome(session)
    again.gateway.refuse("session", "hello.autoreset is not what it was")
    assert error_of(again.to_host()).code == "session"


def test_a_gateway_that_is_not_asked_in_can_not_welcome() -> None:
    gateway = wire.GatewayConnection(software="g", nonce=GATEWAY_NONCE, secret=None, limits=wire.Limits(), now=0.0)
    with pytest.raises(WireError, match="welcome: no host waits for it"):
        gateway.welcome(wire.GatewaySession(TOKEN, hello(), (0, 1), (0, 2)))


def test_either_end_may_say_goodbye_in_the_handshake() -> None:
    ends = greeted()
    ends.host.goodbye("changed my mind")
    ends.gateway.goodbye("full")
    (at_gateway,), (at_host,) = ends.to_gateway(), ends.to_host()
    assert isinstance(at_gateway, wire.Goodbye)
    assert isinstance(at_host, wire.Goodbye)
    assert ends.host.phase is ends.gateway.phase is wire.ConnectionPhase.ENDED


@pytest.mark.parametrize("claim", [b"", (1 << 16).to_bytes(4, "little") + (8).to_bytes(4, "little")])
def test_a_stranger_costs_little_memory_until_the_handshake_is_over(claim: bytes) -> None:
    stranger = Ends()
    stranger.gateway.receive(claim, 0.0)
    assert len(stranger.gateway.buffer()) <= 16 << 10
    assert allocated(stranger.gateway._decoder) <= 20 << 10
    ends = running()
    assert len(ends.gateway.buffer()) == len(ends.host.buffer()) == 64 << 10


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
