"""Picture of a graph as SVG: from left to right, with each ring as a row, and how busy nodes are while it runs."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollflow.stream.observe import svg
from rollflow.stream.observe.svg import preformatted, table

Shape = Mapping[str, Any]
Edge = Mapping[str, Any]

_TALL, _MEASURED = 30.0, 46.0  # of a box, and of one with a bar of its shares
_ROW, _GAP, _LANE = 46.0, 46.0, 14.0  # between two rows, two columns, and two edges that go around others


@dataclass(slots=True)
class _Box:
    """A node: its size, its column, and the middle of its left side."""

    width: float
    tall: float
    column: int
    x: float = 0.0
    y: float = 0.0

    @property
    def end(self) -> float:
        return self.x + self.width


def graph_picture(shape: Shape, description: str) -> str:
    """The picture as SVG; see `graph_parts`."""
    parts, height, width = graph_parts(shape)
    return svg.picture(parts, height, description, width)


def graph_parts(shape: Shape) -> tuple[list[str], float, float]:
    """Parts of the picture, its height and its width.

    shape    as `drawing.shape` gives it; in a snapshot of a run nodes have their shares, and edges what they hold
    """
    edges, measured = shape["edges"], shape.get("nodes", {})
    outputs = sorted({edge["target"] for edge in edges if edge["is_output"]})
    boxes: dict[str, _Box] = {}
    for name, column in _columns([*(name for task in shape["tasks"] for name in task), *outputs], edges).items():
        width = max(svg.width_of(_words(name, measured.get(name))) + 20, 70.0)
        boxes[name] = _Box(width, _MEASURED if name in measured else _TALL, column)
    _place(boxes, edges)
    top, bottom = (pick(box.y + sign * box.tall / 2 for box in boxes.values()) for pick, sign in ((min, -1), (max, 1)))
    lanes = [top - 20.0, bottom + 20.0]  # where the next edge goes that goes around, above and below
    lines: list[str] = []
    for edge in edges:
        merges = sum(other["target"] == edge["target"] for other in edges) > 1
        lines += _edge(edge, boxes[edge["source"]], boxes[edge["target"]], lanes, merges=merges)
    tasks = [[boxes[name] for name in task] for task in shape["tasks"] if len(task) > 1]
    frames = [_frame(task, boxes.values()) for task in tasks]
    for name, box in boxes.items():
        is_marked = name == shape.get("bottleneck")
        lines += _node(box, _words(name, measured.get(name)), measured.get(name), is_marked=is_marked)
    most = max((len(_labels(edge)) for edge in edges), default=1)  # which stand below each other
    first, last = min(lanes[0] + 8, top - 14), max(lanes[1] - 8, bottom + 14 + svg.LINE * (most - 1))
    legend = _legend(20.0, last + 14) if measured else []
    height = last - first + (26 if measured else 0)
    width = max(max(box.end for box in boxes.values()) + 44, 270.0 if measured else 0.0)
    return [f'<g transform="translate(0 {-first:.0f})">', *frames, *lines, *legend, "</g>"], height, width


def _words(name: str, counted: Mapping[str, Any] | None) -> str:
    return name if counted is None else f"{name}  {counted['busy']:.0%}"


def _labels(edge: Edge) -> list[str]:
    """The port, unless it is the only one, and the bound of a channel, with what it holds if that is known."""
    labels = [] if edge["port"] == "out" else [edge["port"]]
    if "capacity" in edge:
        held = f"{edge['held']}/" if "held" in edge else ""
        labels.append(f"{held}{edge['capacity']}, {edge['overflow']}")
    return labels


# Where everything goes


def _columns(names: Iterable[str], edges: Sequence[Edge]) -> dict[str, int]:
    """Each node's column, which is right of all that the node gets items from, but for feedback."""
    column = dict.fromkeys(names, 0)
    for _ in column:  # at most so many are behind each other
        for edge in edges:
            if not edge["feedback"]:
                column[edge["target"]] = max(column[edge["target"]], column[edge["source"]] + 1)
    return column


def _place(boxes: Mapping[str, _Box], edges: Sequence[Edge]) -> None:
    """Give every box its place: in the first row that is free, from that of a node on that it gets items from."""
    x, tall = 20.0, max(box.tall for box in boxes.values())
    for column in range(max(box.column for box in boxes.values()) + 1):
        names = [name for name, box in boxes.items() if box.column == column]
        used: set[float] = set()
        for name in names:
            ahead = [edge["source"] for edge in edges if edge["target"] == name and not edge["feedback"]]
            y = min((boxes[source].y for source in ahead), default=0.0)
            while y in used:
                y += tall + _ROW
            used.add(y)
            boxes[name].x, boxes[name].y = x, y
        labels = [words for edge in edges if edge["source"] in names for words in _labels(edge)]
        x = max(boxes[name].end for name in names) + _GAP + max(map(svg.width_of, labels), default=0.0)


