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
