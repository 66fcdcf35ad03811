"""Graphs that are drawn as ways from node to node, and nodes for them."""

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import anyio

from rollflow import Graph
from rollflow.stream import Outlet
from rollflow.stream.graph.run import Run


def double(number: int) -> int:
    return 2 * number


def keep(number: int) -> None:
    """Nothing leads on from here."""


def show(text: str) -> None:
    """Nothing leads on from here either."""


class Halves(NamedTuple):
    low: int | None
    high: str | None


def split(number: int) -> Halves:
    return Halves(number, None)


async def once(out: Outlet[int]) -> None:
    await out.send(1)


async def once_and_never_again(out: Outlet[int]) -> None:
    await out.send(0)
    await anyio.sleep_forever()


async def three(out: Outlet[int]) -> None:
    for number in range(3):
        await out.send(number)


class Ring:
    """Sets out one item, and takes it back when it has gone round."""

    def start(self) -> list[int]:
        return [0]

    def __call__(self, number: int) -> int:
        return number


class Round(NamedTuple):
    """What a node of a ring sends round and lets out."""

    on: int | None
    out: int | None


class Gate:
    """Admits as many items as it is told to."""

    def __init__(self, left: int = 0) -> None:
        self.left = left
        self.changed: Callable[[], None] = lambda: None

    def admits(self, item: Any) -> bool:
        if not self.left:
            return False
        self.left -= 1
        return True

    def watch(self, changed: Callable[[], None]) -> None:
        self.changed = changed

    def let(self, count: int) -> None:
        self.left += count
        self.changed()


class Collect:
    """A sink that keeps its items, and counts how often it is closed."""

    def __init__(self) -> None:
        self.items: list[Any] = []
        self.closed = 0

    def __call__(self, item: Any) -> None:
        self.items.append(item)

    def close(self) -> None:
        self.closed += 1


async def ended(graph: Graph) -> Run:
    """The run of a graph, once all its nodes have ended."""
    async with graph.run() as run:
        await run.wait()
    return run


def row(name: str = "graph", *, capacity: int | None = None, thread: str = "", output: str = "", **nodes: Any) -> Graph:
    """A graph of nodes that are connected one to the next.

    capacity    of each edge
    thread      node that is called in a thread
    output      name of an output, to which the last node leads; "": there is none
    """
    way = f" >{capacity or ''} ".join(nodes)
    return drawn(way, name=name, thread=thread, outputs={output: list(nodes)[-1]} if output else {}, **nodes)


def drawn(
    *ways: str,
    name: str = "graph",
    thread: str = "",
    gate: Any = None,
    outputs: Mapping[str, str] | None = None,
    **nodes: Any,
) -> Graph:
    """A graph of nodes that are connected along ways.

    ways       such as "source >4 double > sink": `>4` is an edge of that capacity, `>drop_oldest4` one that drops items
               when it is full, `>>` a feedback edge, and `>gate` one with the gate
    thread     nodes that are called in a thread
    outputs    name of an output -> node, or port, that leads to it
    """
    graph = Graph(name)
    for each, node in nodes.items():
        graph.add_node(each, node, where="thread" if each in thread.split() else None)
    for way in ways:
        source, *rest = re.split(r" >(\S*) ", way)
        for kind, target in zip(rest[::2], rest[1::2], strict=True):
            overflow, size = re.fullmatch(r"(\D*)(\d*)", kind).groups()  # type: ignore[union-attr]
            options: dict[str, Any] = {"feedback": True} if overflow == ">" else {}
            options |= {"gate": gate} if overflow == "gate" else {}
            options |= {"overflow": overflow} if overflow.strip(">").removeprefix("gate") else {}
            graph.connect(source, target, capacity=int(size) if size else None, **options)
            source = target
    for output, port in (outputs or {}).items():
        graph.output(output, port)
    return graph
