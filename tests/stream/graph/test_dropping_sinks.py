"""Sinks behind edges that drop: they are called in a thread, hold nobody up, and no report blames the wrong node."""

import re
import threading
from typing import Any

import anyio
import pytest
from graph_rows import drawn, row

from rollflow import Graph
from rollflow.stream import GraphError, Inlet, Outlet
from rollflow.stream.graph.meter import NodeMeter
from rollflow.stream.graph.report import report_of

LONGEST_S = 60.0

pytestmark = pytest.mark.anyio


async def numbers(out: Outlet[int]) -> None:
    for number in range(20):
        await out.send(number)


class Held:
    """A sink whose first call returns when it is let go."""

    def __init__(self) -> None:
        self.begins, self.let_go = threading.Event(), threading.Event()

    def __call__(self, number: int) -> None:
        self.begins.set()
        assert self.let_go.wait(LONGEST_S)


class HeldInline(Held):
    where = "inline"


class HeldOn(Held):
    """Not a sink: it sends on what it gets."""

    def __call__(self, number: int) -> int:  # type: ignore[override]
        super().__call__(number)
        return number


def graph_with(slow: Any, overflow: Any, where: Any = None) -> Graph:
    outputs = {"batches": "learner"}
    graph = drawn("source >1 learner", outputs=outputs, source=numbers, learner=lambda number: number)
    graph.add_node("slow", slow, where=where)
    graph.connect("source", "slow", capacity=1, overflow=overflow)
    if graph.nodes["slow"].outlets:
        graph.output("others", "slow")
    return graph


async def test_a_sink_behind_an_edge_that_drops_holds_nobody_up() -> None:
    sink = Held()
    graph = graph_with(sink, "drop_oldest")
    assert "slow.number   worker thread" in graph.explain()
    async with graph.run() as run:
        try:
            # Its first call is under way until the last of these has come.
            assert [item async for item in run["batches"]] == list(range(20))
            assert await anyio.to_thread.run_sync(sink.begins.wait, LONGEST_S)
        finally:
            sink.let_go.set()
    assert run.report().nodes[2].name == "slow"


def test_only_sinks_whose_every_edge_drops_get_a_thread() -> None:
    assert graph_with(HeldOn(), "drop_oldest").place_of("slow") == "inline"
    graph = graph_with(Held(), "drop_oldest")
    assert graph.place_of("slow") == "thread"
    graph.connect("learner", "slow", capacity=1)
    assert graph.place_of("slow") == "inline"
    assert graph_with(Held(), "block").place_of("slow") == "inline"
    assert graph_with(HeldInline(), "drop_oldest").place_of("slow") == "inline"
    assert graph_with(Held(), "drop_oldest", where="inline").place_of("slow") == "inline"
    assert graph_with(HeldInline(), "drop_oldest", where="thread").place_of("slow") == "thread"


@pytest.mark.parametrize("gives", [False, True], ids=["sink", "outlet"])
@pytest.mark.parametrize("overflow", ["block", "drop_oldest"])
@pytest.mark.parametrize("where", ["inline", "thread"])
def test_the_report_names_a_slow_node_only_if_it_holds_others_back(where: Any, overflow: Any, gives: bool) -> None:
    graph = graph_with(HeldOn() if gives else Held(), overflow, where)
    slow, learner = NodeMeter("slow"), NodeMeter("learner")
    slow.busy_ns, learner.busy_ns = 950_000_000, 150_000_000
    report = report_of(0, 10**9, [learner, slow], [], harmless=graph.harmless())
    is_harmless = where == "thread" and overflow != "block"
    assert report.bottleneck == ("learner" if is_harmless else "slow")
    conclusion = "held back by learner (busy 15% of 1.0 s)" if is_harmless else "held back by slow (busy 95% of 1.0 s)"
    assert str(report).splitlines()[-1] == conclusion


def test_a_node_that_a_slow_thread_feeds_is_harmless_only_off_the_event_loop() -> None:
    graph = graph_with(HeldOn(), "drop_oldest", "thread")
    graph.add(inline=lambda number: None, task=collect)
    graph.connect("slow", "inline", capacity=1)
    graph.connect("slow", "task", capacity=1)
    graph.output("nothing", "inline")
    assert graph.harmless() == {"slow", "task"}


async def collect(items: Inlet[int]) -> None:
    async for _ in items:
        pass


# Functions that are asynchronous


async def test_an_async_function_of_an_item_is_a_node() -> None:
    seen: list[int] = []

    async def keep(number: int) -> None:
        await anyio.lowlevel.checkpoint()
        seen.append(number)

    async def double(number: int) -> int | None:
        await anyio.lowlevel.checkpoint()
        return None if number % 2 else 2 * number

    graph = row(capacity=1, source=numbers, double=double, keep=keep)
    assert graph.nodes["keep"].outlets == {}
    assert graph.nodes["double"].outlets == {"out": int}
    async with graph.run() as run:
        await run.wait()
    assert seen == [2 * number for number in range(0, 20, 2)]


# Mistakes


class Silent:
    def __call__(self, number):  # type: ignore[no-untyped-def]
        pass


async def silent(number: int):  # type: ignore[no-untyped-def]
    pass


@pytest.mark.parametrize(
    ("sink", "form"),
    [
        (Silent(), "def __call__(self, item) -> None"),
        (lambda number: None, "def sink(item) -> None"),
        (silent, "async def sink(item: …) -> None"),
    ],
)
def test_a_sink_without_an_annotation_is_told_the_form_of_its_own(sink: Any, form: str) -> None:
    graph = row(capacity=1, source=numbers, sink=sink)
    with pytest.raises(GraphError, match=f"says so by its annotation: {re.escape(form)}\n"):
        graph.validate()


def test_a_graph_that_is_entered_by_a_plain_with_is_told_how() -> None:
    graph = row("mine", output="out", source=numbers)
    with pytest.raises(GraphError, match=r"graph 'mine' was entered by 'with'.* expected 'async with graph.run\(\)"):
        with graph.run():
            raise AssertionError
