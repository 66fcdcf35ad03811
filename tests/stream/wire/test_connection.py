"""A connection that is under way: what may come, what must not, and how it ends."""

import re

import numpy as np
import pytest
from wire_ends import Ends, check_broken, error_of, frame_as, refusing, running, running_reset, taken_from, told_by
from wire_messages import agent_rows, first_rows, hello, rows

from rollflow.stream import wire
from rollflow.stream.data.errors import WireError
from rollflow.stream.wire.session import TakenRequest

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
        (wire.Metrics({}), "credit", "metrics without a credit"),
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
    assert [type(event) for event in events] == [wire.ConnectionBroken]
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
    assert [type(event) for event in events] == [wire.Rows, wire.ConnectionBroken]
    assert error_of(events).code == "frame"


def test_a_refusal_is_raised_as_the_others_words() -> None:
    ends, _ = stepping()
    ends.gateway.refuse("busy", "too many hosts")
    (broken,) = ends.to_host()
    assert isinstance(broken, wire.ConnectionBroken)
    assert (str(broken.error), broken.error.code) == ("gateway: refuses: too many hosts", "busy")
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


def test_a_host_sends_unasked_as_much_as_it_has_credit_for() -> None:
    ends = running(credits=1)
    ends.host.tell(wire.Metrics({"a": 1}))
    with pytest.raises(WireError, match="metrics: no credit left"):
        ends.host.tell(wire.Metrics({"a": 2}))
    ends.gateway.give(2)
    ends.to_host()
    assert ends.host.credits == 2
    ends.host.tell(wire.Metrics({"a": 2}))
    ends.host.tell(wire.Metrics({"a": 3}))
    metrics = [event.metrics for event in ends.to_gateway() if isinstance(event, wire.Metrics)]
    assert metrics == [{"a": 1}, {"a": 2}, {"a": 3}]
    assert ends.gateway.credits == ends.host.credits == 0


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
    assert ends.host_session.take(request) is TakenRequest.AGAIN


@pytest.mark.parametrize("state", ["broken", "leaving"])
def test_nothing_is_sent_through_a_connection_that_is_not_running(state: str) -> None:
    ends = running(said=hello(role="rollout"))
    for end in (ends.host, ends.gateway):
        end.goodbye("done") if state == "leaving" else end.ended()
        taken_from(end)
    with pytest.raises(WireError, match=f"metrics: the connection is {state}, expected running"):
        ends.host.tell(wire.Metrics({}))
    with pytest.raises(WireError, match=f"credit: the connection is {state}, expected running"):
        ends.gateway.give(1)
    assert taken_from(ends.host) + taken_from(ends.gateway) == b""
