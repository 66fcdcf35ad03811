"""What a node and a gate may have beside: looked up once, with defaults, and refused where it can't be called."""

from typing import Any

import pytest
from graph_rows import Gate, Ring, drawn

from rollflow import Graph
from rollflow.stream import GraphError
from rollflow.stream.graph.counters import RunCounters
from rollflow.stream.graph.inline_run import InlineRun
from rollflow.stream.graph.node import Background, Observable, Processor, Sink, Source, node_methods
from rollflow.stream.graph.port import read_node


class Node:
    """A node that has what it is given."""

    def __init__(self, **given: Any) -> None:
        vars(self).update(given)

    def __call__(self, item: int) -> int | None:
        return item


def takes_a_name(name: str) -> None: ...


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"start": 3}, r"node 'it' has start = 3, expected a method start\(\), as Source has it"),
        ({"finish": takes_a_name}, r"node 'it' has finish\(name.*, expected a method finish\(\), as Processor has it"),
        ({"take_ending": lambda: None}, r"has take_ending\(\), expected a method take_ending\(cause\), as Sink has it"),
        ({"take_trace": takes_a_name}, r"expected a method take_trace\(name, trace\), as Observable has it"),
        (
            {"take_sources": lambda sources: ()},
            r"expected a method take_sources\(sources, \*, drops, is_all\), as Processor has it",
        ),
        (
            {"in_flight": 0, "completed": lambda: ()},
            r"node 'it' is Node without fileno\(\), patience, expected what Background has",
        ),
    ],
)
def test_what_can_not_be_called_is_refused_when_the_graph_is_drawn(given: dict[str, Any], told: str) -> None:
    with pytest.raises(GraphError, match=told) as raised:
        Graph().add(it=Node(**given))
    assert raised.value.__notes__ == ["see docs/how_to/graphs.md#nodes"]


def test_a_plain_node_has_none_of_it() -> None:
    assert node_methods("it", Node()) == {}


def test_who_inherits_has_the_defaults_and_they_count_as_none() -> None:
    class Inherits(Source, Processor, Sink, Observable):
        def __call__(self, item: int) -> int:
            return item

        def describe(self) -> str:
            return "inherits"

    methods = node_methods("it", Inherits())
    assert methods.keys() == {"describe"}
    assert methods["describe"]() == "inherits"


def test_a_background_node_may_hasten() -> None:
    class Works(Background):
        in_flight, patience = 0, None

        def __call__(self, item: int) -> int | None: ...

        def fileno(self) -> int:
            return -1

        def completed(self) -> list[int]:
            return []

    node = Works()
    assert read_node("it", node).background is node
    assert "hasten" not in node_methods("it", node)
    node.hasten = lambda: None  # type: ignore[method-assign]
    assert "hasten" in node_methods("it", node)


def test_what_changes_is_read_when_it_is_asked_for() -> None:
    node, graph = Node(report_notes=["one"]), Graph()
    graph.add(it=node)
    assert RunCounters(graph).report().notes == ("one",)
    node.report_notes = ["one", "two"]  # type: ignore[attr-defined]
    assert RunCounters(graph).report().notes == ("one", "two")


def gated(gate: Any) -> Graph:
    return drawn("source >gate target >> source", gate=gate, source=Ring(), target=Node())


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"admits": None}, r"the gate of source.out → target.item is Wrong without admits\(item\), expected what Gate"),
        ({"watch": lambda self: None}, r"has watch\(\), expected a method watch\(changed\), as Gate has it"),
        ({"waits_for": 7}, r"has waits_for = 7, expected a method waits_for\(\), as ObservableGate has it"),
    ],
)
def test_a_gate_that_is_none_is_refused_when_its_edge_is_drawn(wrong: dict[str, Any], told: str) -> None:
    with pytest.raises(GraphError, match=told):
        gated(type("Wrong", (Gate,), wrong)())


@pytest.mark.parametrize("holder", [None, "trainer"])
def test_the_holder_of_a_gate_is_asked_for_when_items_are_parked(holder: str | None) -> None:
    gate: Any = Gate()
    with InlineRun(gated(gate)) as run:
        gate_of_its_own = run.chain.parked[0][0] if run.chain.parked else None
        assert run.next_outputs() == []
        assert gate_of_its_own is not None
        assert run.chain.holder is None
    named = type("Named", (Gate,), {"holder": holder})()
    with InlineRun(gated(named)) as run:
        run.next_outputs()
        assert run.chain.holder == holder
