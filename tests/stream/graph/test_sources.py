"""Nodes themselves are ends of edges, and those that ask are told what leads to them."""

from typing import Any

import pytest

from rollflow import Graph
from rollflow.stream import GraphError, Outlet


def double(number: int) -> int:
    return 2 * number


async def numbers(out: Outlet[int]) -> None:
    await out.send(1)


class Ring:
    """Sets out one item, and takes it back when it has gone round."""

    def start(self) -> list[int]:
        return [0]

    def __call__(self, number: int) -> int:
        return number


def keep(number: int) -> None:
    del number


class Doubling:
    """Taken apart into a source and `double`, and, when it is told to, what is told after these."""

    def __init__(self) -> None:
        self.more: list[str] = []

    def numbers(self) -> None:
        """Stands for the outlet."""

    def graph(self) -> Graph:
        inner = Graph("doubling")
        inner.add(source=numbers, double=double, **{name: keep for name in self.more})
        inner.connect("source", "double", capacity=1)
        inner.output("numbers", "double")
        for name in self.more:
            inner.connect("double", name)
        return inner


class Keeps:
    """A sink that knows nothing of the graph."""

    def __call__(self, number: int) -> None:
        pass


class Asks:
    """A sink that takes down what leads to it, and has every `Doubling` among it have one part more."""

    def __init__(self) -> None:
        self.told: list[tuple[list[Any], bool]] = []
        self.drops: list[bool] = []

    def __call__(self, numbers: int) -> None:
        pass

    def take_sources(self, sources: list[Any], *, drops: bool, is_all: bool) -> list[Any]:
        self.told.append((sources, is_all))
        self.drops.append(drops)
        found = [source for source in sources if isinstance(source, Doubling)]
        for source in found:
            source.more = ["seen"]
        return found


def test_nodes_themselves_are_ends_of_edges() -> None:
    doubling, graph = Doubling(), Graph("objects")
    graph.add(known=double)
    graph.connect(doubling.numbers, double)
    graph.connect(doubling, keep)
    graph.connect(double, keep)
    another = Keeps()
    graph.connect("known", another)
    graph.connect("known", Keeps())
    assert list(graph.nodes) == ["known", "doubling/source", "doubling/double", "keep", "keeps", "keeps_2"]
    assert [edge.name for edge in graph.edges[1:]] == [
        "doubling/double.out → known.number",
        "doubling/double.out → keep.number",
        "known.out → keep.number",
        "known.out → keeps.number",
        "known.out → keeps_2.number",
    ]
    with pytest.raises(GraphError, match=r"'doubling.graph': node 'doubling' has no outlet 'graph'; outlets: numbers"):
        graph.connect(doubling.graph, another)
    with pytest.raises(GraphError, match=r"<lambda> at .* has no name of its own, expected it to be added under one"):
        graph.connect(lambda number: number, another)


def test_a_node_is_told_what_leads_to_it_and_may_change_that() -> None:
    doubling, asks, graph = Doubling(), Asks(), Graph("asking")
    graph.add(late=double, asks=asks)
    graph.connect("late", "asks")
    assert asks.told == [([double], False)]
    graph.connect(doubling.numbers, "late", capacity=1)
    assert asks.told[1:] == [([doubling, double], False)]
    assert "doubling/seen" in graph.nodes
    graph.validate()
    assert asks.told[-1][1]
    assert [name for name in graph.nodes if name.startswith("doubling/")] == [
        "doubling/source",
        "doubling/double",
        "doubling/seen",
    ]
    assert len([edge for edge in graph.edges if edge.target[0] == "doubling/seen"]) == 1
    assert graph.sources_of("asks") == [doubling, double]


def test_it_is_told_whether_something_may_be_dropped_on_its_way() -> None:
    asks, graph = Asks(), Graph("asking")
    graph.add(source=numbers, double=double, asks=asks, other=keep)
    graph.connect("double", "asks")
    graph.connect("double", "other", capacity=1, overflow="drop_oldest")
    graph.connect("source", "double", capacity=1, overflow="drop_oldest")
    assert asks.drops == [False, True]


class Steps:
    """Two of its methods are nodes."""

    def double(self, number: int) -> int:
        return 2 * number

    def keep(self, number: int) -> None:
        pass


def test_a_method_is_one_node_however_often_it_is_asked_for() -> None:
    steps, graph = Steps(), Graph("methods")
    graph.add(source=numbers)
    graph.connect("source", steps.double)
    graph.connect(steps.double, steps.keep)
    graph.connect(Steps().double, steps.keep)
    assert list(graph.nodes) == ["source", "double", "keep", "double_2"]


def test_what_leads_to_a_node_by_a_feedback_edge_alone_is_not_told() -> None:
    asks, graph = Asks(), Graph("cycle")
    graph.add(source=numbers, ring=Ring(), asks=asks)
    graph.connect("source", "asks", capacity=1)
    graph.connect("ring", "ring", feedback=True)
    graph.connect("ring", "asks", feedback=True)
    assert graph.sources_of("asks") == [numbers]


def test_a_node_that_refuses_what_leads_to_it_is_left_without_the_edge() -> None:
    class Refuses(Asks):
        def take_sources(self, sources: list[Any], *, drops: bool, is_all: bool) -> list[Any]:
            raise GraphError("not these")

    graph = Graph("refused")
    graph.add(source=numbers, refuses=Refuses())
    with pytest.raises(GraphError, match="not these") as raised:
        graph.connect("source", "refuses")
    assert raised.value.__notes__ == ["in node 'refuses'"]
    assert graph.edges == []
