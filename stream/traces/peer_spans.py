"""PeerSpans: spans of another process, with times on the clock of this one, and their tracks in a trace."""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from rollflow.stream.traces.trace import Record, Trace

_MOST_NAMES, _OTHER = 64, "other"  # of the spans of a process, which may say whatever it likes


class PeerSpan(NamedTuple):
    """A span of another process.

    lane          that it was for; 0 for a trainer
    begin, end    in ns, on the clock of this process
    items         numbers of the items that it used, in the stream to a trainer
    """

    lane: int
    name: str
    begin: int
    end: int
    items: Sequence[int] = ()

    @property
    def inside(self) -> int:
        """A time right after its begin: at that itself the span before may not have ended, for a viewer."""
        return min(self.begin + 1, self.end)


class PeerSpans(NamedTuple):
    """Spans of another process, oldest first, in the order in which they ended.

    peer              name of the process, for people
    offset_ns         what was added to its times
    uncertainty_ns    by how much they may be wrong
    dropped           spans that it could not keep
    """

    peer: str
    spans: Sequence[PeerSpan]
    offset_ns: int
    uncertainty_ns: int
    dropped: int


class PeerTracks:
    """Tracks of other processes in a trace: one for each lane of a process.

    trace    is written to
    """

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._records: dict[tuple[str, str, str], Record] = {}
        self._names: dict[str, set[str]] = {}  # of each process' spans
        self._ends: dict[tuple[str, str], int] = {}  # of what was written to a track last

    def write(self, found: PeerSpans, track_of: Callable[[PeerSpan], str]) -> Iterable[tuple[str, PeerSpan]]:
        """Write spans; the tracks that they are on, and the spans as they are there.

        Where clocks were aligned a little better meanwhile, spans might overlap that did not: the later one is cut.
        Where a process has more names than there is room for, its other spans are called "other".
        """
        self._trace.align(found.peer, found.offset_ns, found.uncertainty_ns, found.dropped)
        written, names = [], self._names.setdefault(found.peer, set())
        for span in found.spans:
            track = track_of(span)
            begin = max(span.begin, self._ends.get((found.peer, track), span.begin))
            end = self._ends[found.peer, track] = max(span.end, begin)
            name = span.name if span.name in names or len(names) < _MOST_NAMES else _OTHER
            names.add(name)
            key = found.peer, track, name
            if key not in self._records:
                self._records[key] = self._trace.recorder(track, name, process=found.peer)
            self._records[key](begin, end)
            written.append((track, span._replace(begin=begin, end=end)))
        return written
