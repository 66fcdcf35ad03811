"""Graphs as they are drawn: nodes and edges, also of nodes themselves, and what is refused."""

from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from graph_rows import Collect, Gate, Ring, double, drawn, keep, once as numbers, show, split

from rollflow import Graph
from rollflow.stream import GraphError


def to_text(number: int) -> str:
    return str(number)


def chained() -> Graph:
    nodes = {"source": numbers, "double": double, "text": to_text, "show": show}
    return drawn("source >2 double > text > show", name="chained", **nodes)


@pytest.mark.parametrize(
    ("ways", "groups"),
    [
        (["source >2 a > b > show"], ["source", "a b show"]),
        (["source > a >3 b > away > show"], ["source", "a", "b", "away", "show"]),
        (["source > a > b > show", "a > away > show"], ["source", "a b", "away", "show"]),
        (["source > a > b > show", "a >2 show"], ["source", "a b", "show"]),
    ],
    ids=["chain", "capacity and thread", "another way through a thread", "another way through a channel"],
)
def test_synchronous_neighbours_are_one_task_unless_a_channel_lies_between(ways: list[str], groups: list[str]) -> None:
    nodes = {"source": numbers, "a": double, "b": double, "away": double, "show": keep}
    used = {name: node for name, node in nodes.items() if any(name in way.split() for way in ways)}
    graph = drawn(*ways, thread="away", **used)
    graph.validate()
    assert sorted(graph.groups()) == sorted(group.split() for group in groups)


def test_the_fields_of_a_named_tuple_are_outlets() -> None:
    nodes: Any = {"source": numbers, "split": split, "double": double, "show": show}
    graph = drawn("source > split", "split.low > double", "split.high > show", outputs={"doubled": "double"}, **nodes)
    graph.validate()
    with pytest.raises(GraphError, match=r"split.high gives str, but double.number takes int"):
        graph.connect("split.high", "double")


def test_explain_says_what_is_chained_and_how_much_each_edge_holds() -> None:
    graph = chained()
    graph.add_node("late", show, where="thread")
    graph.connect("text", "late", capacity=5, overflow="drop_oldest")
    assert graph.explain().splitlines() == [
        "source   one task, inline",
        "[double → text → show]   one task, inline",
        "late   one task, worker thread",
        "source.out ──(capacity 2, block)──▶ double.number",
        "text.out ──(capacity 5, drop_oldest)──▶ late.text   worker thread",
    ]


def test_explain_marks_a_ring() -> None:
    graph = drawn("ring > double >> ring", ring=Ring(), double=double)
    assert graph.explain() == "[ring → double ↺]   one task, inline"


def test_a_graph_is_a_node_of_another() -> None:
    inner = Graph("inner")
    inner.add(a=double, b=double)
    inner.connect("a", "b")
    inner.output("doubled", "b")
    nodes: Any = {"source": numbers, "twice": inner, "text": to_text, "show": show}
    outer = drawn("source > twice/a", "twice.doubled > text > show", name="outer", **nodes)
    with pytest.raises(GraphError, match=r"'twice.a': node 'twice' has no inlet 'a'; inlets: none"):
        outer.connect("source", "twice.a")
    with pytest.raises(GraphError, match=r"graph 'outer' has a node 'twice' already"):
        outer.add(twice=double)
    outer.validate()
    assert list(outer.nodes) == ["source", "twice/a", "twice/b", "text", "show"]
    assert outer.groups() == [["source"], ["twice/a", "twice/b", "text", "show"]]


def not_a_node(first: int, second: int) -> int:
    return first + second


class Wrong:
    async def run(self, items: int) -> None:
        del items


class AsynchronousCall:
    async def __call__(self, number: int) -> int:
        return number


async def asynchronous_generator(number: int) -> AsyncIterator[int]:
    yield number


ASYNCHRONOUS = r"node 'x' is <.*>, whose call is asynchronous, expected a callable of one parameter that returns"


async def bare_item(number) -> None:  # type: ignore[no-untyped-def]
    pass


async def two_items(number: int, other: int) -> None:
    pass


ONE_ITEM = "; or, for an async def that is called with one item after the other, one parameter with the item's type"


class Bare:
    async def run(self, items) -> None:  # type: ignore[no-untyped-def]
        del items


@pytest.mark.parametrize(
    ("node", "told"),
    [
        (7, r"node 'x' is 7, expected a callable of one parameter"),
        (not_a_node, r"node 'x' is called with 2 items, expected a callable of one parameter"),
        (Wrong(), r"node 'x': parameter 'items' of run is annotated int, expected Inlet"),
        (Bare(), r"node 'x': parameter 'items' of run has no annotation that can be read, expected Inlet"),
        (Wrong, r"node 'x' is the class Wrong, expected Wrong\(…\)"),
        (AsynchronousCall(), ASYNCHRONOUS),
        (asynchronous_generator, ASYNCHRONOUS),
        (str, r"node 'x': <class 'str'> has no signature to be read"),
        (bare_item, f"parameter 'number' of bare_item has no annotation that can be read.*{ONE_ITEM}"),
        (two_items, "parameter 'number' of two_items is annotated int"),
    ],
)
def test_what_is_no_node_is_refused(node: Any, told: str) -> None:
    with pytest.raises(GraphError, match=told):
        Graph().add(x=node)


