from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
from graph_rows import drawn

from rollflow import Graph
from rollflow.stream import GraphError, Inlet, Outlet


def double(number: int) -> int:
    return 2 * number


def to_text(number: int) -> str:
    return str(number)


def show(text: str) -> None:
    del text


def keep(number: int) -> None:
    del number


async def numbers(out: Outlet[int]) -> None:
    await out.send(1)


async def collect(items: Inlet[int]) -> None:
    async for _ in items:
        pass


class Halves(NamedTuple):
    low: int | None
    high: str | None


def split(number: int) -> Halves:
    return Halves(number, None)


class Ring:
    """Sets out one item, and takes it back when it has gone round."""

    def start(self) -> list[int]:
        return [0]

    def __call__(self, number: int) -> int:
        return number


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
    graph = drawn(
        "source > split",
        "split.low > double",
        "split.high > show",
        outputs={"doubled": "double"},
        source=numbers,
        split=split,
        double=double,
        show=show,
    )
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


def test_mermaid_draws_boxes_frames_and_dashed_feedback() -> None:
    graph = drawn("ring > double >> ring", ring=Ring(), double=double)
    graph.output("doubled", "double", capacity=3)
    assert graph.mermaid().splitlines() == [
        "flowchart LR",
        '    subgraph g0["one task"]',
        '        n0["ring"]',
        '        n1["double"]',
        "    end",
        '    n0 -- "out" --> n1',
        '    n1 -. "out" .-> n0',
        '    out2(["doubled"])',
        '    n1 -- "out, capacity 3, block" --> out2',
    ]


def test_a_graph_is_a_node_of_another() -> None:
    inner = Graph("inner")
    inner.add(a=double, b=double)
    inner.connect("a", "b")
    inner.input("number", "a.number")
    inner.output("doubled", "b")
    outer = drawn(
        "source > twice.number",
        "twice.doubled > text > show",
        name="outer",
        source=numbers,
        twice=inner,
        text=to_text,
        show=show,
    )
    outer.validate()
    assert list(outer.nodes) == ["source", "twice/a", "twice/b", "text", "show"]
    assert outer.groups() == [["source"], ["twice/a", "twice/b", "text", "show"]]


def not_a_node(first: int, second: int) -> int:
    return first + second


class Wrong:
    async def run(self, items: int) -> None:
        del items


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
    (lambda graph: [graph.input("i", "text") for _ in range(2)], "graph 'chained' has an input 'i' already"),
    (lambda graph: [graph.input("i", "text"), graph.validate()], "'text.number' is an input of graph 'chained'"),
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
            r"overflow is 'spill', expected 'block', 'drop_oldest' or 'latest'",
        ),
        ("source", "double", {"overflow": "latest"}, r"an edge without a capacity can't have overflow='latest'"),
        ("double", "double", {"capacity": 1, "overflow": "latest", "feedback": True}, r"a feedback edge can't have"),
        ("source", "double", {"gate": object()}, r"a gate stands only between synchronous, inline nodes"),
    ],
)
def test_what_can_not_be_connected_is_refused(source: str, target: str, options: dict[str, Any], told: str) -> None:
    with pytest.raises(GraphError, match=told):
        chained().connect(source, target, **options)


class Open:
    def admits(self, item: Any) -> bool:
        return True

    def watch(self, changed: Any) -> None:
        del changed


def test_a_gate_where_another_way_leads_through_a_channel_is_refused() -> None:
    nodes = {"source": numbers, "a": double, "away": double, "b": to_text, "show": show}
    graph = drawn("source > a > away > b > show", thread="away", **nodes)
    graph.connect("a", "b", gate=Open())
    with pytest.raises(GraphError, match=r"a.out → b.number: a gate can't stand where another way from 'a' to 'b'"):
        graph.validate()


def test_a_composite_names_its_own_ports() -> None:
    inner = Graph("inner")
    inner.add(a=double)
    inner.input("number", "a")
    inner.output("doubled", "a")
    outer = Graph("outer")
    outer.add(source=numbers, twice=inner)
    with pytest.raises(GraphError, match=r"'twice.a': node 'twice' has no inlet 'a'; inlets: number"):
        outer.connect("source", "twice.a")
    with pytest.raises(GraphError, match=r"graph 'outer' has a node 'twice' already"):
        outer.add(twice=double)
