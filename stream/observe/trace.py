"""Trace: a file of what a run did and when, in the trace event format of Chrome, which Perfetto shows as well.

A span is an event by itself, with its begin and duration. So nothing is left open if a run is killed: what was
written up to its last line is a whole trace but for the `]`, which both viewers allow to be missing.
"""

import gzip
import json
import logging
import os
import zlib
from collections.abc import Callable, Iterable, Mapping
from itertools import count
from pathlib import Path
from threading import Event, Lock, Thread, current_thread
from time import perf_counter_ns
from typing import Any, BinaryIO, Literal, cast

logger = logging.getLogger(__name__)

Record = Callable[[int, int], None]  # (begin, end) of a span, in ns on the clock `perf_counter_ns`

MOST_SPANS = 1 << 19  # that wait to be written
MOST_ARROWS = 4096  # fragments whose arrows may still begin or end
MOST_BYTES = 1 << 30  # of a trace, before it is compressed: a browser hardly opens a larger one
_BEGIN = b'[\n{"ph": "M"'  # of a file: names come first
_FIELDS = 3
_EVERY_S, _END_S = 1.0, 5.0


class Trace:
    """Writes the spans of a run to a file, from a thread of its own.

    file       where to; it is closed at the end
    title      the run's name
    on_end     called when it has been written to its end, or can't be written any more; in the thread
    most       spans that are kept until they are written: where more come, the oldest are dropped, and counted
    size       bytes after which it ends by itself, which is logged

    arrows     numbers for arrows: each is given once
    """

    def __init__(
        self,
        file: BinaryIO,
        title: str,
        on_end: Callable[[], object],
        *,
        most: int = MOST_SPANS,
        size: int = MOST_BYTES,
    ) -> None:
        self._file, self._on_end, self._most = file, on_end, most
        self._size, self._written = size, 0
        self._pid = os.getpid()
        self.began = perf_counter_ns()
        self.arrows = count()
        self._spans: list[int] = []  # kind, begin and end of each: numbers alone cost a run half of what records would
        self._events: list[dict[str, Any]] = []
        self._names: list[dict[str, Any]] = []  # of tracks, which are never dropped
        self._taking = Lock()  # held where something is taken out of these
        self._dropped = self._dropped_before = 0
        self._tracks: dict[str, int] = {}  # name -> number
        self._heads: list[str] = []  # of every kind of span: its event up to the time
        self._making = Lock()  # tracks and kinds of spans are made in any thread
        self._stop = Event()
        self._about("process_name", 0, name=title)
        self._thread = Thread(target=self._work, name="rollflow trace", daemon=True)
        self._thread.start()

    def recorder(self, track: str, name: str, kind: str = "busy") -> Record:
        """A function that records spans of this name and kind. On one track they lie apart, or within each other."""
        head = json.dumps({"ph": "X", "pid": self._pid, "tid": self._track(track), "name": name, "cat": kind})
        with self._making:
            number_of_kind = len(self._heads)
            self._heads.append(f"{head[:-1]}, ")
        spans, extend, most = self._spans, self._spans.extend, _FIELDS * self._most

        def record(begin: int, end: int) -> None:
            if len(spans) >= most:
                self._drop(spans, _FIELDS)
            extend((number_of_kind, begin, end))

        return record

    def span(self, track: str, name: str, begin: int, end: int, args: Mapping[str, Any]) -> None:
        """Record a span that has more to say; one for a fragment or a batch, not for a step."""
        times = {"ts": self._us(begin), "dur": (end - begin) / 1e3}
        self._event(ph="X", pid=self._pid, tid=self._track(track), name=name, cat="busy", **times, args=args)

    def flow(self, phase: Literal["s", "f"], track: str, number: int, at: int) -> None:
        """Record where a fragment's arrow starts ("s") or ends ("f"), within a span of this track at this time."""
        place = {"pid": self._pid, "tid": self._track(track)} | ({"bp": "e"} if phase == "f" else {})
        self._event(ph=phase, name="fragment", cat="fragment", id=number, ts=self._us(at), **place)

    def close(self) -> None:
        """Write what is left, and the end; again does nothing. From any thread."""
        if os.getpid() == self._pid:  # a process that was forked has neither the thread nor the file for itself
            self._stop.set()
            if current_thread() is not self._thread:
                self._thread.join(_END_S)

    def _us(self, at: int) -> float:
        return max(0, at - self.began) / 1e3

    def _track(self, name: str) -> int:
        """Number of a track."""
        with self._making:
            is_new = name not in self._tracks
            track = self._tracks.setdefault(name, len(self._tracks) + 1)
        if is_new:
            self._about("thread_name", track, name=name)
            self._about("thread_sort_index", track, sort_index=track)
        return track

    def _about(self, what: str, track: int, **args: Any) -> None:
        self._names.append({"ph": "M", "pid": self._pid, "tid": track, "name": what, "args": args})

    def _event(self, **fields: Any) -> None:
        if len(self._events) >= self._most:
            self._drop(self._events, 1)
        self._events.append(fields)

    def _drop(self, kept: list[Any], fields: int) -> None:
        """Drop the older half of what is kept, so many fields each."""
        with self._taking:
            count = min(len(kept), fields * self._most) // fields // 2
            del kept[: count * fields]
            self._dropped += count

    def _take(self, kept: list[Any]) -> list[Any]:
        """Take all that is kept; meanwhile others put more behind it."""
        with self._taking:
            taken = kept[:]
            del kept[: len(taken)]
        return taken

    # In the thread

    def _work(self) -> None:
        try:
            with self._file:
                self._file.write(b"[\n")
                while not self._stop.wait(_EVERY_S):
                    self._write_new()
                    if self._written >= self._size:
                        logger.warning("the trace ends after %s bytes: trace seconds or minutes", f"{self._size:,}")
                        break
                self._write_new()
                end = {"ph": "i", "s": "g", "pid": self._pid, "tid": 0, "name": "end of the trace"}
                end |= {"ts": self._us(perf_counter_ns()), "args": {"dropped": self._dropped}}
                self._file.write(f"{json.dumps(end)}\n]\n".encode())
        except OSError as error:
            logger.warning("the trace ends: %s", error)
        finally:
            self._on_end()

    def _write_new(self) -> None:
        events, spans = self._take(self._events), self._take(self._spans)
        events = self._take(self._names) + events
        if self._dropped > self._dropped_before:
            self._dropped_before = self._dropped
            name = f"{self._dropped} spans dropped so far: they came faster than they could be written"
            events.append(
                {"ph": "i", "s": "g", "pid": self._pid, "tid": 0, "ts": self._us(perf_counter_ns()), "name": name}
            )
        lines, began, heads = [f"{json.dumps(event)},\n" for event in events], self.began, self._heads
        numbers = iter(spans)
        for kind, begin, end in zip(numbers, numbers, numbers, strict=True):
            begin = max(begin, began)
            duration = max(end - begin, 0) / 1e3
            lines.append(f'{heads[kind]}"ts": {(begin - began) / 1e3:.3f}, "dur": {duration:.3f}}},\n')
        if lines:
            self._written += self._file.write("".join(lines).encode())
            self._file.flush()


