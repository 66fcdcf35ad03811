"""PeerTraces: the other ends of connections are asked for their spans, while a trace is written in this process."""

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from time import monotonic
from typing import Protocol
from weakref import WeakKeyDictionary

from rollflow.stream.data.errors import WireError
from rollflow.stream.graph.meter import clock
from rollflow.stream.net.sockets import quoted
from rollflow.stream.traces.clock_alignment import ClockAlignment, RoundTrip
from rollflow.stream.traces.peer_spans import PeerSpan, PeerSpans
from rollflow.stream.wire import Connection, TraceSpans

EVERY_S = 0.1  # between two requests to one end
_FIRST = 8  # round trips at once, of which the shortest aligns the clocks
_LAST_S = 0.5  # that all ends have to say the rest


class SpanTaker(Protocol):
    """Writer of the spans of others, on the clock of this process."""

    def awaits(self, lanes: Iterable[int]) -> None:
        """Take note that spans of lanes come from another end, some time after these have begun."""

    def take_there(self, spans: PeerSpans) -> None:
        """Write spans of another end."""


@dataclass(slots=True)
class _End:
    """One other end.

    asked    when it was asked last, in ns
    due      when it is to be asked again, on the clock `monotonic`
    trips    round trips so far
    is_last  whether it was told that no more is wanted
    held     answers whose times are aligned once there were enough round trips
    """

    name: str
    alignment: ClockAlignment = field(default_factory=ClockAlignment)
    asked: int = 0
    due: float = 0.0
    trips: int = 0
    is_waiting: bool = False
    is_last: bool = False
    held: list[TraceSpans] = field(default_factory=list)


class PeerTraces:
    """Requests for spans, and the clocks of those that answer. Every method with the lock of the connections held."""

    def __init__(self) -> None:
        self._taker: SpanTaker | None = None
        self._is_ending = False
        self._ends: WeakKeyDictionary[Connection, _End] = WeakKeyDictionary()

    def begin(self, taker: SpanTaker) -> None:
        """Have other ends be asked, from their next `ask` on, for a trace that begins."""
        self._taker, self._is_ending = taker, False
        self._ends = WeakKeyDictionary()

    def ask(self, connection: Connection, name: str, lanes: Iterable[int] = ()) -> None:
        """Ask another end, where it is time to; one that has not said that it answers is not asked.

        name     of its process, for people
        lanes    whose steps it makes
        """
        if self._taker is None or not connection.can_trace:
            return
        end = self._ends.get(connection)
        if end is None:
            end = self._ends[connection] = _End(name)
            self._taker.awaits(lanes)
        if not end.is_waiting and not end.is_last and (self._is_ending or monotonic() >= end.due):
            self._ask(connection, end)

    def take(self, connection: Connection, spans: TraceSpans) -> None:
        """Take an answer. Where there is more to be had, or the clocks are not aligned yet, ask again."""
        end = self._ends.get(connection)
        if end is None or self._taker is None:  # the trace has ended meanwhile
            return
        if spans.number:
            came, sent = spans.clock.tolist()
            end.alignment.take(RoundTrip(end.asked, came, sent, clock()))
            end.trips, end.is_waiting = end.trips + 1, False
        end.held.append(spans)
        if end.trips >= _FIRST or self._is_ending or not spans.number:
            self._hand_on(end)
        is_unsaid = self._is_ending and not end.is_last
        if spans.number and (end.trips < _FIRST or spans.has_more or is_unsaid):
            self._ask(connection, end)

    @property
    def due(self) -> float | None:
        """When somebody is to be asked again, on the clock `monotonic`; None: nobody is."""
        if self._taker is None:
            return None
        return min((end.due for end in self._ends.values() if not end.is_waiting), default=None)

    def begin_end(self) -> float:
        """Have the next requests be the last; until when, on the clock `monotonic`, their answers are worth a wait."""
        self._is_ending = self._taker is not None
        return monotonic() + _LAST_S

    @property
    def is_awaited(self) -> bool:
        """Whether an answer is still to come to a last request."""
        return self._is_ending and any(end.is_waiting for end in self._ends.values())

    @property
    def has_rest(self) -> bool:
        """Whether the last requests were sent, and answered."""
        return self._is_ending and not self.is_awaited and all(end.is_last for end in self._ends.values())

    def end(self) -> None:
        """Ask nobody any more."""
        if self._taker is not None:
            for end in self._ends.values():
                self._hand_on(end)
        self._taker = None

    def _ask(self, connection: Connection, end: _End) -> None:
        end.asked, end.due = clock(), monotonic() + EVERY_S
        with suppress(WireError):  # it is lost, or is by this
            end.is_waiting, end.is_last = connection.trace(goes_on=not self._is_ending), self._is_ending

    def _hand_on(self, end: _End) -> None:
        held, end.held = end.held, []
        if self._taker is None or not end.alignment.is_known:
            return
        uncertainty = end.alignment.uncertainty_ns(clock())
        for spans in held:
            begins, ends = (end.alignment.here(times).tolist() for times in (spans.begins, spans.ends))
            names = [quoted(name) for name in spans.names]
            kinds = [names[kind] for kind in spans.kinds.tolist()]
            items: dict[int, list[int]] = {}
            for item, place in zip(spans.items.tolist(), spans.item_spans.tolist(), strict=True):
                items.setdefault(place, []).append(item)
            columns = zip(spans.lanes.tolist(), kinds, begins, ends, strict=True)
            found = [PeerSpan(*each, items.get(place, ())) for place, each in enumerate(columns)]
            self._taker.take_there(PeerSpans(end.name, found, end.alignment.offset_ns, uncertainty, spans.dropped))
