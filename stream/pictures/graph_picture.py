"""Picture of a graph: nodes from top to bottom, those of one task in one frame, and edges with their bounds."""

from collections.abc import Mapping
from typing import Any

from rollflow.stream.pictures import svg

Shape = Mapping[str, Any]

_LEFT, _WIDE, _TALL, _PITCH = 70, 180, 30, 66


def graph_picture(shape: Shape, description: str) -> str:
    """The picture as SVG; see `graph_parts`."""
    return svg.picture(*graph_parts(shape), description)


def graph_parts(shape: Shape) -> tuple[list[str], float]:
    """Parts of the picture, and its height. Edges to the next node are straight, others go round on either side.

    shape    as `drawing.shape` gives it; in a snapshot of a run nodes have their busy share, and edges what they hold
    """
    nodes = [name for task in shape["tasks"] for name in task]
    outputs = {edge["target"] for edge in shape["edges"] if edge["is_output"]}
    top = {name: 14 + _PITCH * number for number, name in enumerate((*nodes, *sorted(outputs - {*nodes})))}
    parts = [_frame([top[name] for name in task]) for task in shape["tasks"] if len(task) > 1]
    for name, y in top.items():
        parts += _node(name, y, shape.get("nodes", {}).get(name), is_output=name in outputs)
    around = [edge for edge in shape["edges"] if top[edge["target"]] > top[edge["source"]] + _PITCH]
    rounds = 0
    for edge in shape["edges"]:
        begin, end = top[edge["source"]], top[edge["target"]]
        if end - begin == _PITCH:
            parts += [svg.line(f"M{_LEFT + 90} {begin + _TALL}V{end - 1}", dashed=edge["feedback"])]
            parts += [svg.text(_LEFT + 98, begin + 52, ", ".join(_labels(edge)), anchor="start")]
            continue
        side, out = (_LEFT, -24) if edge["feedback"] else (_LEFT + _WIDE, 24 + 12 * rounds)
        rounds += not edge["feedback"]
        way = f"M{side} {begin + 23}h{out}V{end + 9}H{side}"  # out below, in above
        parts += [svg.line(way, dashed=edge["feedback"])]
        x, anchor = (side - 30, "end") if edge["feedback"] else (side + 18 + 12 * len(around), "start")
        for number, words in enumerate(_labels(edge)):
            parts += [svg.text(x, end + 13 + svg.LINE * number, words, anchor=anchor)]
    return parts, 14 + _PITCH * len(top) - (_PITCH - _TALL) + 12


def _frame(tops: list[float]) -> str:
    first, last = min(tops), max(tops)
    return svg.box(_LEFT - 10, first - 9, _WIDE + 20, last - first + _TALL + 18, dashed=True)


def _node(name: str, y: float, counted: Mapping[str, Any] | None, *, is_output: bool) -> list[str]:
    parts, words = [svg.box(_LEFT, y, _WIDE, _TALL)], name
    if counted is not None:
        parts += [svg.filled(_LEFT, y, _WIDE * counted["busy"], _TALL)]
        words = f"{name}  {counted['busy']:.0%}"
    return [*parts, svg.text(_LEFT + _WIDE / 2, y + 20, words, weight="bold" if is_output else "normal")]


def _labels(edge: Mapping[str, Any]) -> list[str]:
    """The port, unless it is the only one, and the bound of a channel, with what it holds where that is known."""
    labels = [] if edge["port"] == "out" else [edge["port"]]
    if "capacity" in edge:
        held = f"{edge['held']}/" if "held" in edge else ""
        labels.append(f"{held}{edge['capacity']}, {edge['overflow']}")
    return labels