def open_trace(path: str | os.PathLike[str]) -> BinaryIO:
    """A file for a trace, emptied; compressed if its name ends in .gz. Raises OSError if it can't be written."""
    return cast(BinaryIO, gzip.open(path, "wb", 1)) if Path(path).suffix == ".gz" else Path(path).open("wb")


def check_trace(path: Any) -> None:
    """Raise ValueError for what is neither None nor the path of a new file or a trace, in a folder that is there."""
    if path is None:
        return
    if not isinstance(path, str | os.PathLike):
        raise ValueError(f"trace is {path!r}, expected a file's path such as 'run.trace'")
    if not os.fspath(path) or Path(path).is_dir() or not Path(path).absolute().parent.is_dir():
        raise ValueError(f"trace is {path!r}, expected a file in a folder that is there, such as 'run.trace'")
    if Path(path).is_file() and not _is_trace(Path(path)):  # a pipe is none
        raise ValueError(f"trace is {path!r}, where another file is, expected a new file, or an older trace's")


def _is_trace(path: Path) -> bool:
    """True for a file that is empty, or begins as a trace does."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            return _BEGIN.startswith(file.read(len(_BEGIN)))
    except EOFError:  # it was cut off before its first line
        return True
    except (OSError, zlib.error):  # it is not compressed, or may not be read
        return False


FragmentName = tuple[int, int]  # its lane, and its number there


class FragmentTrace:
    """Records a track for each lane: spans of fragments, from the first step on, and in these the steps made elsewhere.

    An arrow leads from a fragment to what used it. Every method may be called in any thread.

    trace     is written to
    prefix    of the rollout's nodes, and of its tracks, in a graph with several
    """

    def __init__(self, trace: Trace, prefix: str = "") -> None:
        self._trace, self._prefix = trace, prefix
        self._begun: dict[int, int] = {}  # lane -> when its fragment began, as far as the trace saw it
        self._arrows: dict[FragmentName, int] = {}  # number of each one's arrow
        self._steps: dict[tuple[int, str], Record] = {}
        self._updates = 0
        self._lock = Lock()  # of the arrows

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
        lane, sequence = fragment.lane, fragment.sequence
        began = self._begun.pop(lane, None)
        if began is None:
            return
        args = {"rows": int(fragment.num_rows), "steps": int(fragment.num_steps)}
        track = self._track(lane)
        # A viewer takes the longer of two spans that begin together for the outer one only where it begins first.
        self._trace.span(track, f"fragment {sequence}", began - 1, max(began, perf_counter_ns()), args)
        with self._lock:
            number = self._arrows[lane, sequence] = next(self._trace.arrows)
            while len(self._arrows) > MOST_ARROWS:
                del self._arrows[next(iter(self._arrows))]
        self._trace.flow("s", track, number, began)

    def update(self, fragments: Iterable[FragmentName], began: int, end: int) -> None:
        """Record the reader's work on a batch of fragments."""
        used = list(fragments)
        args = {"fragments": [f"{self._track(lane)}: {sequence}" for lane, sequence in used]}
        self._trace.span("caller", f"update {self._updates}", began, end, args)
        self._updates += 1
        for fragment in used:
            self.used(fragment, "caller", min(began + 1, end))  # at its begin what was before may not have ended

    def used(self, fragment: FragmentName, track: str, at: int) -> None:
        """Record that a fragment was used by what a track has a span of at that time."""
        with self._lock:
            number = self._arrows.get(fragment)
        if number is not None:  # else the trace has not seen it begin
            self._trace.flow("f", track, number, at)

    def _track(self, lane: int) -> str:
        return f"{self._prefix}lane {lane}"
