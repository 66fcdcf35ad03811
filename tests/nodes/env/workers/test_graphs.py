"""Rollouts in threads and processes as nodes of a graph, and in an event loop."""

from functools import partial
from typing import Any

import anyio
import pytest
from leftovers import processes_of
from numbered_module import NumberedEnv, NumberedModule

from rollflow import Graph, Rollout
from rollflow.sinks import LearnerPipeline

PLACES = ["threads", "processes", "rollouts"]


def made(where: Any, **options: Any) -> Rollout:
    makers = [partial(NumberedEnv, slot) for slot in range(4)]
    return Rollout(makers, lanes=2, where=where, module=NumberedModule(), fragment_length=5, seed=0, **options)


@pytest.mark.parametrize(
    ("where", "backend"),
    [("threads", "asyncio"), ("processes", "trio"), ("rollouts", "asyncio")],
)
def test_a_drained_graph_hands_on_every_step(where: str, backend: str) -> None:
    before = processes_of()
    rollout = made(where)
    graph = Graph("ppo")
    graph.add(rollout=rollout, learner=LearnerPipeline(rollout.learner_pipeline, rollout.module))
    graph.connect("rollout.fragments", "learner", capacity=2)
    graph.output("batches", "learner.batches", capacity=2)

    async def run_through() -> int:
        steps = batches = 0
        async with graph.run() as run:
            async for batch in run["batches"]:
                steps += len(batch["obs"])
                batches += 1
                if batches == 5:
                    run.stop()
        return steps

    assert anyio.run(run_through, backend=backend) == rollout.num_steps
    assert rollout.lost == {}
    assert processes_of() <= before


@pytest.mark.parametrize("where", PLACES)
def test_an_error_in_an_event_loop_leaves_nothing_behind(where: str) -> None:
    async def broken() -> None:
        async with made(where, prefetch=1) as rollout:
            async for _ in rollout.batches():
                raise ZeroDivisionError

    before = processes_of()
    with pytest.raises(ZeroDivisionError):
        anyio.run(broken)
    assert processes_of() <= before
