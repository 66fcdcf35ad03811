"""Spans are kept for who asks, as many as there is room for, and come with times on the clock of who has asked."""

import dataclasses
from collections.abc import Iterable

import numpy as np
import pytest
from wire_ends import Ends, running
from wire_messages import hello

from rollflow.stream.graph.meter import clock
from rollflow.stream.net.peer_traces import PeerTraces
from rollflow.stream.net.span_answers import SpanAnswers
from rollflow.stream.traces.peer_spans import PeerSpans
from rollflow.stream.wire import MOST_ITEMS, MOST_SPANS, TraceRequest, TraceSpans, encode
from rollflow.stream.wire.codec.tracing import LATEST_NS

AHEAD_NS, BEHIND_NS = 600 * 10**9, -(clock() // 2)


class Taken:
    """Spans and lanes that a trace was given."""

    def __init__(self) -> None:
        self.lanes: list[int] = []
        self.spans: list[PeerSpans] = []

    def awaits(self, lanes: Iterable[int]) -> None:
        self.lanes += lanes

    def take_there(self, spans: PeerSpans) -> None:
        self.spans.append(spans)


def asked(number: int = 1, *, goes_on: bool = True) -> TraceRequest:
    return TraceRequest(number, goes_on)


def shifted(spans: TraceSpans, by: int) -> TraceSpans:
    """The answer of an end whose clock is so many ns ahead."""
    times = {name: getattr(spans, name) + by for name in ("clock", "begins", "ends")}
    return dataclasses.replace(spans, **times)


def test_spans_come_in_parts_in_their_order_and_once() -> None:
    answers = SpanAnswers()
    answers.answer(asked(), 0)
    for number in range(2 * MOST_SPANS + 5):
        answers.record(number % 3, f"kind {number % 2}", number, number + 1)
    found = [answers.answer(asked(number), 0) for number in range(3)]
    assert [spans.has_more for spans in found] == [True, True, False]
    assert [len(spans.begins) for spans in found] == [MOST_SPANS, MOST_SPANS, 5]
    begins = np.concatenate([spans.begins for spans in found])
    np.testing.assert_array_equal(begins, np.arange(2 * MOST_SPANS + 5))
    assert [found[0].names[kind] for kind in found[0].kinds[:3]] == ["kind 0", "kind 1", "kind 0"]
    for spans in found:
        spans.check()


def test_the_oldest_are_dropped_and_counted_where_nobody_asks() -> None:
    answers = SpanAnswers(most=4)
    answers.answer(asked(), 0)
    for number in range(10):
        answers.record(0, "step", number, number)
    first, second = answers.answer(asked(), 0), answers.answer(asked(), 0)
    assert (first.begins.tolist(), first.dropped) == ([6, 7, 8, 9], 6)
    assert (len(second.begins), second.dropped) == (0, 0)


def test_a_full_answer_is_no_larger_than_the_smallest_frame_that_an_end_may_take() -> None:
    answers = SpanAnswers()
    answers.answer(asked(), 0)
    for number in range(2 * MOST_SPANS):
        answers.record(0, f"{number % 80}".rjust(64), number, number, [number, number])
    spans = answers.answer(asked(), 0)
    spans.check()
    assert len(spans.names) == 64
    assert len(spans.items) <= MOST_ITEMS
    assert len(b"".join(encode(spans))) <= 1 << 16


def test_items_beyond_those_of_a_message_come_with_the_next_one() -> None:
    answers = SpanAnswers()
    answers.answer(asked(), 0)
    for number in range(3):
        answers.record(0, "update", number, number, range(number * 600, (number + 1) * 600))
    answers.record(0, "update", 3, 3, range(MOST_ITEMS + 1))
    found = [answers.answer(asked(number), 0) for number in range(2, 6)]
    for spans in found:
        spans.check()
    assert [spans.begins.tolist() for spans in found] == [[0], [1], [2], [3]]
    assert np.concatenate([spans.items for spans in found[:3]]).tolist() == list(range(1800))
    assert (len(found[3].items), found[3].dropped) == (MOST_ITEMS, 1)  # one that fits no message is cut, and counted
    assert [spans.has_more for spans in found] == [True, True, True, False]


def test_an_end_that_does_not_read_gets_no_spans_but_its_clock() -> None:
    answers = SpanAnswers()
    answers.answer(asked(), 0)
    answers.record(0, "step", 1, 2)
    busy, then = answers.answer(asked(), 1 << 30), answers.answer(asked(), 0)
    assert (len(busy.begins), busy.has_more, len(then.begins)) == (0, True, 1)
    assert busy.clock[0] <= busy.clock[1]


def test_what_is_left_is_said_once_and_nothing_where_there_is_none() -> None:
    answers = SpanAnswers()
    assert answers.rest() is None
    answers.record(2, "update", 1, 2, [7, 8])
    rest = answers.rest()
    assert rest is not None
    assert (rest.number, rest.lanes.tolist(), rest.items.tolist(), rest.item_spans.tolist()) == (0, [2], [7, 8], [0, 0])
    assert answers.rest() is None
    answers.record(2, "update", 1, 2)
    answers.forget()
    assert answers.rest() is None


def test_what_is_under_way_when_the_other_end_goes_is_not_told_the_next_one() -> None:
    answers = SpanAnswers(most=4)
    answers.answer(asked(), 0)
    recorder_of = answers.recorder_of(1)
    assert recorder_of is not None
    record = recorder_of("module")
    answers.forget()
    answers.answer(asked(), 0)
    for _ in range(5):
        record(1, 2)
    found = answers.answer(asked(2), 0)
    assert (len(found.lanes), found.dropped) == (0, 0)


def test_a_trace_gets_nothing_of_the_one_before() -> None:
    answers = SpanAnswers()
    answers.answer(asked(), 0)
    answers.answer(asked(2, goes_on=False), 0)
    answers.record(0, "late", 1, 2)
    answers.answer(asked(3), 0)
    answers.record(0, "step", 3, 4)
    assert answers.answer(asked(4), 0).names == ("step",)


def round_trip(ends: Ends, traces: PeerTraces, answers: SpanAnswers, by: int) -> int:
    """Carry requests and answers until nothing is under way: how many."""
    for count in range(100):
        requests = ends.to_host()
        if not requests:
            return count
        for request in requests:
            assert isinstance(request, TraceRequest)
            ends.host.tell(shifted(answers.answer(request, 0), by))
        for spans in ends.to_gateway():
            assert isinstance(spans, TraceSpans)
            traces.take(ends.gateway, spans)
    raise AssertionError("it is asked again and again")


@pytest.mark.parametrize("by", [0, AHEAD_NS, BEHIND_NS], ids=["equal", "ahead", "behind"])
def test_times_are_those_of_the_clock_here_however_far_the_other_one_is(by: int) -> None:
    ends, traces, answers, taken = running(said=hello(answers_trace=True)), PeerTraces(), SpanAnswers(), Taken()
    traces.begin(taken)
    traces.ask(ends.gateway, "host sim", [4, 7])
    assert taken.lanes == [4, 7]
    answers.answer(asked(), 0)
    begin = clock()
    answers.record(0, "step", begin, end := clock())
    assert round_trip(ends, traces, answers, by) == 8  # at once, until the clocks are aligned
    (found,) = [each for each in taken.spans if each.spans]
    (span,) = found.spans
    assert (found.peer, span.lane, span.name, span.end - span.begin) == ("host sim", 0, "step", end - begin)
    assert abs(span.begin - begin) <= found.uncertainty_ns
    assert abs(found.offset_ns + by) <= found.uncertainty_ns
    traces.ask(ends.gateway, "host sim")
    assert not ends.to_host()  # not before its time


@pytest.mark.parametrize("other_ns", [0, LATEST_NS])
def test_the_times_of_a_clock_that_is_years_away_are_times_here(other_ns: int) -> None:
    ends, traces, taken = running(said=hello(answers_trace=True)), PeerTraces(), Taken()
    traces.begin(taken)
    traces.ask(ends.gateway, "host sim", [0])
    ends.to_host()
    clocks = np.full(2, other_ns)
    span = {"lanes": np.zeros(1, np.int64), "kinds": np.zeros(1, np.int64)}
    span |= {"begins": np.array([LATEST_NS - other_ns]), "ends": np.array([LATEST_NS])}
    spans = dataclasses.replace(SpanAnswers().answer(asked(), 0), clock=clocks, names=("step",), **span)
    ends.host.tell(spans)
    (answer,) = ends.to_gateway()
    assert isinstance(answer, TraceSpans)
    traces.take(ends.gateway, answer)
    traces.end()
    (found,) = taken.spans
    (written,) = found.spans
    assert written.end == LATEST_NS + found.offset_ns
    assert written.begin == LATEST_NS - other_ns + found.offset_ns


def test_the_last_request_gets_what_is_left_and_ends_it() -> None:
    ends, traces, answers, taken = running(said=hello(answers_trace=True)), PeerTraces(), SpanAnswers(), Taken()
    traces.begin(taken)
    traces.ask(ends.gateway, "host sim")
    round_trip(ends, traces, answers, 0)
    assert answers.is_on
    for number in range(MOST_SPANS + 1):
        answers.record(0, "step", number, number)
    traces.begin_end()
    traces.ask(ends.gateway, "host sim")
    assert traces.is_awaited
    round_trip(ends, traces, answers, 0)
    assert traces.has_rest
    assert not answers.is_on
    assert sum(len(each.spans) for each in taken.spans) == MOST_SPANS + 1
    traces.end()
    traces.ask(ends.gateway, "host sim")
    assert not ends.to_host()


def test_an_end_that_can_not_answer_is_not_asked() -> None:
    ends, traces, taken = running(said=hello()), PeerTraces(), Taken()
    traces.begin(taken)
    traces.ask(ends.gateway, "host sim", [0])
    assert taken.lanes == []
    assert not ends.to_host()
    assert not traces.is_awaited