MISTAKES: list[tuple[Callable[[Graph], object], str]] = [
    (lambda graph: graph.add_node("x", numbers, where="thread"), "node 'x' is asynchronous and can't be placed in a "),
    (
        lambda graph: graph.add_node("x", double, where="there"),
        "node 'x': where is 'there', expected 'inline' or 'thread'",
    ),  # type: ignore[arg-type]
    (lambda graph: graph.add(double=double), "graph 'chained' has a node 'double' already"),
    (lambda graph: graph.add_node("a.b", double), r"node 'a.b': a '.' stands between a node and its port"),
    (
        lambda graph: graph.add_node("a/b", double),
        r"node 'a/b': .* a '/' between a node and its parts, expected a name",
    ),
    (lambda graph: graph.connect("text", "show", capacity=3), r"text.out → show.text: these are connected already"),
    (lambda graph: graph.output("texts", "text", capacity=0), r"output 'texts': capacity is 0, expected at least 1"),
    (lambda graph: [graph.output("o", "text") for _ in range(2)], "graph 'chained' has an output 'o' already"),
    (lambda graph: [graph.add(other=show), graph.validate()], r"inlet 'other.text' is connected to nothing"),
    (
        lambda graph: [graph.add(split=split), graph.connect("split", "double")],
        "has not one outlet but these: low, high; ",
    ),
    (
        lambda graph: [graph.add(more=numbers), graph.validate()],
        r"neither by graph.connect\('more.out', …\) nor by graph.output\('out', 'more.out'\)",
    ),
    (lambda graph: Graph("nothing").validate(), "graph 'nothing' has no nodes"),
    (lambda graph: drawn("a > b >> a", a=double, b=double).validate(), "nothing would ever flow through a, b"),
    (
        lambda graph: drawn("ring > a > b > ring", ring=Ring(), a=double, b=double).validate(),
        "cycle ring → a → b → ring: declare the edge that closes it with feedback=True",
    ),
]


@pytest.mark.parametrize(("mistake", "told"), MISTAKES)
def test_a_mistake_in_a_drawing_is_named(mistake: Callable[[Graph], object], told: str) -> None:
    with pytest.raises(GraphError, match=told):
        mistake(chained())


@pytest.mark.parametrize(
    ("source", "target", "options", "told"),
    [
        ("nobody", "double", {}, r"'nobody': graph 'chained' has no node 'nobody'; nodes: source, double, text, show"),
        ("source.items", "double", {}, r"'source.items': node 'source' has no outlet 'items'; outlets: out"),
        ("source", "double.x", {}, r"'double.x': node 'double' has no inlet 'x'; inlets: number"),
        ("show", "double", {}, r"'show': node 'show' has not one outlet but these: none"),
        ("source", "show", {}, r"source.out gives int, but show.text takes str"),
        ("source", "double", {"capacity": 0}, r"source → double: capacity is 0, expected at least 1, or None"),
        (
            "source",
            "double",
            {"overflow": "spill"},
            r"overflow is 'spill', expected 'block', 'drop_oldest' or 'latest'$",
        ),
        ("source", "double", {"overflow": "drop_oldest"}, r"without a capacity can't have overflow='drop_oldest'"),
        ("double", "double", {"capacity": 1, "overflow": "drop_oldest", "feedback": True}, "a feedback edge can't"),
        ("source", "double", {"gate": object()}, r"a gate stands only between synchronous, inline nodes"),
    ],
)
def test_what_can_not_be_connected_is_refused(source: str, target: str, options: dict[str, Any], told: str) -> None:
    with pytest.raises(GraphError, match=told):
        chained().connect(source, target, **options)


def test_a_gate_where_another_way_leads_through_a_channel_is_refused() -> None:
    nodes = {"source": numbers, "a": double, "away": double, "b": to_text, "show": show}
    graph = drawn("source > a > away > b > show", "a >gate b", thread="away", gate=Gate(), **nodes)
    with pytest.raises(GraphError, match=r"a.out → b.number: a gate can't stand where another way from 'a' to 'b'"):
        graph.validate()


class Doubling:
    """Taken apart into a source and `double`, and, when it is told to, what is told after these."""

    def __init__(self) -> None:
        self.more: list[str] = []

    def numbers(self) -> None:
        """Stands for the outlet."""

    def graph(self) -> Graph:
        ways, nodes = [f"double > {name}" for name in self.more], dict.fromkeys(self.more, keep)
        return drawn("source >1 double", *ways, outputs={"numbers": "double"}, source=numbers, double=double, **nodes)


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
    another = Collect()
    graph.connect("known", another)
    graph.connect("known", Collect())
    assert list(graph.nodes) == ["known", "doubling/source", "doubling/double", "keep", "collect", "collect_2"]
    names = ["doubling/double.out → known.number", "doubling/double.out → keep.number", "known.out → keep.number"]
    names += ["known.out → collect.item", "known.out → collect_2.item"]
    assert [edge.name for edge in graph.edges[1:]] == names
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
    inner = [name for name in graph.nodes if name.startswith("doubling/")]
    assert inner == ["doubling/source", "doubling/double", "doubling/seen"]
    assert len([edge for edge in graph.edges if edge.target[0] == "doubling/seen"]) == 1
    assert graph.sources_of("asks") == [doubling, double]


def test_it_is_told_whether_something_may_be_dropped_on_its_way() -> None:
    asks, ways = Asks(), ("double > asks", "double >drop_oldest1 other", "source >drop_oldest1 double")
    drawn(*ways, source=numbers, double=double, asks=asks, other=keep)
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
    graph = drawn("source >1 asks", "ring >> ring >> asks", source=numbers, ring=Ring(), asks=Asks())
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
