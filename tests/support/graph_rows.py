"""Graphs of given nodes, drawn in a line."""

import re
from collections.abc import Mapping
from typing import Any

from rollflow import Graph


def row(name: str = "graph", *, capacity: int | None = None, thread: str = "", output: str = "", **nodes: Any) -> Graph:
    """A graph of nodes that are connected one to the next.

    capacity    of each edge
    thread      node that is called in a thread
    output      name of an output, to which the last node leads; "": there is none
    """
    way = f" >{capacity or ''} ".join(nodes)
    return drawn(way, name=name, thread=thread, outputs={output: list(nodes)[-1]} if output else {}, **nodes)


def drawn(
    *ways: str, name: str = "graph", thread: str = "", outputs: Mapping[str, str] | None = None, **nodes: Any
) -> Graph:
    """A graph of nodes that are connected along ways.

    ways       such as "source >4 double > sink": `>4` is an edge of that capacity, `>>` a feedback edge
    thread     node that is called in a thread
    outputs    name of an output -> node, or port, that leads to it
    """
    graph = Graph(name)
    for each, node in nodes.items():
        graph.add_node(each, node, where="thread" if each == thread else None)
    for way in ways:
        source, *rest = re.split(r" >(>|\d*) ", way)
        for kind, target in zip(rest[::2], rest[1::2], strict=True):
            graph.connect(source, target, capacity=int(kind) if kind.isdigit() else None, feedback=kind == ">")
            source = target
    for output, port in (outputs or {}).items():
        graph.output(output, port)
    return graph
