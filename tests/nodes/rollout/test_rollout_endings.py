"""However an asynchronous rollout ends, none of its tasks goes on, and every environment is closed."""

from typing import Any

import anyio
import pytest
from numbered_module import NumberedModule, numbered_envs
from raising_env import Breaks

from rollflow.nodes import Rollout
from rollflow.sinks import LearnerPipeline
from rollflow.stream import Graph

pytestmark = pytest.mark.anyio


WAYS: dict[str, dict[str, Any]] = {
    "inline": {},
    "ahead": {"prefetch": 2},
    "gathering": {"lanes": 3, "max_batch": 6},
    "thread": {"lanes": 2, "forward_in_thread": True},
}


async def read(rollout: Rollout, ending: str, scope: anyio.CancelScope) -> None:
    graph = Graph("endings")
    graph.add(rollout=rollout, learner=LearnerPipeline(rollout.learner_pipeline, rollout.module))
    graph.connect("rollout.fragments", "learner", capacity=2)
    graph.output("batches", "learner")
    async with graph.run() as run:
        number = 0
        async for _ in run["batches"]:
            number += 1
            if number == 3 and ending == "left":
                return
            if number == 3 and ending == "cancelled":
                scope.cancel()
            if number == 3 and ending == "drained":
                run.stop()


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("ending", ["left", "cancelled", "failed", "drained", "ended"])
async def test_no_task_is_left_and_every_environment_is_closed(way: dict[str, Any], ending: str) -> None:
    envs, makers = numbered_envs(6)
    options = {**way, "num_fragments": 4 if ending == "ended" else None}
    if ending == "failed":
        options["env_to_module_connector"] = lambda env: Breaks()
    rollout = Rollout(makers, module=NumberedModule(), fragment_length=5, seed=0, **options)
    before = {task.id for task in anyio.get_running_tasks()}
    with anyio.CancelScope() as scope:
        if ending == "failed":
            with pytest.raises(ZeroDivisionError, match="no more"):
                await read(rollout, ending, scope)
        else:
            await read(rollout, ending, scope)
    assert scope.cancelled_caught == (ending == "cancelled")
    assert {task.id for task in anyio.get_running_tasks()} == before
    assert all(env.closed for env in envs)
