"""Faults in graphs on an event loop, which the stall doctor names from another thread."""

import contextlib
import gc
import logging
import queue
import re
import threading
import weakref

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest
from doctor_clock import Looking
from graph_rows import Gate, Ring, drawn, keep, once_and_never_again, row
from held_envs import LONGEST_S, await_that
from stalled_rollouts import line_of
from stalled_runs import looked_at, numbers, read_all, stall_of

from rollflow.stream import Inlet, Outlet, StallError
from rollflow.stream.graph.run import Run
from rollflow.stream.observe.waits import Wait

pytestmark = pytest.mark.anyio


async def test_a_lock_that_a_node_in_a_thread_takes_is_named_with_its_line() -> None:
    lock, hangs = threading.Lock(), threading.Event()

    def locked(number: int) -> int:
        if number == 3:
            hangs.set()
            with lock:
                pass
        return number

    graph = row(capacity=1, thread="locked", output="out", numbers=numbers, locked=locked)
    lock.acquire()
    text = await stall_of(graph, "locked", "out", is_there=hangs.is_set, end_fault=lock.release)
    assert text.startswith("no item for 5.")
    assert ": locked is in its call since 5." in text
    assert "caller waits for it" in text
    assert f"  at {line_of(locked, 'with lock:')}" in text


async def test_a_diagnosis_that_is_kept_does_not_keep_the_graph() -> None:
    class Source:
        async def run(self, out: Outlet[int]) -> None:
            await out.send(1)
            await anyio.sleep_forever()

    source = Source()
    kept = weakref.ref(source)
    graph = row(output="out", source=source)
    async with graph.run() as run:
        await run["out"].receive()
        await anyio.lowlevel.checkpoint()
        diagnosis = run.diagnose()
    assert [wait.party for wait in diagnosis.parties] == ["source", "caller"]
    assert "parties" not in repr(diagnosis)
    del graph, run, source
    await anyio.lowlevel.checkpoint()
    gc.collect()
    assert kept() is None


async def test_two_nodes_that_wait_for_room_at_each_other_are_a_deadlock_named_edge_by_edge() -> None:
    async def left(inlet: Inlet[int], out: Outlet[int], done: Outlet[int]) -> None:
        while True:
            await out.send(1)

    async def right(inlet: Inlet[int], out: Outlet[int]) -> None:
        while True:
            await out.send(2)

    ways = "left.out >2 right.inlet", "right.out >>2 left.inlet"
    graph = drawn(*ways, outputs={"done": "left.done"}, left=left, right=right)
    text = await stall_of(graph, "right", "done")
    told = "left waits for room in left.out → right.inlet; right waits for room in right.out → left.inlet"
    assert f"deadlock: {told}" in text
    assert "do: give one of these edges more capacity" in text


async def test_a_source_that_awaits_what_never_comes_is_named_with_the_line_of_its_await() -> None:
    never = anyio.Event()

    async def source(out: Outlet[int]) -> None:
        await out.send(1)
        await never.wait()

    graph = row(capacity=1, source=source, sink=keep)
    text = await stall_of(graph, "source", end_fault=never.set)
    # Where it takes a look more until nothing moves, the source has stood still for 6.0 s.
    assert re.search(r"source is at work, and neither sends nor receives since (5\.\d|6\.0) s", text), text
    assert line_of(source, "await never.wait()") in text


def empty(full: "queue.Queue[int]", run: Run) -> None:
    """Take everything out until the run has ended."""
    while not run.has_ended:
        with contextlib.suppress(queue.Empty):
            full.get(timeout=0.01)


async def test_a_sink_that_puts_into_a_full_queue_is_named_after_ten_calls() -> None:
    full: queue.Queue[int] = queue.Queue(maxsize=20)

    def put(number: int) -> None:
        full.put(number)

    graph = row(capacity=1, thread="put", numbers=numbers, put=put)
    async with graph.run(stall_after=None) as run:
        told: list[str] = []

        def look(looking: Looking) -> str:
            told.extend(looking.for_s(25.0))
            return looking.until_told(10.0)

        text = await looked_at(run, look, "put", full.full)
        run.stop()
        with anyio.fail_after(LONGEST_S):
            await anyio.to_thread.run_sync(empty, full, run)
    assert told == []  # a sink may take its time
    assert "put is in its call since 30." in text
    assert line_of(put, "full.put(number)") in text


@pytest.mark.parametrize(
    ("is_async", "doing"),
    [(False, "is in its call"), (True, "is at work, and neither sends nor receives")],
    ids=["function", "coroutine"],
)
async def test_a_node_that_holds_up_the_event_loop_is_named(is_async: bool, doing: str) -> None:
    texts: list[str] = []

    def look() -> None:
        await_that(lambda: line_of(holds, "looker.join") in str(run.diagnose()))
        texts.append(Looking(run.doctor).until_told(6.0))

    def holds(number: int) -> int:
        if number == 3:
            looker = threading.Thread(target=look)
            looker.start()
            looker.join(LONGEST_S)
        return number

    async def relays(inlet: Inlet[int], out: Outlet[int]) -> None:
        async for number in inlet:
            await out.send(holds(number))

    graph = row(capacity=1, output="out", numbers=numbers, holds=relays if is_async else holds)
    async with graph.run(stall_after=None) as run:
        for _ in range(5):
            await run["out"].receive()
    assert f": holds {doing} since 5." in texts[0]
    assert line_of(holds, "looker.join") in texts[0]


@pytest.mark.slow
async def test_a_reader_that_does_not_ask_is_no_stall() -> None:
    graph = row(numbers=numbers)
    graph.output("out", "numbers", capacity=2)
    async with graph.run(stall_after=None) as run:
        assert await run["out"].receive() == 0
        looking = Looking(run.doctor)
        assert looking.for_s(3600.0) == []
        assert run.diagnose().state == "caller works"
        assert await run["out"].receive() == 1


async def test_a_gate_that_does_not_open_is_named_with_what_it_waits_for() -> None:
    class Shut(Gate):
        def waits_for(self) -> Wait:
            return Wait("the trainer at tcp://there:1", "away", "has not come")

    nodes = {"counting": Ring(), "after": lambda number: number}
    graph = drawn("counting >gate after >> counting", gate=Shut(), outputs={"out": "after"}, **nodes)
    text = await stall_of(graph, "the trainer at tcp://there:1", "out")
    assert "the trainer at tcp://there:1 has not come since 5." in text
    assert "counting … after and caller wait" in text or "caller and counting … after wait for it" in text
    assert "do: start it, or look at its address and its log" in text


async def test_a_run_that_stands_still_is_ended_with_a_stall_error_where_that_is_asked_for() -> None:
    graph = row(output="out", source=once_and_never_again)
    with anyio.fail_after(LONGEST_S), pytest.raises(StallError, match="source is at work"):
        async with graph.run(stall_after=0.2, on_stall="raise") as run:
            await read_all(run, "out")
    assert not [thread for thread in threading.enumerate() if thread.name == "rollflow doctor"]


@pytest.mark.slow
async def test_nothing_is_said_of_a_run_that_flows(caplog: pytest.LogCaptureFixture) -> None:
    graph = row(output="out", numbers=numbers)
    with caplog.at_level(logging.DEBUG, "rollflow.doctor"):
        async with graph.run(stall_after=0.05) as run:
            async for _ in run["out"]:
                await anyio.sleep(0.01)  # the reader is slower than what a stall takes, all in all
    assert caplog.records == []
    assert str(run.diagnose()) == "it is not running"


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
