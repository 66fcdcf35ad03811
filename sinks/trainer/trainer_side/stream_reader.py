"""StreamReader: the code that takes the batches of a trainer's stream, as rollouts are told that wait for it."""

import threading
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary

from rollflow.stream.doctor.rules import median
from rollflow.stream.doctor.stacks import stack_of_thread
from rollflow.stream.graph.meter import clock
from rollflow.stream.net.inspections import standing_of
from rollflow.stream.net.span_answers import SpanAnswers
from rollflow.stream.wire import ConnectionPhase, Inspect, Standing, TraceRequest, TraceSpans, TrainerConnection

_KEPT = 101  # times
WAITS, MAKES, UPDATE = "waits for a batch", "makes its batch", "update"


class UsedItem(NamedTuple):
    """An item that a batch was made of: the rollout that it came from, and its number in the stream from there."""

    source: Any
    number: int


class LoopSpans(Protocol):
    """Taker of the spans of a reader's loop."""

    def record(self, name: str, begin: int, end: int, used: list[UsedItem]) -> None:
        """Take a span, with times in ns on the clock `perf_counter_ns`, and the items that it used."""

    def arrives(self, item: Any, began: int, end: int) -> None:
        """Take an item that has come from a rollout, and was read in this time."""


class StreamReader:
    """Marks of when the reader asks for a batch and when it gets one, made in its thread, read from any.

    takers    of the loop's spans, beside the rollouts that ask for them
    """

    def __init__(self) -> None:
        self.takers: list[LoopSpans] = []
        self._since = monotonic()
        self._doing = "has not asked for a batch yet"
        self._has_batch = False
        self._thread = 0
        self._times: deque[float] = deque(maxlen=_KEPT)  # seconds that it had each of its last batches for
        self._spans: WeakKeyDictionary[Any, SpanAnswers] = WeakKeyDictionary()  # of the rollouts that trace the loop
        self._lock = threading.Lock()  # of these
        self._at = WAITS  # what the span under way is of
        self._began = 0  # when that began, in ns; 0: the reader has not asked yet
        self._used: list[UsedItem] = []  # in the batch that it has, where anybody wants to know

    def asks(self) -> None:
        """Note that it asks for the next batch."""
        now, self._thread = monotonic(), threading.get_ident()
        if self._has_batch:
            self._times.append(now - self._since)
        self._since, self._doing, self._has_batch = now, WAITS, False
        self._begin(WAITS)

    @contextmanager
    def making(self) -> Iterator[None]:
        """Note that a batch is being made for it, by the learner pieces in its thread, while the block lasts."""
        since, doing = self._since, self._doing
        self._since, self._doing = monotonic(), MAKES
        self._begin(MAKES)
        try:
            yield
        finally:
            self._since, self._doing = since, doing
            self._begin(WAITS)

    def gets(self, of: Iterable[Any] = ()) -> None:
        """Note that it gets one, made of these arrived items; none: nobody knows which."""
        self._since, self._doing, self._has_batch = monotonic(), "works on its batch", True
        self._begin(UPDATE)
        self._used = [UsedItem(item.source, item.number) for item in of] if self.takers or self._spans else []

    def arrives(self, item: Any, began_s: float) -> None:
        """Note that an item has come, to be read from a time on, on the clock `monotonic`. In the listener's thread."""
        for taker in self.takers:
            taker.arrives(item, int(began_s * 1e9), clock())

    def leaves(self) -> None:
        """Note that it asks for no more."""
        self._begin(WAITS)
        self._began = 0

    def answer(self, question: Inspect | TraceRequest, source: Any, undelivered: int) -> Standing | TraceSpans:
        """What it is at, and the stack of its thread; or what it was at, for a rollout's trace.

        undelivered    bytes that are on their way to the rollout
        """
        if isinstance(question, TraceRequest):
            with self._lock:
                spans = self._spans.setdefault(source, SpanAnswers())
            return spans.answer(question, undelivered)
        usual = f" (the median was {median(list(self._times)):.1f} s)" if self._has_batch and self._times else ""
        elapsed_s = monotonic() - self._since
        return standing_of(question.lane, self._doing + usual, elapsed_s, stack_of_thread(self._thread))

    def tell_rest(self, source: Any, connection: TrainerConnection) -> None:
        """Tell a rollout that traces the loop what it has not asked for yet, before a goodbye.

        source    None: the connection is no rollout's, and is told nothing
        """
        spans = None if source is None else self._spans.get(source)
        while spans is not None and connection.phase is ConnectionPhase.RUNNING:
            if (rest := spans.rest()) is None:
                return
            connection.tell(rest)

    def _begin(self, at: str) -> None:
        """End the span under way, and begin another one."""
        if not (self.takers or self._spans):
            self._began = 0
            return
        now, used, self._used = clock(), self._used, []
        if self._began:
            for taker in self.takers:
                taker.record(self._at, self._began, now, used)
            with self._lock:
                spans = [(source, each) for source, each in self._spans.items() if each.is_on]
            for source, each in spans:
                numbers = [item.number for item in used if item.source is source]
                each.record(0, self._at, self._began, now, numbers)
        self._at, self._began = at, now
