"""Meters of nodes and edges, and the report that is made of them."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter_ns

import anyio
import pytest
from doctor_clock import ToldClock
from graph_rows import Round, drawn, row, three
from held_envs import LONGEST_S
from traces import events_of, tracks

from rollflow.stream import Outlet
from rollflow.stream.graph.inline_run import InlineRun
from rollflow.stream.graph.meter import EdgeMeter, NodeMeter, waiting_for
from rollflow.stream.graph.report import node_report, report_of


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> ToldClock:
    clock = ToldClock()
    monkeypatch.setattr("rollflow.stream.graph.meter.clock", clock)
    return clock


def test_a_node_is_busy_when_it_neither_waits_nor_is_blocked(clock: ToldClock) -> None:
    node = NodeMeter("n")
    node.begin_life()
    clock.time += 5
    with node.waits():
        clock.time += 70
    clock.time += 6
    with node.blocks():
        clock.time += 300
        assert node.read() == (11, 300)
    clock.time += 4
    node.end_life()
    clock.time += 1000
    assert node.read() == (15, 300)


def test_waits_at_the_same_time_are_one_wait_also_from_before_a_life(clock: ToldClock) -> None:
    node = NodeMeter("n")
    with node.waits():
        clock.time += 10
        node.begin_life()
        with node.waits():
            clock.time += 20
        clock.time += 30
        assert node.read() == (0, 0)
    clock.time += 7
    assert node.read() == (7, 0)


def test_background_work_goes_on_while_a_task_of_the_node_is_blocked(clock: ToldClock) -> None:
    node = NodeMeter("n")
    node.begin_work(clock.time)
    began = node.works_since
    clock.time += 5
    with node.blocks():
        clock.time += 10
    clock.time += 20
    assert node.works_since == began
    assert node.read() == (35, 10)
    node.end_work(clock.time)
    clock.time += 1000
    assert node.works_since is None
    assert node.read() == (35, 10)


def test_an_edge_knows_its_mean_and_for_how_long_it_was_full(clock: ToldClock) -> None:
    edge = EdgeMeter("e", 2)
    clock.time += 10
    edge.holds(1)
    clock.time += 20
    edge.holds(2)
    clock.time += 30
    assert edge.read() == (1 * 20 + 2 * 30, 30)
    edge.holds(0)
    clock.time += 40
    assert edge.read() == (80, 30)
    assert edge.peak == 2


def spin(times: int = 200_000) -> int:
    return sum(range(times))


class HeavyStart:
    def start(self) -> Iterator[Round]:
        spin(2_000_000)
        yield Round(0, None)

    def __call__(self, number: int) -> Round:
        return Round(number + 1, number)


def test_the_time_of_start_is_that_of_the_node_itself() -> None:
    nodes = {"heavy": HeavyStart(), "same": lambda number: number}
    graph = drawn("heavy.on > same >> heavy", outputs={"out": "heavy.out"}, **nodes)
    with InlineRun(graph) as run:
        run.next_outputs()
        assert run.counters.report().bottleneck == "heavy"


@pytest.mark.anyio
async def test_a_reader_that_is_still_at_work_is_named_and_nothing_counts_once_the_run_is_over() -> None:
    graph = row(output="out", source=three, same=lambda number: number)
    async with graph.run() as run:
        await run["out"].receive()
        spin(2_000_000)
        assert run.report().bottleneck == "caller"
        assert [number async for number in run["out"]] == [1, 2]
    report = run.report()
    spin()
    assert run.report() == report


@pytest.mark.anyio
@pytest.mark.parametrize("in_tasks", [True, False])
async def test_the_caller_is_busy_while_a_task_works_that_reads_outputs(clock: ToldClock, *, in_tasks: bool) -> None:
    graph = drawn(
        "numbers >> twice", outputs={"plain": "numbers", "doubled": "twice"}, numbers=three, twice=lambda number: number
    )
    async with graph.run() as run, anyio.create_task_group() as tasks:

        async def read() -> None:
            async for _ in run["plain"]:
                pass

        if in_tasks:
            tasks.start_soon(read)
        async for _ in run["doubled"]:
            if not in_tasks:
                await run["plain"].receive()
            await anyio.wait_all_tasks_blocked()
            clock.time += 1000
        caller = run.counters.caller
        assert (caller.items, caller.busy_ns, caller.tasks) == (6, 3000, 1)


@pytest.mark.anyio
async def test_a_reader_that_waits_for_one_output_is_not_at_work_on_another() -> None:
    async def both(a: Outlet[int], b: Outlet[int]) -> None:
        for number in range(20):
            await a.send(number)
            spin()
            await b.send(number)

    graph = drawn(outputs={"a": "both.a", "b": "both.b"}, both=both)
    async with graph.run() as run:
        async for number in run["a"]:
            assert await run["b"].receive() == number
        report = run.report()
    assert report.bottleneck == "both"


@pytest.mark.anyio
async def test_each_call_of_a_node_in_a_thread_counts_by_itself(tmp_path: Path) -> None:
    are_sent = threading.Event()  # so that each call but the first finds its item there

    async def source(out: Outlet[int]) -> None:
        for number in range(5):
            await out.send(number)
        are_sent.set()

    def sink(number: int) -> None:
        assert are_sent.wait(LONGEST_S)

    graph = row(capacity=5, thread="sink", source=source, sink=sink)
    async with graph.run(trace=tmp_path / "run.trace") as run:
        await run.wait()
    assert len(run.counters.nodes["sink"].calls.recent) == 5
    assert [event["name"] for _, _, event in tracks(events_of(tmp_path / "run.trace"))["sink"]].count("sink") == 5


def meter(name: str, busy_ms: int, blocked_ms: int = 0, items: int = 1) -> NodeMeter:
    made = NodeMeter(name)
    made.items, made.busy_ns, made.blocked_ns = items, busy_ms * 10**6, blocked_ms * 10**6
    return made


def test_a_report_is_a_table_that_ends_in_a_sentence() -> None:
    edge = EdgeMeter("a.out → b.items", 4)
    edge.items, edge.dropped, edge.peak = 1234, 5, 4
    stage = meter("a", 100, 250, 2000)
    for took in (4, *[1, 2, 3] * 40):
        stage.calls.add(took * 10**6)
    report = report_of(0, 10**9, [stage, meter("b", 900)], [edge], pieces={"a": "NumpyToTensor"})
    lines = str(report).splitlines()
    assert lines[0].split() == "node items busy idle blocked p50 p99 longest slowest piece".split()
    assert lines[1].split() == "a 2,000 10.0% 65.0% 25.0% 2 ms 3 ms 4 ms NumpyToTensor".split()
    assert lines[2].split() == ["b", "1", "90.0%", "10.0%", "0.0%"]
    assert lines[4].split()[:5] == ["a.out", "→", "b.items", "1,234", "0/4"]
    assert lines[-1] == "held back by b (busy 90% of 1.0 s)"


def test_a_report_as_a_dict_has_every_figure_of_the_table_as_plain_numbers() -> None:
    edge = EdgeMeter("a.out → b.items", 4)
    edge.items, edge.dropped, edge.peak, edge.blocked_count = 1234, 5, 4, 7
    report = report_of(0, 2 * 10**9, [meter("a", 200, 500, 2000), meter("b", 1800)], [edge])
    figures = json.loads(json.dumps(report.as_dict()))
    assert figures["elapsed_s"] == 2.0
    assert figures["bottleneck"] == "b"
    assert figures["conclusion"] == str(report).splitlines()[-1]
    seconds, shares = {"busy_s": 0.2, "idle_s": 1.3, "blocked_s": 0.5}, {"busy": 0.1, "idle": 0.65, "blocked": 0.25}
    assert figures["nodes"]["a"] == {"items": 2000, **seconds, **shares}
    assert list(figures["nodes"]) == ["a", "b"]
    counts = {"capacity": 4, "items": 1234, "held": 0, "peak": 4, "dropped": 5, "blocked_count": 7}
    assert figures["edges"] == {"a.out → b.items": {**counts, "mean_held": 0.0, "full": 0.0}}


def test_where_none_is_at_work_none_holds_the_others_back() -> None:
    waiting = [meter("a", 20), meter("b", 50)]
    report = report_of(0, 10**9, waiting, [])
    assert report.bottleneck is None
    assert str(report).splitlines()[-1] == "all of them wait: none is busy for long (b, the busiest, for 5% of 1.0 s)"
    assert report_of(0, 10**9, [*waiting, meter("c", 0, 200)], []).bottleneck == "b"
    # Those that have no time left over.
    assert report_of(0, 10**9, [meter(name, 30) for name in "abcd"], []).bottleneck == "a"
    harmless = report_of(0, 10**9, [*waiting, meter("log", 900)], [], harmless=frozenset({"log"}))
    assert harmless.bottleneck is None


def test_no_time_is_reported_that_had_not_elapsed() -> None:
    began, first, second = perf_counter_ns(), NodeMeter("a"), NodeMeter("b")

    def read_late() -> Iterator[NodeMeter]:
        for node in (first, second):
            node.begin_life()
            since = perf_counter_ns()
            while perf_counter_ns() < since + 1000:
                pass
            node.end_life()
            yield node

    report = report_of(began, None, read_late(), [])
    assert 2e-6 <= sum(node.busy_s for node in report.nodes) <= report.elapsed_s


def test_of_those_who_hold_gates_it_is_said_how_long_they_were_waited_for() -> None:
    report = report_of(0, 10**9, [meter("a", 20), meter("the trainer", 900)], [], holders=frozenset({"the trainer"}))
    assert report.bottleneck == "the trainer"
    assert str(report).splitlines()[-1] == "held back by the trainer (waited for 90% of 1.0 s)"


def test_chains_that_wait_for_one_holder_at_once_are_one_wait() -> None:
    holders: dict[str, NodeMeter] = {}
    with waiting_for(holders, "the trainer"):
        with waiting_for(holders, "the trainer"), waiting_for(holders, None):
            pass
        first, _ = holders["the trainer"].read()
        while holders["the trainer"].read()[0] == first:
            pass
    busy = holders["the trainer"].read()
    assert busy == holders["the trainer"].read()
    assert holders["the trainer"].items == 2
    assert list(holders) == ["the trainer"]


def test_a_part_of_a_stage_may_be_shown_by_itself() -> None:
    report = report_of(0, 10**9, [meter("env", 200), meter("caller", 700)], [])
    learner, none = meter("learner_pipeline", 500), meter("learner_pipeline", 0, items=0)
    part, idle = (node_report(10**9, each, each.read()) for each in (learner, none))
    shown = {node.name: (node.busy_s, node.idle_s) for node in report.moved("caller", part, None).nodes}
    caller = pytest.approx(0.2), pytest.approx(0.8)
    assert shown == {"env": (0.2, 0.8), "learner_pipeline": (0.5, 0.5), "caller": caller}
    assert report.moved("caller", part, None).bottleneck == "learner_pipeline"
    assert [node.name for node in report.moved("caller", idle, None).nodes] == ["env", "caller"]
