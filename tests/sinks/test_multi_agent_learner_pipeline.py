from functools import partial
from typing import Any

import numpy as np
import pytest
from numbered_agents import NUM_ACTIONS, NumberedAgents

from rollflow.nodes import MultiAgentRollout, RLModule
from rollflow.sinks import MultiAgentLearnerPipeline
from rollflow.stream import Graph

pytestmark = pytest.mark.anyio


class Counting(RLModule):
    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        return {"actions": batch["obs"].sum(1) % NUM_ACTIONS}


def rollout_of(**options: Any) -> MultiAgentRollout:
    return MultiAgentRollout(
        [partial(NumberedAgents, env, nested=0) for env in range(3)],
        module={"a": Counting(), "b": Counting()},
        agent_to_module_mapping_fn={f"agent {number}": "ab"[number % 2] for number in range(4)},
        fragment_length=6,
        num_fragments=5,
        seed=2,
        **options,
    )


async def test_batches_of_a_graph_are_those_of_the_loop() -> None:
    async with rollout_of() as rollout:
        expected = [batch async for batch in rollout.batches()]
    rollout = rollout_of()
    graph = Graph("learning")
    graph.add(rollout=rollout, learner=MultiAgentLearnerPipeline(rollout.learner, lag=rollout.lag))
    graph.connect("rollout.fragments", "learner", capacity=2)
    graph.output("batches", "learner")
    async with graph.run() as run:
        batches = [batch async for batch in run["batches"]]
    assert len(batches) == len(expected) == 5
    for ours, theirs in zip(batches, expected, strict=True):
        assert ours.keys() == theirs.keys()
        for module_id, columns in ours.items():
            for name, column in columns.items():
                np.testing.assert_array_equal(column, theirs[module_id][name])


async def test_a_batch_may_be_of_several_fragments_and_of_one_module() -> None:
    rollout = rollout_of(modules_to_train=["b"])
    graph = Graph("learning")
    graph.add(rollout=rollout, learner=MultiAgentLearnerPipeline(rollout.learner, fragments_per_batch=2))
    graph.connect("rollout.fragments", "learner", capacity=2)
    graph.output("batches", "learner")
    async with graph.run() as run:
        batches = [batch async for batch in run["batches"]]
    assert [list(batch) for batch in batches] == [["b"]] * 3
