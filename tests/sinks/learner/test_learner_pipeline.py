"""Learner pipelines as nodes of a graph, of one agent and of several."""

import threading
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from numbered_agents import NUM_ACTIONS, NumberedAgents
from numbered_module import NumberedModule, numbered_envs
from piece_forms import Breaks
from ways import graph_with

from rollflow import MultiAgentRollout, RLModule, Rollout
from rollflow.nodes import LambdaConnector
from rollflow.nodes.modules.policy_weights import PolicyWeights
from rollflow.nodes.stages.rounds import LagBound
from rollflow.sinks import MultiAgentLearnerPipeline
from rollflow.stream.testing import check

pytestmark = pytest.mark.anyio


async def batches_of(rollout: Any, **options: Any) -> list[Any]:
    """All batches of a rollout in a graph, by a learner pipeline."""
    async with graph_with(rollout, **options).run() as run:
        return [batch async for batch in run["batches"]]


def numbered_rollout(**options: Any) -> tuple[list[Any], Rollout]:
    envs, makers = numbered_envs(4)
    return envs, Rollout(makers, **{"module": NumberedModule(), "fragment_length": 6, "seed": 0, **options})


async def test_batches_are_made_off_the_rollouts_thread_and_hold_every_transition() -> None:
    called_in: list[int] = []
    piece = LambdaConnector(lambda: called_in.append(threading.get_ident()))
    envs, rollout = numbered_rollout(lanes=2, num_fragments=5, learner_connector=lambda obs, act: piece)
    batches = await batches_of(rollout)
    assert threading.get_ident() not in called_in
    assert len(batches) == 10
    rewards = torch.cat([batch["rewards"] for batch in batches])
    assert sorted(rewards.tolist()) == sorted(entry[3] for env in envs for entry in env.log)


async def test_several_fragments_make_one_batch_and_the_last_may_be_of_fewer() -> None:
    batches = await batches_of(numbered_rollout(num_fragments=5)[1], fragments_per_batch=2)
    assert [len(batch["obs"]) for batch in batches] == [48, 48, 24]
    batches = await batches_of(rollout_of(modules_to_train=["b"]), fragments_per_batch=2)
    assert [list(batch) for batch in batches] == [["b"]] * 3


async def test_fragments_that_are_too_old_are_left_out() -> None:
    _, rollout = numbered_rollout(num_fragments=4)
    weights = PolicyWeights(rollout.module)
    weights.publish(rollout.module.state_dict())
    lag = LagBound(lambda: {"": weights.version}, 0)
    assert await batches_of(rollout, lag=lag) == []
    assert (lag.dropped_fragments, lag.dropped_steps) == (4, 96)


async def test_a_learner_that_fails_ends_the_run_by_name() -> None:
    envs, rollout = numbered_rollout(fragment_length=128, learner_connector=lambda obs, act: Breaks(at=1))
    with pytest.raises(ZeroDivisionError, match="no more") as raised:
        await batches_of(rollout)
    assert raised.value.__notes__ == [
        "in connector piece 'Breaks' (1 of 5 in LearnerConnectorPipeline)",
        "in the train batch of lane 0, vector steps 0 to 128",
        "in node 'learner'",
    ]
    assert envs[0].closed


class Counting(RLModule):
    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        return {"actions": batch["obs"].sum(1) % NUM_ACTIONS}


def rollout_of(**options: Any) -> MultiAgentRollout:
    acts: Any = {"module": {"a": Counting(), "b": Counting()}}
    acts["agent_to_module_mapping_fn"] = {f"agent {number}": "ab"[number % 2] for number in range(4)}
    makers = [partial(NumberedAgents, env, nested=0) for env in range(3)]
    return MultiAgentRollout(makers, fragment_length=6, num_fragments=5, seed=2, **acts, **options)


async def test_batches_of_a_graph_are_those_of_the_loop() -> None:
    async with rollout_of() as rollout:
        expected = [batch async for batch in rollout.batches()]
    assert len(expected) == 5
    again = rollout_of()
    check(await batches_of(again, lag=again.lag), expected, atol=0.0)


class Valued(Counting):
    """Its values are its weight."""

    def setup(self) -> None:
        self.weight = torch.nn.Parameter(torch.zeros(()))

    def compute_values(self, batch: dict[str, Any], embeddings: Any = None) -> torch.Tensor:
        return self.weight.expand(len(batch["obs"])).clone()


def add_values(rl_module: Any, batch: Any, episodes: Any) -> None:
    steps = sum(map(len, episodes))
    batch["values"] = [rl_module.compute_values({"obs": np.zeros(steps)}).detach().numpy()[0]] * steps


def valued_rollout(**options: Any) -> MultiAgentRollout:
    options |= {"module": Valued(), "fragment_length": 4, "seed": 2}
    options["learner_connector"] = lambda obs, act: LambdaConnector(add_values)
    return MultiAgentRollout([partial(NumberedAgents, 0, nested=0)], **options)


async def test_pieces_see_what_was_published_and_not_what_is_being_trained() -> None:
    rollout = valued_rollout(num_fragments=20)
    trained, seen = rollout.module["default_policy"], []
    async with graph_with(rollout, capacity=1).run() as run:
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
    rollout = valued_rollout()
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
