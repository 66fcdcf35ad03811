from collections.abc import Iterator
from typing import NamedTuple

import pytest
from graph_rows import drawn, row

from rollflow.stream import Outlet
from rollflow.stream.graph import meter
from rollflow.stream.graph.inline_run import InlineRun
from rollflow.stream.graph.meter import EdgeMeter, NodeMeter


class Clock:
    """A clock that stands still until it is told."""

    def __init__(self) -> None:
        self.now = 1000

    def __call__(self) -> int:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(meter, "clock", clock)
    return clock


def test_a_node_is_busy_when_it_neither_waits_nor_is_blocked(clock: Clock) -> None:
    node = NodeMeter("n")
    node.begin_life()
    clock.now += 5
    node.begin_wait()
    clock.now += 70
    node.end_wait()
    clock.now += 6
    node.begin_block()
    clock.now += 300
    assert node.read() == (11, 300)
    node.end_block()
    clock.now += 4
    node.end_life()
    clock.now += 1000
    assert node.read() == (15, 300)


def test_waits_at_the_same_time_are_one_wait(clock: Clock) -> None:
    node = NodeMeter("n")
    node.begin_life()
    node.begin_wait()
    clock.now += 10
    node.begin_wait()
    clock.now += 20
    node.end_wait()
    clock.now += 30
    assert node.read() == (0, 0)
    node.end_wait()
    clock.now += 7
    assert node.read() == (7, 0)


def test_a_wait_before_a_life_is_not_taken_off_it(clock: Clock) -> None:
    node = NodeMeter("n")
    node.begin_wait()
    clock.now += 10
    node.begin_life()
    clock.now += 20
    node.end_wait()
    clock.now += 3
    assert node.read() == (3, 0)


def test_an_edge_knows_its_mean_and_for_how_long_it_was_full(clock: Clock) -> None:
    edge = EdgeMeter("e", 2)
    clock.now += 10
    edge.holds(1)
    clock.now += 20
    edge.holds(2)
    clock.now += 30
    assert edge.read() == (1 * 20 + 2 * 30, 30)
    edge.holds(0)
    clock.now += 40
    assert edge.read() == (80, 30)
    assert edge.peak == 2


class Round(NamedTuple):
    on: int | None
    out: int | None


async def three(out: Outlet[int]) -> None:
    for number in range(3):
        await out.send(number)


def spin(times: int = 200_000) -> int:
    return sum(range(times))


class HeavyStart:
    def start(self) -> Iterator[Round]:
        spin(2_000_000)
        yield Round(0, None)

    def __call__(self, number: int) -> Round:
        return Round(number + 1, number)


def test_the_time_of_start_is_that_of_the_node_itself() -> None:
    graph = drawn(
        "heavy.on > same >> heavy", outputs={"out": "heavy.out"}, heavy=HeavyStart(), same=lambda number: number
    )
    with InlineRun(graph) as run:
        run.next_outputs()
        assert run.report().bottleneck == "heavy"


@pytest.mark.anyio
async def test_a_reader_that_is_still_at_work_is_named() -> None:
    graph = row(output="out", source=three, same=lambda number: number)
    async with graph.run() as run:
        await run["out"].receive()
        spin(2_000_000)
        assert run.report().bottleneck == "caller"


@pytest.mark.anyio
async def test_a_reader_that_waits_for_one_output_is_not_at_work_on_another() -> None:
    class Both:
        async def run(self, a: Outlet[int], b: Outlet[int]) -> None:
            for number in range(20):
                await a.send(number)
                spin()
                await b.send(number)

    graph = drawn(outputs={"a": "both.a", "b": "both.b"}, both=Both())
    async with graph.run() as run:
        async for number in run["a"]:
            assert await run["b"].receive() == number
        report = run.report()
    assert report.bottleneck == "both"


@pytest.mark.anyio
async def test_a_report_stands_still_once_the_run_is_over() -> None:
    graph = row(output="out", source=three, same=lambda number: number)
    async with graph.run() as run:
        assert [number async for number in run["out"]] == [0, 1, 2]
    report = run.report()
    spin()
    assert run.report() == report
