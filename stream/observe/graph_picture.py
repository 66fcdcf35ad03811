"""Picture of a graph as SVG: from left to right, with each ring as a ring, and how busy nodes are while it runs."""

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
    """A node: the middle of its left side, its size, and its place in a ring.

    at    column and row; in the row above a ring goes to the right, below to the left; None: it is in none
    """

    width: float
    tall: float
    x: float = 0.0
    y: float = 0.0
    ring: int = -1
    at: tuple[int, int] | None = None
    is_first: bool = True  # whether no node of its row is left of it
    is_last: bool = True

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
    outputs = {edge["target"] for edge in edges if edge["is_output"]}
    boxes: dict[str, _Box] = {}
    for name in (*(name for task in shape["tasks"] for name in task), *sorted(outputs)):
        words = _words(name, measured.get(name))
        boxes.setdefault(name, _Box(max(svg.width_of(words) + 20, 70.0), _MEASURED if name in measured else _TALL))
    rings = _rings(edges)
    for number, ring in enumerate(rings):
        for name in ring:
            boxes[name].ring = number
    blocks = [*rings, *([name] for name, box in boxes.items() if box.ring < 0)]
    columns = _columns(blocks, edges)
    _place(columns, boxes, edges)
    top, bottom = (pick(box.y + sign * box.tall / 2 for box in boxes.values()) for pick, sign in ((min, -1), (max, 1)))
    lanes = [top - 20.0, bottom + 20.0]  # where the next edge goes that goes around, above and below
    column_of = {name: place for place, column in enumerate(columns) for block in column for name in block}
    lines: list[str] = []
    for edge in edges:
        source, target = boxes[edge["source"]], boxes[edge["target"]]
        is_next = column_of[edge["target"]] == column_of[edge["source"]] + 1
        merges = sum(other["target"] == edge["target"] for other in edges) > 1
        lines += _edge(edge, source, target, lanes, is_next=is_next, merges=merges)
    framed = [[boxes[name] for name in task] for task in shape["tasks"] if len(task) > 1]
    frames = [_frame(task, list(boxes.values())) for task in framed]
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
    """The port, unless it is the only one, and the bound of a channel, with what it holds where that is known."""
    labels = [] if edge["port"] == "out" else [edge["port"]]
    if "capacity" in edge:
        held = f"{edge['held']}/" if "held" in edge else ""
        labels.append(f"{held}{edge['capacity']}, {edge['overflow']}")
    return labels


# Where everything goes


def _rings(edges: Sequence[Edge]) -> list[list[str]]:
    """Nodes of each ring that a feedback edge closes, in the order of the flow; of rings that share nodes the first."""
    ahead: dict[str, list[str]] = {}
    for edge in edges:
        if not edge["feedback"]:
            ahead.setdefault(edge["source"], []).append(edge["target"])
    rings: list[list[str]] = []
    for edge in edges:
        way = _way(edge["target"], edge["source"], ahead) if edge["feedback"] else []
        if len(way) > 1 and not any(name in ring for ring in rings for name in way):
            rings.append(way)
    return rings


def _way(begin: str, end: str, ahead: Mapping[str, Sequence[str]]) -> list[str]:
    """The longest way from one node to another; empty: there is none."""
    if begin == end:
        return [begin]
    ways = [way for name in ahead.get(begin, ()) if (way := _way(name, end, ahead))]
    return [begin, *max(ways, key=len)] if ways else []


def _columns(blocks: Sequence[Sequence[str]], edges: Sequence[Edge]) -> list[list[Sequence[str]]]:
    """Rings and single nodes by their column: each is right of all that it gets items from, but for feedback."""
    block_of = {name: place for place, block in enumerate(blocks) for name in block}
    pairs = {(block_of[edge["source"]], block_of[edge["target"]]) for edge in edges if not edge["feedback"]}
    column = [0] * len(blocks)
    for _ in blocks:  # at most so many are behind each other
        for source, target in pairs:
            if source != target:
                column[target] = min(max(column[target], column[source] + 1), len(blocks) - 1)
    return [[block for block, at in zip(blocks, column, strict=True) if at == place] for place in sorted(set(column))]


