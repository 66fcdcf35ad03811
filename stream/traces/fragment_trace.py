"""FragmentTrace: lanes, their fragments and the updates that used them, in a trace."""

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from threading import Lock
from time import perf_counter_ns
from typing import Any, NamedTuple

from rollflow.stream.traces.peer_spans import PeerSpan, PeerSpans, PeerTracks
from rollflow.stream.traces.trace import MOST_ARROWS, Record, Trace

FragmentName = tuple[int, int]  # its lane, and its number there
FragmentsOf = Callable[[int], Iterable[FragmentName]]

_MOST_BEGINS = 1 << 14  # of a lane's spans elsewhere, that fragments may have begun with


class _Place(NamedTuple):
    """A time on a track, in ns, and the process that the track is of; empty: of this one."""

    track: str
    at: int
    process: str = ""


@dataclass(slots=True)
class _Cut:
    """A fragment that was cut.

    number   of its arrows, in the trace
    began    its first step here: where that was asked for, if it is made elsewhere
    end      when it was cut
    first    its first step elsewhere; None: it is not known yet, or there is none
    ends     where its arrows end, which wait for `first`, and whether at a trainer
    begun    whether arrows within this process, and to a trainer, have begun
    """

    number: int
    began: int
    end: int
    first: _Place | None = None
    ends: list[tuple[_Place, bool]] = field(default_factory=list)
    begun: set[bool] = field(default_factory=set)


@dataclass(slots=True)
class _LaneThere:
    """A lane whose steps are made elsewhere: the begins of its spans there, and fragments that have no first step."""

    begins: deque[_Place] = field(default_factory=lambda: deque(maxlen=_MOST_BEGINS))
    open: dict[FragmentName, _Cut] = field(default_factory=dict)


