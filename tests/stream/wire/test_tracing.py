"""A host or a trainer is asked for its spans: only where it has said that it answers, and once at a time."""

import dataclasses
from typing import Any

import numpy as np
import pytest
from wire_ends import Ends, StreamEnds, greeted, running, taken_from
from wire_messages import EXAMPLES, hello

from rollflow.stream.data.errors import WireError
from rollflow.stream.wire import ConnectionBroken, Event, TraceRequest, TraceSpans, encode


def spans_of(number: int, **fields: Any) -> TraceSpans:
    spans = EXAMPLES["spans"]
    assert isinstance(spans, TraceSpans)
    return dataclasses.replace(spans, number=number, **fields)


def tracing(*, answers: bool = True, role: str = "env") -> Ends:
    return running(said=hello(role=role, answers_trace=answers))


def error_of(events: list[Event]) -> WireError:
    assert isinstance(events[-1], ConnectionBroken), events
    return events[-1].error


def sent(message: TraceRequest | TraceSpans) -> bytes:
    return b"".join(encode(message))


@pytest.mark.parametrize("role", ["env", "rollout"])
def test_a_host_that_answers_is_asked_once_at_a_time(role: str) -> None:
    ends = tracing(role=role)
    assert ends.gateway.trace(goes_on=True)
    assert not ends.gateway.trace(goes_on=True)
    (asked,) = ends.to_host()
    assert isinstance(asked, TraceRequest)
    assert (asked.number, asked.goes_on) == (1, True)
    ends.host.tell(spans_of(1))
    (spans,) = ends.to_gateway()
    assert isinstance(spans, TraceSpans)
    assert (spans.names, spans.begins.tolist()) == (("reset", "step"), [1_000_000, 1_020_000, 3_000_000])
    assert ends.gateway.trace(goes_on=False)
    (asked,) = ends.to_host()
    assert isinstance(asked, TraceRequest)
    assert (asked.number, asked.goes_on) == (2, False)


def test_a_host_that_has_not_said_so_is_not_asked_and_would_refuse() -> None:
    ends = tracing(answers=False)
    assert not ends.gateway.trace(goes_on=True)
    assert taken_from(ends.gateway) == b""
    error = error_of(ends.host.receive(sent(TraceRequest(1, True)), 1.0))
    assert (error.code, str(error)) == ("order", "gateway: trace to a host of role env")


def test_nobody_is_asked_before_the_welcome() -> None:
    ends = greeted(said=hello(answers_trace=True))
    assert not ends.gateway.trace(goes_on=True)
    assert error_of(ends.host.receive(sent(TraceRequest(1, True)), 1.0)).code == "order"


@pytest.mark.parametrize("number", [0, 1, 2])
def test_spans_that_nobody_has_asked_for_are_refused(number: int) -> None:
    ends = tracing()
    assert error_of(ends.gateway.receive(sent(spans_of(number)), 1.0)).code == "order"


def test_what_is_left_may_come_unasked_once_there_was_a_request() -> None:
    ends = tracing()
    ends.gateway.trace(goes_on=True)
    assert ends.gateway.receive(sent(spans_of(0)), 1.0)
    assert ends.gateway.receive(sent(spans_of(1)), 1.0)
    assert ends.gateway.receive(sent(spans_of(0)), 1.0)
    assert error_of(ends.gateway.receive(sent(spans_of(1)), 1.0)).code == "order"


def test_a_trainer_is_asked_as_well() -> None:
    ends = StreamEnds()
    assert ends.source.trace(goes_on=True)
    (asked,) = ends.to_trainer()
    assert isinstance(asked, TraceRequest)
    ends.trainer.tell(spans_of(1, items=np.array([4, 5]), item_spans=np.array([2, 2])))
    (spans,) = ends.to_source()
    assert isinstance(spans, TraceSpans)
    assert spans.items.tolist() == [4, 5]


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"clock": np.array([2, 1])}, r"spans.clock is \[2, 1\]"),
        ({"clock": np.array([1])}, r"spans.clock is \[1\]"),
        (
            {"clock": np.array([-1, 5])},
            "spans.clock goes from -1 to 5, expected times from 0 to 4611686018427387904 ns",
        ),
        ({"begins": np.array([-(2**63), 2, 3])}, "spans.begins goes from -9223372036854775808 to 3, expected times"),
        ({"ends": np.array([2**62 + 1] * 3)}, "spans.ends goes from .* expected times from 0 to 4611686018427387904"),
        ({"kinds": np.array([0, 0, 2])}, "spans.kinds goes to 2, expected places of 2 names"),
        ({"kinds": np.array([0, 0])}, "columns of 3 spans are of other lengths"),
        ({"items": np.array([1])}, "columns of 1 items are of other lengths"),
        ({"items": np.array([1]), "item_spans": np.array([3])}, "spans.item_spans goes to 3, expected places of 3"),
        ({"ends": np.array([1, 2, 3])}, "one ends before it begins"),
    ],
    ids=["clock", "one time", "early", "far too early", "late", "kind", "kinds", "items", "item", "ends"],
)
def test_spans_that_make_no_sense_are_refused(fields: dict[str, Any], told: str) -> None:
    ends = tracing()
    ends.gateway.trace(goes_on=True)
    with pytest.raises(WireError, match=told):
        raise error_of(ends.gateway.receive(sent(spans_of(1, **fields)), 1.0))


def test_spans_of_lanes_that_the_host_does_not_have_are_left_out_and_counted() -> None:
    ends = tracing()
    ends.gateway.trace(goes_on=True)
    items = {"items": np.array([4, 5, 6]), "item_spans": np.array([0, 1, 2])}
    given = spans_of(1, lanes=np.array([0, 9, 1]), dropped=3, **items)
    (spans,) = ends.gateway.receive(sent(given), 1.0)
    assert isinstance(spans, TraceSpans)
    spans.check()
    assert (spans.lanes.tolist(), spans.dropped) == ([0, 1], 4)
    assert (spans.begins.tolist(), spans.kinds.tolist()) == (
        given.begins[[0, 2]].tolist(),
        given.kinds[[0, 2]].tolist(),
    )
    assert (spans.items.tolist(), spans.item_spans.tolist()) == ([4, 6], [0, 1])
