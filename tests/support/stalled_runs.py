"""Runs of graphs that stand still, in a thread of their own."""

import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import anyio
import anyio.to_thread
from doctor_clock import Looking
from held_envs import LONGEST_S, await_that

from rollflow import Graph
from rollflow.nodes.env.stepping import nothing
from rollflow.stream import Outlet
from rollflow.stream.graph.run import Run


async def numbers(out: Outlet[int]) -> None:
    for number in range(100):
        await out.send(number)


async def run_until_over(graph: Graph, runs: list[Run], is_over: threading.Event) -> None:
    async with graph.run(stall_after=None) as run:
        runs.append(run)
        await anyio.to_thread.run_sync(is_over.wait, LONGEST_S)


def await_blocker(run: Run, party: str, kind: str, says: str = "") -> None:
    """Wait until a run finally waits for a party, whose wait is of this kind and says what a pattern matches."""

    def is_there() -> bool:
        blocker = run.diagnose().blocker
        if blocker is None or (blocker.party, blocker.kind) != (party, kind):
            return False
        return re.match(says, blocker.doing) is not None

    await_that(is_there, run.diagnose)


@contextmanager
def running(
    graph: Graph, party: str, kind: str, says: str = "", end_fault: Callable[[], object] = nothing
) -> Iterator[Run]:
    """The run of a graph, once it waits for a party as `await_blocker` has it; at the end the fault is ended."""
    runs: list[Run] = []
    is_over = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        ended = pool.submit(anyio.run, run_until_over, graph, runs, is_over)
        try:
            await_that(lambda: runs)
            await_blocker(runs[0], party, kind, says)
            yield runs[0]
        finally:
            end_fault()
            is_over.set()
            ended.result()


async def read_all(run: Run, output: str) -> None:
    async for _ in run[output]:
        pass


async def stall_of(
    graph: Graph,
    party: str,
    reads: str = "",
    *,
    is_there: Callable[[], bool] = lambda: True,
    end_fault: Callable[[], object] | None = None,
) -> str:
    """What the doctor says of a run that finally waits for a party, 5 s of its clock later.

    reads        output that is read; "": there is none
    is_there     whether the fault is there by now
    end_fault    ends the fault, after which the run ends by itself; None: the run is cancelled
    """
    async with graph.run(stall_after=None) as run, anyio.create_task_group() as tasks:
        if reads:
            tasks.start_soon(read_all, run, reads)
        text = await looked_at(run, lambda looking: looking.until_told(6.0), party, is_there)
        if end_fault is None:
            tasks.cancel_scope.cancel()
        else:
            end_fault()
            await run.wait()
    return text


async def looked_at(
    run: Run, look: Callable[[Looking], str], party: str, is_there: Callable[[], bool] = lambda: True
) -> str:
    """What looks from a thread say, once a party is what the run waits for, and the fault is there."""

    def is_waited_for() -> bool:
        blocker = run.diagnose().blocker if is_there() else None
        return blocker is not None and blocker.party == party

    def wait_and_look() -> str:
        await_that(is_waited_for, run.diagnose)
        return look(Looking(run.doctor))

    return await anyio.to_thread.run_sync(wait_and_look)
