"""The stall doctor names a trainer that does not come, and says nothing of one that is there and takes its time."""

import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anyio
import anyio.to_thread
import pytest
from doctor_clock import Looking
from feeding_rollouts import SHORT, trainer
from numbered_module import NumberedEnv, NumberedModule

from rollflow.nodes import Rollout
from rollflow.sinks import TrainerSink, feed
from rollflow.stream import Graph, Run, StallError

LONGEST_S = 60.0


def numbered(**options: Any) -> Rollout:
    return Rollout(lambda: NumberedEnv(0), module=NumberedModule(), fragment_length=8, seed=0, **options)


def graph_to(address: str) -> Graph:
    graph = Graph("feed")
    graph.connect(numbered().fragments, TrainerSink(address, limits=SHORT))
    return graph


async def run_until_over(graph: Graph, runs: list[Run], is_over: threading.Event) -> None:
    async with graph.run(stall_after=None) as run:
        runs.append(run)
        await anyio.to_thread.run_sync(is_over.wait, LONGEST_S)


def await_blocker(run: Run, party: str, kind: str) -> None:
    until = time.monotonic() + LONGEST_S
    while (blocker := run.diagnose().blocker) is None or (blocker.party, blocker.kind) != (party, kind):
        assert time.monotonic() < until, str(run.diagnose())
        time.sleep(0.01)


def looked_at(graph: Graph, party: str, kind: str, seconds: float) -> list[str]:
    """Texts of so many seconds of looks, once a party is what the run waits for, and is of that kind."""
    runs: list[Run] = []
    is_over = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        ended = pool.submit(anyio.run, run_until_over, graph, runs, is_over)
        try:
            until = time.monotonic() + LONGEST_S
            while not runs:
                assert time.monotonic() < until
                time.sleep(0.01)
            await_blocker(runs[0], party, kind)
            return Looking(runs[0].doctor).for_s(seconds)
        finally:
            is_over.set()
            ended.result()


def test_a_trainer_that_does_not_come_is_named() -> None:
    address = "tcp://127.0.0.1:9"
    texts = looked_at(graph_to(address), f"the trainer at {address}", "away", 6.0)
    assert len(texts) == 1
    lines = texts[0].splitlines()
    assert re.match(rf"no item for 5\.\d s: the trainer at {address} has not come.* since 5\.\d s; ", lines[0]), lines
    assert lines[-1].startswith("do: start the trainer, or look at its address and its log; see docs/")


def test_a_trainer_that_takes_its_time_is_no_stall() -> None:
    with trainer(yields="fragments", prefetch=1) as stream:
        with ThreadPoolExecutor(1) as pool:
            first = pool.submit(next, iter(stream))
            address = str(stream.address)
            texts = looked_at(graph_to(address), f"the trainer at {address}", "holds back", 600.0)
            assert first.result().num_steps == 8
    assert texts == []


def test_a_feed_follows_the_rollouts_own_rules() -> None:
    rollout = numbered(stall_after=0.2, on_stall="raise")
    with pytest.raises(StallError, match=r"the trainer at tcp://127\.0\.0\.1:9 has not come"):
        feed(rollout, "tcp://127.0.0.1:9", limits=SHORT)
