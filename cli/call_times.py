"""How long the calls of a run take: histograms from a short trace of it."""

import json
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from math import log10
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from rollflow.stream.snapshots.run_folder import trace_at

_SECONDS = 1.0
_BLOCKS = " ▁▂▃▄▅▆▇█"
_COLUMNS = 14  # two for each power of ten, from 1 µs on


def measured_calls(path: str) -> Table:
    """A table of the calls that the run behind a socket makes in the next second.

    Raises OSError where there is no run, or it is being traced already.
    """
    until = time.monotonic() + _SECONDS
    return calls_table(json.loads(b"".join(trace_at(Path(path), lambda: time.monotonic() >= until))))


def calls_table(events: Sequence[Mapping[str, Any]]) -> Table:
    """A table of the calls in a trace: how many there were, how long they took, and a histogram of that.

    events    of a trace in Chrome's format, times in µs
    """
    table = Table(box=box.SIMPLE, pad_edge=False, title=f"calls in {_SECONDS:g} s", title_justify="left")
    table.add_column("who")
    for name in ("calls", "median", "99 %", "longest"):
        table.add_column(name, justify="right")
    table.add_column("1 µs … 10 s", no_wrap=True)
    for name, times in sorted(_times(events).items(), key=lambda row: row[0] if ":" in row[0] else ""):  # lanes last
        ordered = sorted(times)
        shown = (ordered[(len(ordered) - 1) * part // 100] for part in (50, 99, 100))
        table.add_row(name, f"{len(ordered):,}", *map(_duration, shown), _histogram(ordered))
    return table


def _times(events: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """Times of the calls of each stage, and of each lane, in µs; fragments and updates are no calls."""
    tracks: dict[tuple[int, int], str] = {}
    times = defaultdict[str, list[float]](list)
    for event in events:
        track = event["pid"], event.get("tid", 0)
        if event["name"] == "thread_name":
            tracks[track] = event["args"]["name"]
        elif event["ph"] == "X" and event["cat"] == "busy" and "args" not in event:
            name, owner = event["name"], tracks[track]
            times[owner if name == owner else f"{owner}: {name}"].append(event["dur"])
    return times


def _histogram(times: Sequence[float]) -> str:
    """A block for each half of a power of ten, as high as there are calls in it; the fullest is whole."""
    counts = [0] * _COLUMNS
    for each in times:
        counts[min(max(int(2 * log10(max(each, 1.0))), 0), _COLUMNS - 1)] += 1
    most = max(counts)
    return "".join(_BLOCKS[-(-count * (len(_BLOCKS) - 1) // most)] for count in counts)


def _duration(us: float) -> str:
    for unit, size in (("s", 1e6), ("ms", 1e3)):
        if us >= size:
            return f"{us / size:.3g} {unit}"
    return f"{us:.3g} µs"