# What is drawn


def _edge(edge: Edge, a: _Box, b: _Box, lanes: list[float], *, merges: bool) -> list[str]:
    """The line of an edge from one box to another, with its labels.

    lanes     where the next line goes that goes around others, above and below
    merges    whether other edges lead to the same target
    """
    labels, anchor = _labels(edge), "middle"
    if b.column == a.column + 1:
        half = (a.end + b.x) / 2
        path = f"M{a.end:.0f} {a.y:.0f}C{half:.0f} {a.y:.0f} {half:.0f} {b.y:.0f} {b.x - 1:.0f} {b.y:.0f}"
        at, anchor = ((a.end + 10, a.y), "start") if merges else ((b.x - 14, b.y), "end")
        if b.y > a.y and not merges:  # the line comes from above: below its end there is room
            at = b.x - 14, b.y + 24 + svg.LINE * (len(labels) - 1)
    else:
        side = int(max(a.y, b.y) > 0)
        sign, lane = 2 * side - 1, lanes[side]
        lanes[side] += sign * (_LANE + svg.LINE * len(labels))
        lane += sign * svg.LINE * len(labels) * side
        begin, end = a.x + 0.7 * a.width, b.x + 0.3 * b.width
        bend, turn = min(10.0, abs(end - begin) / 2) * (1 if end > begin else -1), lane - sign * 10
        path = (
            f"M{begin:.0f} {a.y + sign * a.tall / 2:.0f}V{turn:.0f}"
            f"Q{begin:.0f} {lane:.0f} {begin + bend:.0f} {lane:.0f}"
            f"H{end - bend:.0f}Q{end:.0f} {lane:.0f} {end:.0f} {turn:.0f}V{b.y + sign * (b.tall / 2 + 1):.0f}"
        )
        at = (begin + end) / 2, lane
    first = at[1] - 6 - svg.LINE * (len(labels) - 1)
    words = [svg.text(at[0], first + svg.LINE * number, label, anchor=anchor) for number, label in enumerate(labels)]
    return [svg.line(path, dashed=edge["feedback"]), *words]


def _frame(task: Sequence[_Box], boxes: Iterable[_Box]) -> str:
    """A frame around the nodes of a task; "" if others would be in it."""
    left, right = min(box.x for box in task) - 9, max(box.end for box in task) + 9
    top, bottom = min(box.y - box.tall / 2 for box in task) - 9, max(box.y + box.tall / 2 for box in task) + 9
    if any(box not in task and box.end > left and box.x < right and top < box.y < bottom for box in boxes):
        return ""
    return svg.box(left, top, right - left, bottom - top, dashed=True)


def _node(box: _Box, words: str, counted: Mapping[str, Any] | None, *, is_marked: bool) -> list[str]:
    top = box.y - box.tall / 2
    parts = [svg.box(box.x, top, box.width, box.tall, is_marked=is_marked)]
    parts.append(svg.text(box.x + box.width / 2, top + 20, words, weight="bold" if is_marked else "normal"))
    if counted is not None:
        x, whole = box.x + 8, box.width - 16
        parts.append(svg.bar(x, top + 30, whole, svg.FILLS["idle"], 7))
        for part in ("busy", "blocked"):
            parts.append(svg.bar(x, top + 30, whole * counted.get(part, 0.0), svg.FILLS[part], 7))
            x += whole * counted.get(part, 0.0)
    return parts


def _legend(x: float, y: float) -> list[str]:
    parts = []
    for part, fill in svg.FILLS.items():
        parts += [svg.bar(x, y - 9, 12, fill, 10), svg.text(x + 18, y, part, anchor="start")]
        x += 40 + svg.width_of(part)
    return parts


def run_html(title: str, snapshot: Mapping[str, Any]) -> str:
    """A title, and what a snapshot of the run has beside it; of a run that has not begun the title alone."""
    parts = [preformatted(title)]
    if "tasks" in snapshot:
        parts += [graph_picture(snapshot, snapshot["conclusion"]), preformatted(snapshot["conclusion"])]
        rows = [(name, f"{value:,.6g}") for name, value in snapshot.get("figures", {}).items()]
        parts += [table(("figure", "value"), rows)] if rows else []
    return "".join(parts)
