"""`report()` while a node of a graph hangs, and after the run."""

import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
from numbered_module import NumberedEnv, NumberedModule
from places import PLACES
from stalled_rollouts import await_bottleneck

from rollflow import Graph, Rollout
from rollflow.stream import Outlet, Report


@pytest.mark.anyio
async def test_a_synchronous_node_that_hangs_holds_a_graph_on_an_event_loop_back() -> None:
    reports: list[Report] = []

    def slow(item: int) -> None:
        # The loop's own thread is at work here: whoever asks is another one.
        with ThreadPoolExecutor(1) as pool:
            reports.append(pool.submit(await_bottleneck, run.report, "slow").result())

    async def source(numbers: Outlet[int]) -> None:
        await numbers.send(1)

    graph = Graph("slow")
    graph.add(source=source, slow=slow)
    graph.connect("source", "slow", capacity=1)
    async with graph.run() as run:
        await run.wait()
    assert [report.bottleneck for report in reports] == ["slow"]


@pytest.mark.parametrize("place", ["inline", "ahead", "threads", "processes", "rollouts"])
def test_what_a_reader_does_after_the_last_batch_is_not_the_runs(place: str) -> None:
    options: dict[str, Any] = {"num_fragments": 2, "fragment_length": 4, "module": NumberedModule()}
    with Rollout([partial(NumberedEnv, 0)], **options, **PLACES[place]) as rollout:
        assert len(list(rollout.batches())) == 2
        before = rollout.report()
        now = time.perf_counter()
        while time.perf_counter() < now + 0.05:
            pass
        after = rollout.report()
        assert {node.name: node.busy_s for node in after.nodes} == {node.name: node.busy_s for node in before.nodes}
        told = str(rollout.diagnose())
        assert told.startswith(("it is not running", "the caller works: it has had its fragment for 0.0 s"))


@pytest.mark.anyio
async def test_what_a_reader_does_after_the_last_item_is_not_the_graphs() -> None:
    async def source(numbers: Outlet[int]) -> None:
        await numbers.send(1)

    graph = Graph("short")
    graph.add(source=source)
    graph.output("out", "source")
    async with graph.run() as run:
        assert [item async for item in run["out"]] == [1]
        [before] = [node.busy_s for node in run.report().nodes if node.name == "caller"]
        now = time.perf_counter()
        while time.perf_counter() < now + 0.05:
            pass
        [after] = [node.busy_s for node in run.report().nodes if node.name == "caller"]
    assert after == before