class FragmentTrace:
    """Records a track for each lane: spans of fragments, from the first step on, and in these the steps made elsewhere.

    An arrow leads from a fragment to what used it. Where another process makes the steps and sends its spans, the arrow
    begins there, with the first of them. Every method may be called in any thread.

    trace     is written to
    prefix    of the rollout's nodes, and of its tracks, in a graph with several
    """

    def __init__(self, trace: Trace, prefix: str = "") -> None:
        self._trace, self._prefix = trace, prefix
        self._tracks = PeerTracks(trace)
        self._begun: dict[int, int] = {}  # lane -> when its fragment began, as far as the trace saw it
        self._cuts: dict[FragmentName, _Cut] = {}
        self._there: dict[int, _LaneThere] = {}
        self._steps: dict[tuple[int, str], Record] = {}
        self._updates = 0
        self._lock = Lock()  # of fragments and their arrows

    def begins(self, lane: int) -> None:
        """Take note that a lane is about to make a step."""
        if lane not in self._begun:
            self._begun[lane] = perf_counter_ns()

    def stepped(self, lane: int, began: int, does: str) -> None:
        """Record what a lane did elsewhere from a time on, such as "step"."""
        if (lane, does) not in self._steps:
            self._steps[lane, does] = self._trace.recorder(self._track(lane), does)
        self._begun.setdefault(lane, began)
        self._steps[lane, does](began, perf_counter_ns())

    def cut(self, fragment: Any) -> None:
        """Record a fragment, which ends now."""
        name = lane, sequence = fragment.lane, fragment.sequence
        began = self._begun.pop(lane, None)
        if began is None:
            return
        args = {"rows": int(fragment.num_rows), "steps": int(fragment.num_steps)}
        # A viewer takes the longer of two spans that begin together for the outer one only where it begins first.
        end = perf_counter_ns()
        self._trace.span(self._track(lane), f"fragment {sequence}", began - 1, end, args)
        with self._lock:
            cut = self._cuts[name] = _Cut(next(self._trace.arrows), began, end)
            while len(self._cuts) > MOST_ARROWS:
                del self._cuts[next(iter(self._cuts))]
            if (there := self._there.get(lane)) is not None:
                there.open[name] = cut
                if len(there.open) > MOST_ARROWS:  # whoever makes them sends no spans
                    oldest = next(iter(there.open))
                    self._end_all(oldest, there.open.pop(oldest))
                self._find_first(there)
            else:
                self._begin_arrow(name, cut, to_trainer=False)

    def update(self, fragments: Iterable[FragmentName], began: int, end: int) -> None:
        """Record the reader's work on a batch of fragments."""
        used = list(fragments)
        args = {"fragments": [f"{self._track(lane)}: {sequence}" for lane, sequence in used]}
        self._trace.span("caller", f"update {self._updates}", began, end, args)
        self._updates += 1
        for name in used:
            self.used(name, "caller", began)

    def used(self, fragment: FragmentName, track: str, at: int) -> None:
        """Record that a fragment was used by what a track has a span of at that time."""
        self._end_arrow(fragment, _Place(track, at), to_trainer=False)

    def awaits(self, lanes: Iterable[int]) -> None:
        """Take note that spans of lanes come from another process, some time after these have begun."""
        with self._lock:
            for lane in lanes:
                self._there.setdefault(lane, _LaneThere())

    def take_there(self, spans: PeerSpans) -> None:
        """Record spans of lanes that another process makes the steps of."""
        written = self._tracks.write(spans, lambda span: self._track(span.lane))
        with self._lock:
            for track, span in written:
                if (there := self._there.get(span.lane)) is not None:
                    there.begins.append(_Place(track, span.inside, spans.peer))
            for lane in {span.lane for _, span in written}:
                if (there := self._there.get(lane)) is not None:
                    self._find_first(there, spans.uncertainty_ns)

    def take_updates(self, spans: PeerSpans, fragments_of: FragmentsOf) -> None:
        """Record spans of a trainer in another process.

        fragments_of    gives the fragments that an item of the stream to it was made of
        """
        for track, span in self._tracks.write(spans, _track_of_trainer):
            place = _Place(track, span.inside, spans.peer)
            for name in {name for item in span.items for name in fragments_of(item)}:
                self._end_arrow(name, place, to_trainer=True)

    def end(self) -> None:
        """Record what waits for spans of others, which do not come any more."""
        with self._lock:
            for there in self._there.values():
                for name, cut in there.open.items():
                    self._end_all(name, cut)
                there.open.clear()

    # With the lock held

    def _find_first(self, there: _LaneThere, uncertainty_ns: int = 0) -> None:
        """Find the first steps of fragments, as far as they have come."""
        for name, cut in list(there.open.items()):
            place = bisect_left(there.begins, cut.began - uncertainty_ns, key=lambda begin: begin.at)
            if place == len(there.begins):
                return  # nor of those behind it
            for _ in range(place):
                there.begins.popleft()
            cut.first = there.begins[0]
            del there.open[name]
            self._end_all(name, cut)

    def _end_arrow(self, name: FragmentName, end: _Place, *, to_trainer: bool) -> None:
        with self._lock:
            cut = self._cuts.get(name)
            if cut is None:
                return  # the trace has not seen it begin
            cut.ends.append((end, to_trainer))
            if name[0] not in self._there or name not in self._there[name[0]].open:
                self._end_all(name, cut)

    def _end_all(self, name: FragmentName, cut: _Cut) -> None:
        ends, cut.ends = cut.ends, []
        for end, to_trainer in ends:
            self._begin_arrow(name, cut, to_trainer=to_trainer)
            self._trace.flow("f", end.track, _id(cut, to_trainer=to_trainer), end.at, end.process)

    def _begin_arrow(self, name: FragmentName, cut: _Cut, *, to_trainer: bool) -> None:
        if to_trainer in cut.begun:
            return
        cut.begun.add(to_trainer)
        number, track = _id(cut, to_trainer=to_trainer), self._track(name[0])
        if cut.first is None:
            self._trace.flow("s", track, number, cut.began)
            return
        self._trace.flow("s", cut.first.track, number, cut.first.at, cut.first.process)
        self._trace.flow("t", track, number, min(max(cut.began, cut.first.at), cut.end))

    def _track(self, lane: int) -> str:
        return f"{self._prefix}lane {lane}"


def _id(cut: _Cut, *, to_trainer: bool) -> int:
    """Number of a fragment's arrow: another one for that to a trainer."""
    return 2 * cut.number + to_trainer


def _track_of_trainer(span: PeerSpan) -> str:
    return "loop"
