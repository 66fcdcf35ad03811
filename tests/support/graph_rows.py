"""Graphs whose nodes stand in a row."""

from itertools import pairwise
from typing import Any

from rollflow import Graph


def row(name: str = "row", *, capacity: int | None = None, thread: str = "", output: str = "", **nodes: Any) -> Graph:
    """A graph of nodes that are connected one to the next.

    capacity    of each edge
    thread      node that is called in a thread
    output      name of an output, to which the last node leads; "": there is none
    """
    graph = Graph(name)
    for each, node in nodes.items():
        graph.add_node(each, node, where="thread" if each == thread else None)
    for source, target in pairwise(nodes):
        graph.connect(source, target, capacity=capacity)
    if output:
        graph.output(output, each)
    return graph
