"""Rollouts in threads and processes as nodes of a graph, and in an event loop."""

from functools import partial
from typing import Any

import anyio
import pytest
from leftovers import processes_of
from numbered_module import NumberedEnv, NumberedModule
from places import rollout_at

from rollflow import Graph
from rollflow.sinks import LearnerPipeline

PLACES = ["threads", "processes", "rollouts"]


def made(place: str, **options: Any) -> Any:
    """A rollout that has not begun, as long as its host is there."""
    makers = [partial(NumberedEnv, slot) for slot in range(4)]
    acts = {"module": NumberedModule()}
    return rollout_at(place, makers, acts=acts, envs={"lanes": 2}, fragment_length=5, seed=0, **options)


async def run_through(graph: Graph) -> int:
    """The steps in five batches of a graph, and in those that come when it is drained."""
    steps = batches = 0
    async with graph.run() as run:
        async for batch in run["batches"]:
            steps += len(batch["obs"])
            batches += 1
            if batches == 5:
                run.stop()
    return steps


@pytest.mark.parametrize(
    ("place", "backend"),
    [
        ("threads", "asyncio"),
        ("processes", "trio"),
        ("rollouts", "asyncio"),
        ("hosted rollouts", "asyncio"),
        ("hosted rollouts", "trio"),
    ],
)
def test_a_drained_graph_hands_on_every_step(place: str, backend: str) -> None:
    before = processes_of()
    with made(place) as rollout:
        graph = Graph("ppo")
        graph.add(rollout=rollout, learner=LearnerPipeline(rollout.learner_pipeline, rollout.module))
        graph.connect("rollout.fragments", "learner", capacity=2)
        graph.output("batches", "learner.batches", capacity=2)
        assert anyio.run(run_through, graph, backend=backend) == rollout.num_steps
    assert rollout.lost == {}
    assert processes_of() <= before


@pytest.mark.parametrize("where", PLACES)
def test_an_error_in_an_event_loop_leaves_nothing_behind(where: str) -> None:
    async def broken() -> None:
        with made(where, prefetch=1) as rollout:
            async with rollout:
                async for _ in rollout.batches():
                    raise ZeroDivisionError

    before = processes_of()
    with pytest.raises(ZeroDivisionError):
        anyio.run(broken)
    assert processes_of() <= before
