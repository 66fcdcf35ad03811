"""FragmentTrace: lanes, their fragments and the updates that used them, in a trace."""

from collections.abc import Iterable
from threading import Lock
from time import perf_counter_ns
from typing import Any

from rollflow.stream.traces.trace import MOST_ARROWS, Record, Trace

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
        self._arrows: dict[FragmentName, int] = {}  # fragment -> number of its arrow
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
        # A viewer takes the longer of two spans that begin together for the outer one only where it begins first.
        self._trace.span(self._track(lane), f"fragment {sequence}", began - 1, perf_counter_ns(), args)
        with self._lock:
            number = self._arrows[lane, sequence] = next(self._trace.arrows)
            while len(self._arrows) > MOST_ARROWS:
                del self._arrows[next(iter(self._arrows))]
        self._trace.flow("s", self._track(lane), number, began)

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
        with self._lock:
            number = self._arrows.get(fragment)
        if number is not None:  # else the trace has not seen it begin
            self._trace.flow("f", track, number, at)

    def _track(self, lane: int) -> str:
        return f"{self._prefix}lane {lane}"
