"""Time line of a run: how busy each stage was, and who was in a call when it was looked at."""

from collections.abc import Mapping, Sequence

from rollflow.stream.pictures import svg

Points = Mapping[str, Sequence[tuple[float, float]]]

_LEFT, _WIDE, _TALL, _PITCH = 170, 266, 14, 20
_LETTERS = 24
_MOST_CALLERS = 16


def timeline(busy: Points, calls: Points) -> str:
    """A row for each stage and for each party, as SVG; nothing before the second look.

    busy     stage -> (time in seconds, busy share since the look before); the share is the height
    calls    party -> (begin, end) of calls, as bars; of many parties those with the longest calls
    """
    times = [when for points in busy.values() for when, _ in points]
    if not times or max(times) == min(times):
        return ""
    first, last = min(times), max(times)
    across = _WIDE / (last - first)
    rows = [(stage, _area([((when - first) * across, share) for when, share in of])) for stage, of in busy.items()]
    longest = sorted(calls, key=lambda party: -max(end - begin for begin, end in calls[party]))
    for party in sorted(longest[:_MOST_CALLERS]):
        bars = [(max(begin - first, 0.0) * across, (end - first) * across) for begin, end in calls[party]]
        rows.append((party, _bars(bars)))
    parts = []
    for number, (name, path) in enumerate(rows):
        y = number * _PITCH + 4
        shown = name if len(name) <= _LETTERS else f"{name[: _LETTERS - 1]}…"
        parts += [svg.text(_LEFT - 6, y + 12, shown, anchor="end"), svg.shape(_LEFT, y, path, name)]
    y = len(rows) * _PITCH + 16
    parts += [
        svg.text(_LEFT, y, f"{_words(last - first)} ago", anchor="start"),
        svg.text(_LEFT + _WIDE, y, "now", anchor="end"),
    ]
    return svg.picture(parts, y + 8, "time line")


def _area(points: Sequence[tuple[float, float]]) -> str:
    """Path of the area under shares, each of which holds from the point before to its own."""
    (begin, _), *rest = svg.thinned(points)
    steps = "".join(f"V{_TALL * (1 - share):.1f}H{x:.1f}" for x, share in rest)
    return f"M{begin:.1f} {_TALL}{steps}V{_TALL}z"


def _bars(bars: Sequence[tuple[float, float]]) -> str:
    """Path of bars (begin, end), of which those within half a pixel are one."""
    drawn: list[tuple[float, float]] = []
    for begin, end in bars:
        if drawn and begin < drawn[-1][1] + 0.5:
            begin = drawn.pop()[0]
        drawn.append((begin, max(end, begin + 0.5)))
    return "".join(f"M{begin:.1f} 0H{end:.1f}v{_TALL}H{begin:.1f}z" for begin, end in drawn)


def _words(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
