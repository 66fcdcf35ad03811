"""More faults in graphs: outputs that are read one by one, and code that holds up the event loop."""

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest
from graph_rows import drawn, row
from held_envs import await_that
from stalled_rollouts import line_of
from stalled_runs import numbers, stall_of

from rollflow.stream import Inlet, Outlet

LONGEST_S = 60.0
pytestmark = pytest.mark.anyio


async def test_a_reader_of_one_output_while_the_other_is_full_is_a_deadlock_with_the_reader_in_it() -> None:
    async def both(left: Outlet[int], right: Outlet[int]) -> None:
        for number in range(100):
            await left.send(number)
            await right.send(number)

    graph = drawn(outputs={"left": "both.left", "right": "both.right"}, both=both)
    text = await stall_of(graph, "both", "right")
    deadlock = "caller waits for an item of graph.right; both waits for room in both.left → graph.left"
    assert f": deadlock: {deadlock}" in text
    read = "do: read output 'left' as well, in a task of its own: async for item in run['left']; or connect 'both.left'"
    assert read in text


def until_said(caplog: pytest.LogCaptureFixture) -> None:
    await_that(lambda: "event loop" in caplog.text)


async def test_a_coroutine_that_holds_up_the_event_loop_is_named_though_its_reader_waits_for_another_node(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def holds(inlet: Inlet[int]) -> None:
        async for number in inlet:
            if number == 3:
                until_said(caplog)

    graph = drawn("numbers >1 holds", outputs={"out": "more"}, numbers=numbers, more=numbers, holds=holds)
    async with graph.run(stall_after=0.1) as run:
        async for _ in run["out"]:
            await anyio.lowlevel.checkpoint()
        await run.wait()
    [text] = [record.getMessage() for record in caplog.records if "event loop" in record.getMessage()]
    assert text.startswith("holds holds up the event loop since ")
    assert line_of(holds, "until_said(caplog)") in text


async def test_a_callback_that_holds_up_the_event_loop_is_named(caplog: pytest.LogCaptureFixture) -> None:
    async def waits(out: Outlet[int]) -> None:
        await anyio.sleep_forever()

    async def callback() -> None:
        await anyio.lowlevel.checkpoint()  # the run's tasks have begun
        until_said(caplog)

    def sink(number: int) -> None:
        pass

    graph = row(capacity=1, waits=waits, sink=sink)
    async with graph.run(stall_after=0.1), anyio.create_task_group() as tasks:
        tasks.start_soon(callback)
    assert "a task or a callback holds up the event loop since " in caplog.text
    assert line_of(callback, "until_said(caplog)") in caplog.text


def slow_function(number: int) -> int:
    if number == 3:
        time.sleep(0.2)
    return number


async def slow_reader(number: int) -> None:
    slow_function(number)


async def slow_in_thread(number: int) -> None:
    await anyio.to_thread.run_sync(slow_function, number)


@pytest.mark.parametrize(
    ("node", "read"),
    [(slow_function, anyio.sleep), (lambda number: number, slow_reader), (lambda number: number, slow_in_thread)],
    ids=["a function", "a reader", "a reader with a thread"],
)
async def test_functions_and_readers_that_take_their_time_are_not_said_to_hold_up_the_event_loop(
    node: Callable[[int], int], read: Callable[[int], Any], caplog: pytest.LogCaptureFixture
) -> None:
    async def few(out: Outlet[int]) -> None:
        for number in (0, 3, 0, 0):
            await out.send(number)

    graph = row(capacity=1, output="out", few=few, node=node)
    with caplog.at_level(logging.WARNING):
        async with graph.run(stall_after=0.1) as run:
            async for number in run["out"]:
                await read(0 if read is anyio.sleep else number)
    assert "event loop" not in caplog.text


async def test_a_callback_that_holds_up_the_event_loop_is_what_a_stalled_run_waits_for(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """And not a node whose results wait in a thread."""
    is_held, told = threading.Event(), "the event loop is held up by a task or a callback since "

    def in_thread(number: int) -> int:
        is_held.wait(LONGEST_S)
        return number

    async def callback() -> None:
        while not (run["out"].is_awaited and run.doctor._answered):
            await anyio.lowlevel.checkpoint()
        is_held.set()
        await_that(lambda: told in caplog.text)

    graph = row(capacity=1, thread="node", output="out", numbers=numbers, node=in_thread)
    async with graph.run(stall_after=0.2) as run, anyio.create_task_group() as tasks:
        tasks.start_soon(callback)
        async for _ in run["out"]:
            pass
    text = next(record.getMessage() for record in caplog.records if told in record.getMessage())
    assert text.startswith("no item for ")
    assert line_of(callback, "await_that(") in text
