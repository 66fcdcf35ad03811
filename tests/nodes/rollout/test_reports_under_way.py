"""`report()` names the stage whose call hangs."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from held_envs import LONGEST_S, Held, await_held, let_go
from numbered_module import NumberedEnv, NumberedModule
from remote_hosts import hosting, listening
from remote_rollouts import rollouts_on

from rollflow import Graph, RemoteEnvs, RemoteRollouts, Rollout
from rollflow.stream import Outlet, Report

ANYWHERE: dict[str, dict[str, Any]] = {
    "inline": {},
    "ahead": {"prefetch": 1},
    "threads": {"where": "threads"},
    "forward in a thread": {"where": "threads", "forward_in_thread": True},
    "processes": {"where": "processes", "workers": 1},
    "rollouts": {"where": "rollouts", "workers": 1},
}


def read(rollout: Rollout) -> None:
    with rollout:
        for _ in rollout.fragments():
            pass


@contextmanager
def being_read(rollout: Rollout, let_all_go: Callable[[], None]) -> Iterator[None]:
    """Have another thread read the rollout, whose last fragments are made when all is let go."""
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read, rollout)
        try:
            yield
        finally:
            let_all_go()
        reading.result()


def await_bottleneck(report: Callable[[], Report], name: str) -> Report:
    """The first report that says that a stage holds all others back."""
    until = time.monotonic() + LONGEST_S
    while (told := report()).bottleneck != name:
        assert time.monotonic() < until, str(told)
        time.sleep(0.01)
    return told


@pytest.mark.parametrize("place", ANYWHERE)
@pytest.mark.parametrize("held", [{"steps": [3]}, {"resets": [0]}], ids=["step", "first reset"])
def test_an_environment_that_hangs_is_what_holds_all_others_back(
    place: str, held: dict[str, Any], tmp_path: Path
) -> None:
    env = partial(Held, 0, tmp_path, lengths=(50, 50), **held)
    options: Any = {"module": NumberedModule(), "fragment_length": 8, "num_fragments": 1, "seed": 0}
    rollout = Rollout(env, num_envs=1, **options, **ANYWHERE[place])
    with being_read(rollout, lambda: let_go(tmp_path, 0)):
        await_held(tmp_path, 0)
        report = await_bottleneck(rollout.report, "env")
        assert "held back by env" in str(report)


class HeldModule(NumberedModule):
    """Hangs in its third forward pass."""

    passes = 0
    hangs, goes = threading.Event(), threading.Event()

    def __deepcopy__(self, memo: Any) -> "HeldModule":
        return self

    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        self.passes += 1
        if self.passes == 3:
            self.hangs.set()
            assert self.goes.wait(LONGEST_S)
        return super()._forward(batch, **kwargs)


@pytest.mark.parametrize("place", ["inline", "ahead", "threads", "forward in a thread"])
def test_a_forward_pass_that_hangs_is_what_holds_all_others_back(place: str) -> None:
    env = NumberedEnv(0)
    module = HeldModule(env.observation_space, env.action_space)
    module.hangs, module.goes = threading.Event(), threading.Event()
    options: Any = {"module": module, "flat_forward": False, "fragment_length": 8, "num_fragments": 1, "seed": 0}
    rollout = Rollout([lambda: env], **options, **ANYWHERE[place])
    with being_read(rollout, module.goes.set):
        assert module.hangs.wait(LONGEST_S)
        await_bottleneck(rollout.report, "module")


@pytest.mark.parametrize(
    ("kind", "on", "stage"), [(RemoteEnvs, hosting, "env"), (RemoteRollouts, rollouts_on, "rollouts")]
)
def test_what_hangs_on_a_host_is_what_holds_all_others_back(kind: Any, on: Any, stage: str, tmp_path: Path) -> None:
    remote = listening(kind)
    with on(remote.addresses[0], [partial(Held, 0, tmp_path, steps=[3])]):
        rollout = Rollout(remote, module=NumberedModule(), fragment_length=8, num_fragments=1, seed=0)
        with being_read(rollout, lambda: let_go(tmp_path, 0)):
            await_held(tmp_path, 0)
            await_bottleneck(rollout.report, stage)


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
    with Rollout([partial(NumberedEnv, 0)], **options, **ANYWHERE[place]) as rollout:
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
