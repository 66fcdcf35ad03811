"""Reports: the calls of every stage, wherever they are made, what hangs, and what is no longer the run's."""

import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
from graph_rows import once, row
from numbered_agents import NumberedAgents
from numbered_module import NumberedEnv, NumberedModule
from places import PLACES
from serial_module import SerialModule
from stalled_rollouts import await_bottleneck

from rollflow import MultiAgentRollout, Rollout
from rollflow.nodes.connectors.connector_v2 import ConnectorV2
from rollflow.stream import Report
from rollflow.stream.graph.meter import CallTimes


class Slow(ConnectorV2):
    """A piece that takes longer than all others, and changes nothing."""

    size = 100_000

    def __call__(self, *, batch: dict[str, Any], **_: Any) -> dict[str, Any]:
        sum(range(self.size))
        return batch


@pytest.mark.parametrize("place", ["inline", "threads", "processes", "processes apart", "rollouts"])
@pytest.mark.parametrize("kind", [Rollout, MultiAgentRollout])
def test_a_report_has_the_calls_of_each_stage_and_the_slowest_piece(kind: Any, place: str) -> None:
    options: dict[str, Any] = {"module": NumberedModule() if kind is Rollout else SerialModule(), "lanes": 2}
    options |= {"fragment_length": 8, "num_fragments": 3, "seed": 0, **({"lanes": None} if "apart" in place else {})}
    pieces: dict[str, Any] = {
        name: lambda *spaces: Slow() for name in ("env_to_module_connector", "module_to_env_connector")
    }
    env: Any = NumberedEnv if kind is Rollout else partial(NumberedAgents, nested=0)
    envs, learnt = [partial(env, number) for number in range(4)], Slow()
    learnt.size = 3_000_000  # it is called three times: what another piece does at first must not outlast it
    with kind(envs, learner_connector=lambda *spaces: learnt, **options, **pieces, **PLACES[place]) as rollout:
        assert len(list(rollout.batches())) == 3
        report = rollout.report()
    nodes = {node.name: node for node in report.nodes}
    for name in ("env", "env_to_module", "module", "module_to_env", "learner_pipeline", "caller"):
        calls = nodes[name].calls
        assert calls is not None, name
        assert 0 < calls.p50_s <= calls.p99_s <= calls.longest_s, name
    for name in ("env_to_module", "module_to_env", "learner_pipeline"):
        assert nodes[name].slowest_piece == "Slow"
        assert f"{nodes[name].slowest_piece}\n" in str(report)


def test_percentiles_are_of_the_last_calls_and_the_longest_is_of_all() -> None:
    calls = CallTimes()
    assert calls.read() is None
    for took in [10**9, *range(1000, 3000)]:
        calls.add(took)
    assert calls.read() == ((3000 - 1024 + 511) / 1e9, (3000 - 1024 + 1012) / 1e9, 1.0)


@pytest.mark.anyio
async def test_a_synchronous_node_that_hangs_holds_a_graph_on_an_event_loop_back() -> None:
    reports: list[Report] = []

    def slow(item: int) -> None:
        # The loop's own thread is at work here: whoever asks is another one.
        with ThreadPoolExecutor(1) as pool:
            reports.append(pool.submit(await_bottleneck, run.report, "slow").result())

    async with row(source=once, slow=slow, capacity=1).run() as run:
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


@pytest.mark.parametrize("place", ["inline", "ahead"])
def test_a_reader_that_finds_the_counts_ended_is_not_busy(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with Rollout([partial(NumberedEnv, 0)], fragment_length=4, module=NumberedModule(), **PLACES[place]) as rollout:
        drive: Any = rollout._drive
        awaited, counters = drive._await, drive.run.counters

        def await_and_end() -> None:
            awaited()
            counters.end()  # as `close` does in another thread

        monkeypatch.setattr(drive, "_await", await_and_end)
        next(rollout.fragments())
        assert counters.caller.items == 1
        before = counters.caller.read()
        assert counters.caller.read() == before


@pytest.mark.anyio
async def test_what_a_reader_does_after_the_last_item_is_not_the_graphs() -> None:
    async with row(source=once, output="out").run() as run:
        assert [item async for item in run["out"]] == [1]
        [before] = [node.busy_s for node in run.report().nodes if node.name == "caller"]
        now = time.perf_counter()
        while time.perf_counter() < now + 0.05:
            pass
        [after] = [node.busy_s for node in run.report().nodes if node.name == "caller"]
    assert after == before