def _place(columns: Sequence[Sequence[Sequence[str]]], boxes: Mapping[str, _Box], edges: Sequence[Edge]) -> None:
    """Give every box its place."""

    def room(sources: Iterable[str], targets: Iterable[str]) -> float:
        ends = {*sources}, {*targets}
        between = [edge for edge in edges if edge["source"] in ends[0] and edge["target"] in ends[1]]
        return _GAP + max((svg.width_of(words) for edge in between for words in _labels(edge)), default=0.0)

    x = 20.0
    for place, column in enumerate(columns):
        talls = [max(boxes[name].tall for name in block) for block in column]
        heights = [tall if len(block) == 1 else 2 * tall + _ROW for tall, block in zip(talls, column, strict=True)]
        y, end = -(sum(heights) + _ROW * (len(heights) - 1)) / 2, x
        for block, tall, height in zip(column, talls, heights, strict=True):
            end = max(end, _place_block([boxes[name] for name in block], x, y + tall / 2, tall, room(block, block)))
            y += height + _ROW
        behind = [name for block in columns[place + 1] for name in block] if place + 1 < len(columns) else []
        x = end + room([name for block in column for name in block], behind)


def _place_block(block: Sequence[_Box], x: float, y: float, tall: float, gap: float) -> float:
    """Place one node, or a ring in two rows; where it ends."""
    if len(block) == 1:
        block[0].x, block[0].y = x, y
        return block[0].end
    across = (len(block) + 1) // 2
    x += 30.0  # for the arc that closes the ring
    for place, box in enumerate(block):
        box.at = (place, 0) if place < across else (2 * across - 1 - place - len(block) % 2, 1)
    for column in range(across):
        stacked = [box for box in block if box.at is not None and box.at[0] == column]
        widest = max(box.width for box in stacked)
        for box in stacked:
            row = box.at[1] if box.at is not None else 0
            box.x, box.y = x + (widest - box.width) / 2, y + row * (tall + _ROW)
            same = [other.at[0] for other in block if other.at is not None and other.at[1] == row]
            box.is_first, box.is_last = column == min(same), column == max(same)
        x += widest + gap
    return x - gap + 30.0


# What is drawn


def _edge(edge: Edge, a: _Box, b: _Box, lanes: list[float], *, is_next: bool, merges: bool) -> list[str]:
    """The line of an edge from one box to another, with its labels.

    lanes      where the next line goes that goes around others, above and below
    is_next    whether the target is in the next column
    merges     whether other edges lead to the same target
    """
    labels, anchor = _labels(edge), "middle"
    if a.at is not None and b.at is not None and a.ring == b.ring and a is not b and abs(a.at[0] - b.at[0]) <= 1:
        begin, end = (a.end, b.x - 1) if b.x > a.x else (a.x, b.end + 1)
        path, at = f"M{begin:.0f} {a.y:.0f}H{end:.0f}", ((begin + end) / 2, a.y)
        if a.at[1] != b.at[1]:  # around an end of the ring
            is_right = a.is_last and b.is_last and not edge["feedback"]
            begin, end = (a.end, b.end + 1) if is_right else (a.x, b.x - 1)
            out = max(begin, end) + 34 if is_right else min(begin, end) - 34
            inside = out - 18 if is_right else out + 18
            path, anchor = _curve(begin, a.y, out, end, b.y, out), "end" if is_right else "start"
            at = inside, (a.y + b.y) / 2 + 10 + svg.LINE * (len(labels) - 1) / 2
    elif is_next and a.is_last and b.is_first:
        half = (a.end + b.x) / 2
        path = _curve(a.end, a.y, half, b.x - 1, b.y, half)
        at, anchor = ((a.end + 10, a.y), "start") if merges else ((b.x - 14, b.y), "end")
        if b.y > a.y + 10 and not merges:  # the line comes from above: below its end there is room
            at = b.x - 14, b.y + 24 + svg.LINE * (len(labels) - 1)
    else:
        side = int(a.y > 0 or edge["feedback"])
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


def _curve(x: float, y: float, bend: float, to_x: float, to_y: float, to_bend: float) -> str:
    return f"M{x:.0f} {y:.0f}C{bend:.0f} {y:.0f} {to_bend:.0f} {to_y:.0f} {to_x:.0f} {to_y:.0f}"


def _frame(task: Sequence[_Box], boxes: Sequence[_Box]) -> str:
    """A frame around the nodes of a task, or around its ring if others would be in that; "" if they still would."""
    arc = 32.0 if any(box.ring >= 0 for box in task) else 0.0
    left, right = min(box.x for box in task) - 9 - arc, max(box.end for box in task) + 9 + arc
    top, bottom = min(box.y - box.tall / 2 for box in task) - 9, max(box.y + box.tall / 2 for box in task) + 9
    if any(box not in task and box.end > left and box.x < right and top < box.y < bottom for box in boxes):
        ring = [box for box in task if box.ring >= 0]
        return _frame(ring, boxes) if 0 < len(ring) < len(task) else ""
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
