"""SpanAnswers: what this end of a connection was at, kept while the other end writes a trace, and sent when it asks."""

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from rollflow.stream.graph.meter import clock
from rollflow.stream.traces.trace import Record
from rollflow.stream.wire.codec.tracing import MOST_ITEMS, MOST_NAME, MOST_NAMES, MOST_SPANS, TraceRequest, TraceSpans

MOST_KEPT = 1 << 16  # spans that wait to be asked for
_MUCH = 1 << 20  # bytes that wait for the other end: it gets no spans beside them

_Span = tuple[int, str, int, int, Sequence[int]]  # lane, name, begin, end, items


class KeptSpans:
    """Spans that are kept to be asked for. From any thread.

    Whoever records here may still do so when the other end is gone, and another one asks: that one gets other spans.
    """

    def __init__(self, most: int) -> None:
        self.spans: deque[_Span] = deque(maxlen=most)
        self.dropped = 0

    def record(self, lane: int, name: str, begin: int, end: int, items: Sequence[int] = ()) -> None:
        """Keep a span: see `SpanAnswers.record`."""
        if len(self.spans) == self.spans.maxlen:
            self.dropped += 1
        self.spans.append((lane, name, begin, end, items))


class SpanAnswers:
    """Spans of this end, from the first request for them until it is said that no more are wanted.

    most     spans that are kept; where more come, the oldest are dropped, and counted

    is_on    whether spans are to be recorded; `record` itself does not ask
    kept     spans for the other end that there is: others after each `forget`
    """

    def __init__(self, most: int = MOST_KEPT) -> None:
        self.is_on = False
        self.kept = KeptSpans(most)

    def record(self, lane: int, name: str, begin: int, end: int, items: Sequence[int] = ()) -> None:
        """Keep a span of a lane, with times in ns on the clock `perf_counter_ns`. From any thread.

        items    numbers of the stream's items that it used
        """
        self.kept.record(lane, name, begin, end, items)

    def recorder_of(self, lane: int) -> Callable[[str], Record] | None:
        """Gives a function that records spans of a lane, by their name; None: none are to be recorded.

        What it records after the next `forget` is nobody's.
        """
        record = self.kept.record
        return (lambda name: partial(record, lane, name)) if self.is_on else None

    def answer(self, request: TraceRequest, undelivered: int) -> TraceSpans:
        """The answer to a request, which has just come: the oldest spans that there are.

        undelivered    bytes that wait for the other end; where they are many, spans are kept for another request
        """
        came = clock()
        if request.goes_on and not self.is_on:
            self.kept.spans.clear()  # of a trace that has ended
        self.is_on = request.goes_on
        return self._message(request.number, came, [] if undelivered > _MUCH else self._taken())

    def rest(self) -> TraceSpans | None:
        """What is left, before a goodbye; None: nothing is."""
        taken = self._taken()
        self.is_on = False
        return self._message(0, clock(), taken) if taken else None

    def forget(self) -> None:
        """Keep no more, and forget what is kept: the other end is gone."""
        self.is_on, self.kept = False, KeptSpans(self.kept.spans.maxlen or 0)

    def _taken(self) -> list[_Span]:
        """The oldest spans, as many as one message takes."""
        taken: list[_Span] = []
        names: set[str] = set()
        items = 0
        while self.kept.spans and len(taken) < MOST_SPANS and len(names) < MOST_NAMES:
            lane, name, begin, end, used = span = self.kept.spans.popleft()
            if taken and items + len(used) > MOST_ITEMS:
                self.kept.spans.appendleft(span)  # for the next message
                break
            if len(used) > MOST_ITEMS:  # no message takes it as it is
                self.kept.dropped += 1
            taken.append((lane, name, begin, end, used[:MOST_ITEMS]))
            items += len(used)
            names.add(name)
        return taken

    def _message(self, number: int, came: int, taken: Sequence[_Span]) -> TraceSpans:
        names: dict[str, int] = {}
        kinds = [names.setdefault(name[:MOST_NAME], len(names)) for _, name, *_ in taken]
        items = [(item, place) for place, span in enumerate(taken) for item in span[4]]
        dropped, self.kept.dropped = self.kept.dropped, 0
        return TraceSpans(
            number=number,
            clock=_column([came, clock()]),
            names=tuple(names),
            lanes=_column([span[0] for span in taken]),
            kinds=_column(kinds),
            begins=_column([span[2] for span in taken]),
            ends=_column([span[3] for span in taken]),
            items=_column([item for item, _ in items]),
            item_spans=_column([place for _, place in items]),
            dropped=dropped,
            has_more=bool(self.kept.spans),
        )


def _column(values: Sequence[int]) -> NDArray[np.int64]:
    return np.array(values, np.int64)
