"""Traces as tests read them: events, also of a file that was cut short, and what must hold for all of them."""

import gzip
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

Event = dict[str, Any]
Span = tuple[int, int, Event]  # begin, end, in ns


def events_of(path: Path) -> list[Event]:
    """The events of a trace that was written to its end."""
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        found: list[Event] = json.load(file)
    return found


def repaired(path: Path) -> list[Event]:
    """The events of a trace whose program was killed: up to its last whole line, and with the `]` that is missing."""
    found: list[Event] = json.loads(path.read_text().rpartition(",\n")[0] + "]")
    return found


def processes(events: list[Event]) -> list[str]:
    """The name of every process."""
    return [event["args"]["name"] for event in events if event["name"] == "process_name"]


def tracks(events: list[Event]) -> dict[str, list[Span]]:
    """The spans of every track, in the order in which they begin; the outer one of two first."""
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    found: dict[str, list[Span]] = {name: [] for name in names.values()}
    for event in events:
        if event["ph"] == "X":
            begin = round(event["ts"] * 1e3)
            found[names[event["tid"]]].append((begin, begin + round(event["dur"] * 1e3), event))
    return {name: sorted(spans, key=lambda span: (span[0], -span[1])) for name, spans in found.items()}


def assert_nested(events: list[Event]) -> None:
    """On every track two spans lie apart, or one in the other."""
    for name, spans in tracks(events).items():
        around: list[int] = []  # ends of the spans that are open
        for begin, end, event in spans:
            while around and around[-1] <= begin:
                around.pop()
            assert end >= begin, (name, event)
            assert not around or end <= around[-1], (name, event)
            around.append(end)


def busy_s(events: list[Event]) -> dict[str, float]:
    """Track -> seconds in spans of its own name, and for the caller in updates."""
    found: dict[str, float] = defaultdict(float)
    for name, spans in tracks(events).items():
        for begin, end, event in spans:
            if event["name"] == name or (name == "caller" and event["name"].startswith("update")):
                found[name] += (end - begin) / 1e9
    return found


def flows(events: list[Event]) -> dict[tuple[str, str], list[tuple[str, str]]]:
    """(lane's track, its fragment's span) -> (track, name) of the spans that the fragment's arrow ends in."""
    ends: dict[int, list[tuple[str, str]]] = defaultdict(list)
    starts: dict[int, tuple[str, str]] = {}
    found = {(track, event["tid"]): spans for track, spans in tracks(events).items() for _, _, event in spans[:1]}
    for event in events:
        if event["ph"] in "sf":
            [(track, spans)] = [(track, spans) for (track, tid), spans in found.items() if tid == event["tid"]]
            at = round(event["ts"] * 1e3)
            around = [each["name"] for begin, end, each in spans if begin <= at <= end and each["name"] != "step"]
            if event["ph"] == "s":
                assert event["id"] not in starts
                starts[event["id"]] = (track, next(name for name in around if name.startswith("fragment")))
            else:
                ends[event["id"]].append((track, around[-1]))
    assert set(ends) <= set(starts)
    return {start: ends[number] for number, start in starts.items()}


Stop = tuple[str, str]  # track and span that an arrow begins or ends in


def arrows(events: list[Event]) -> list[list[Stop]]:
    """The innermost spans that each arrow begins in, and ends in, if it ends somewhere."""
    titles = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    spans, stops = tracks(events), defaultdict[int, list[tuple[int, Stop]]](list)
    for event in events:
        if event["ph"] in "sf":
            at, track = round(event["ts"] * 1e3), titles[event["tid"]]
            around = [span for span in spans[track] if span[0] <= at <= span[1]]
            assert around, f"an arrow is on no span: {event}"
            inner = max(around, key=lambda span: (span[0], -span[1]))
            stops[event["id"]].append(("sf".index(event["ph"]), (track, inner[2]["name"])))
    return [[stop for _, stop in sorted(each)] for each in stops.values() if len(each) > 1]


def assert_valid(events: list[Event]) -> None:
    """All events are such as a viewer of the format reads: known kinds, named processes and tracks, whole arrows."""
    titled = {event["pid"] for event in events if event["name"] == "process_name"}
    named = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    assert len({tid for _, tid in named}) == len(named)
    begun: dict[int, int] = {}
    for event in events:
        assert event["ph"] in ("X", "M", "i", "s", "f"), event
        assert isinstance(event["name"], str), event
        assert isinstance(event["pid"], int), event
        assert event["pid"] in titled, event
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "thread_name", "thread_sort_index"), event
            assert event["args"], event
            continue
        assert event["ts"] >= 0, event
        assert event["ph"] == "i" or (event["pid"], event["tid"]) in named, event
        if event["ph"] == "X":
            assert event["dur"] >= 0, event
        if event["ph"] == "s":
            assert event["id"] not in begun, event
            begun[event["id"]] = event["ts"]
    for event in events:
        if event["ph"] == "f":
            assert begun[event["id"]] <= event["ts"], event
            assert event["id"] < 1 << 53, event
    assert_nested(events)
    arrows(events)  # each stop is on a span
