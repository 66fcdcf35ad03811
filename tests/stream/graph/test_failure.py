"""Runs that end before their time, and the errors that reach their callers."""

import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint
from graph_rows import drawn, row

from rollflow import Graph
from rollflow.stream import Outlet, RunError
from rollflow.stream.graph.inline_run import InlineRun

pytestmark = pytest.mark.anyio


class Collect:
    def __init__(self) -> None:
        self.items: list[Any] = []

    def __call__(self, item: Any) -> None:
        self.items.append(item)


async def three(out: Outlet[int]) -> None:
    for number in range(3):
        await out.send(number)


def graph_of(work: Callable[[int], Any], where: Any = "inline") -> Graph:
    graph = Graph("failing")
    graph.add(source=three)
    graph.add_node("work", work, where=where)
    graph.connect("source", "work", capacity=1)
    graph.output("out", "work")
    return graph


def refuses(number: int) -> int:
    if number == 2:
        raise ValueError("2 is too much")
    return number


async def test_a_reader_does_not_take_a_failure_for_the_end_of_an_output() -> None:
    seen: list[int] = []
    ended = False
    with pytest.raises(ValueError, match="2 is too much"):
        async with graph_of(refuses).run() as run:
            async for number in run["out"]:
                seen.append(number)  # noqa: PERF401  (the error comes in the middle)
            ended = True
    assert seen == [0, 1][: len(seen)]
    assert not ended


async def test_one_who_waits_does_not_take_a_failure_for_the_end_of_the_run() -> None:
    ended = False
    with pytest.raises(ValueError, match="2 is too much"):
        async with graph_of(refuses).run() as run, anyio.create_task_group() as tasks:
            for _ in range(2):
                tasks.start_soon(run["out"].receive)
            try:
                await run.wait()
                ended = True
            except ValueError as error:
                assert error.__notes__ == ["in node 'work'"]
    assert not ended


@pytest.mark.parametrize("use", ["receive", "wait", "drain"])
async def test_one_outside_the_block_is_told_that_the_run_was_left(use: str) -> None:
    def of(run: Any) -> Awaitable[object]:
        waits: dict[str, Callable[[], Awaitable[object]]] = {
            "receive": run["out"].receive,
            "wait": run.wait,
            "drain": run.drain,
        }
        return waits[use]()

    told: list[str] = []

    async def outside(run: Any) -> None:
        try:
            while True:
                await of(run)
        except RunError as error:
            told.append(str(error))

    async def forever(out: Outlet[int]) -> None:
        await out.send(0)
        await anyio.sleep_forever()

    graph = row("left", output="out", source=forever, same=lambda number: number)
    async with anyio.create_task_group() as tasks:
        async with graph.run() as run:
            if use != "drain":
                tasks.start_soon(outside, run)
            await anyio.wait_all_tasks_blocked()
        with pytest.raises(RunError, match="graph 'left' was left before it had ended"):
            while True:
                await of(run)
    assert told == ([] if use == "drain" else ["graph 'left' was left before it had ended"])


async def test_a_run_that_has_ended_may_be_waited_for_and_read_afterwards() -> None:
    async with graph_of(lambda number: number).run() as run:
        assert [item async for item in run["out"]] == [0, 1, 2]
        await run.wait()
    await run.wait()
    with pytest.raises(anyio.EndOfStream):
        await run["out"].receive()


async def test_a_group_of_errors_from_a_node_is_raised_whole_and_names_the_node() -> None:
    async def fails(out: Outlet[int]) -> None:
        async def inner() -> None:
            raise ValueError("inside")

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(inner)

    graph = row(output="out", source=fails)
    with pytest.raises(ExceptionGroup) as raised:
        async with graph.run() as run:
            await run.wait()
    assert raised.value.__notes__ == ["in node 'source'"]
    assert [str(error) for error in raised.value.exceptions] == ["inside"]


async def test_an_error_keeps_what_it_came_from() -> None:
    def work(number: int) -> int:
        try:
            return dict[int, int]()[number]
        except KeyError:
            raise ValueError("no such number")  # noqa: B904  (its context is what is looked at)

    with pytest.raises(ValueError, match="no such number") as raised:
        async with graph_of(work).run() as run:
            await run.wait()
    assert isinstance(raised.value.__context__, KeyError)
    assert not raised.value.__suppress_context__


@pytest.mark.parametrize("where", ["inline", "thread"])
async def test_a_node_that_raises_stop_iteration_is_named(where: Any) -> None:
    numbers = iter([7])
    with pytest.raises(RuntimeError, match="raised StopIteration") as raised:
        async with graph_of(lambda number: next(numbers), where).run() as run:
            await run.wait()
    assert raised.value.__notes__ == ["in node 'work'"]


class Echo:
    """A ring of one node that lets every item out, and nothing round."""

    def __init__(self, count: int) -> None:
        self.asked = 0
        self.count = count

    def start(self) -> Iterator[int]:
        while self.asked < self.count:
            self.asked += 1
            yield self.asked

    def finish(self) -> Iterator[int]:
        while self.asked > 0:
            self.asked -= 1
            yield -self.asked

    def __call__(self, number: int) -> int | None:
        return None


def echo_graph(echo: Echo) -> Graph:
    graph = drawn("echo >> echo", name="echo", outputs={"out": "echo"}, echo=echo)
    return graph


async def test_a_node_that_sets_out_many_items_is_held_back_by_their_reader() -> None:
    echo = Echo(1000)
    async with echo_graph(echo).run() as run:
        await anyio.wait_all_tasks_blocked()
        assert echo.asked == 2  # one in the output, one before it
        assert await run["out"].receive() == 1
        await anyio.wait_all_tasks_blocked()
        assert echo.asked == 3


async def test_a_node_that_sets_out_items_without_end_can_be_drained() -> None:
    echo = Echo(1_000_000)
    async with echo_graph(echo).run() as run:
        assert await run["out"].receive() == 1
        run.stop()
        seen = [item async for item in run["out"]]
    assert seen[-1] == 0
    assert len(seen) < 20


def test_an_inline_run_takes_what_start_and_finish_give_one_by_one() -> None:
    echo = Echo(5)
    with InlineRun(echo_graph(echo)) as run:
        assert echo.asked == 1
        assert [run.next_outputs() for _ in range(2)] == [[("out", 1)], [("out", 2)]]
        run.finish()
        assert echo.asked == 2
        assert [run.next_outputs() for _ in range(3)] == [[("out", -1)], [("out", 0)], []]


async def test_an_asynchronous_node_at_long_work_passes_through_the_event_loop() -> None:
    turns = 0

    async def busy(out: Outlet[int]) -> None:
        nonlocal turns
        while True:
            turns += 1
            until = time.perf_counter() + 0.002
            while time.perf_counter() < until:
                pass
            await out.send(turns)

    graph = row(capacity=1000, source=busy, sink=Collect())
    async with graph.run():
        for _ in range(10):
            await checkpoint()
    assert turns <= 12  # one for each time that the others had their turn
