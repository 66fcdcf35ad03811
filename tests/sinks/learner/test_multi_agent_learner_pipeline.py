from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from numbered_agents import NUM_ACTIONS, NumberedAgents

from rollflow import ConnectorV2, Graph, MultiAgentRollout, RLModule
from rollflow.sinks import MultiAgentLearnerPipeline

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


class Valued(Counting):
    """Its values are its weight."""

    def setup(self) -> None:
        self.weight = torch.nn.Parameter(torch.zeros(()))

    def compute_values(self, batch: dict[str, Any], embeddings: Any = None) -> torch.Tensor:
        return self.weight.expand(len(batch["obs"])).clone()


class AddValues(ConnectorV2):
    def __call__(self, *, rl_module: Any, batch: Any, episodes: Any, **kwargs: Any) -> Any:
        steps = sum(map(len, episodes))
        batch["values"] = [rl_module.compute_values({"obs": np.zeros(steps)}).detach().numpy()[0]] * steps
        return batch


async def test_pieces_see_what_was_published_and_not_what_is_being_trained() -> None:
    rollout = MultiAgentRollout(
        [partial(NumberedAgents, 0, nested=0)],
        module=Valued(),
        learner_connector=lambda obs, act: AddValues(),
        fragment_length=4,
        num_fragments=20,
        seed=2,
    )
    graph = Graph("learning")
    graph.add(rollout=rollout, learner=MultiAgentLearnerPipeline(rollout.learner))
    graph.connect("rollout.fragments", "learner", capacity=1)
    graph.output("batches", "learner", capacity=1)
    trained, seen = rollout.module["default_policy"], []
    async with graph.run() as run:
        async for batch in run["batches"]:
            seen += batch["default_policy"]["values"].unique().tolist()
            with torch.no_grad():
                trained.weight.fill_(100.0)  # in the middle of an update
                published = float(len(seen))
                rollout.publish({"default_policy": {"weight": torch.tensor(published)}})
    assert 100.0 not in seen
    assert seen == sorted(seen)
    assert seen[0] == 0.0
    assert seen[-1] >= 10.0


def test_a_module_that_keeps_what_can_not_be_copied_while_it_is_trained_is_shown_all_the_same() -> None:
    rollout = MultiAgentRollout(
        [partial(NumberedAgents, 0, nested=0)],
        module=Valued(),
        learner_connector=lambda obs, act: AddValues(),
        fragment_length=4,
        seed=2,
    )
    trained = rollout.module["default_policy"]
    trained.kept = trained.weight * 2
    with rollout:
        rollout.publish({"default_policy": {"weight": torch.tensor(3.0)}})
        batches = rollout.learner.batch_of([next(iter(rollout.fragments()))], as_published=True)
    assert batches["default_policy"]["values"].unique().tolist() == [3.0]


def test_a_rollout_is_no_learner() -> None:
    rollout: Any = rollout_of()
    with pytest.raises(ValueError, match=r"learner is a MultiAgentRollout, expected rollout\.learner"):
        MultiAgentLearnerPipeline(rollout)
    rollout.environments.close()
