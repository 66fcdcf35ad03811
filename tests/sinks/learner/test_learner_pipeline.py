import threading
from typing import Any

import pytest
import torch
from numbered_module import NumberedModule, numbered_envs

from rollflow import ConnectorV2, Graph, Rollout
from rollflow.nodes.modules.policy_weights import PolicyWeights
from rollflow.nodes.stages.staleness import LagBound
from rollflow.sinks import LearnerPipeline

pytestmark = pytest.mark.anyio


class Thread(ConnectorV2):
    """Remembers which threads called it."""

    def __init__(self) -> None:
        super().__init__()
        self.threads: set[int] = set()

    def __call__(self, *, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        self.threads.add(threading.get_ident())
        return batch


def drawn(rollout: Rollout, **kwargs: Any) -> Graph:
    graph = Graph("learning")
    graph.add(rollout=rollout, learner=LearnerPipeline(rollout.learner_pipeline, rollout.module, **kwargs))
    graph.connect("rollout.fragments", "learner", capacity=2)
    graph.output("batches", "learner")
    return graph


async def test_batches_are_made_off_the_rollouts_thread_and_hold_every_transition() -> None:
    envs, makers = numbered_envs(5)
    piece = Thread()
    rollout = Rollout(
        makers,
        module=NumberedModule(),
        fragment_length=6,
        lanes=2,
        seed=0,
        num_fragments=5,
        learner_connector=lambda obs, act: piece,
    )
    async with drawn(rollout).run() as run:
        batches = [batch async for batch in run["batches"]]
    assert threading.get_ident() not in piece.threads
    assert len(batches) == 10
    rewards = torch.cat([batch["rewards"] for batch in batches])
    assert sorted(rewards.tolist()) == sorted(entry[3] for env in envs for entry in env.log)


async def test_several_fragments_make_one_batch_and_the_last_may_be_of_fewer() -> None:
    _, makers = numbered_envs(4)
    rollout = Rollout(makers, module=NumberedModule(), fragment_length=6, seed=0, num_fragments=5)
    async with drawn(rollout, fragments_per_batch=2).run() as run:
        sizes = [len(batch["obs"]) async for batch in run["batches"]]
    assert sizes == [48, 48, 24]


async def test_fragments_that_are_too_old_are_left_out() -> None:
    _, makers = numbered_envs(4)
    rollout = Rollout(makers, module=NumberedModule(), fragment_length=6, seed=0, num_fragments=4)
    weights = PolicyWeights(rollout.module)
    weights.publish(rollout.module.state_dict())
    lag = LagBound(lambda: {"": weights.version}, 0)
    async with drawn(rollout, lag=lag).run() as run:
        assert [batch async for batch in run["batches"]] == []
    assert (lag.dropped_fragments, lag.dropped_steps) == (4, 96)


async def test_a_learner_that_fails_ends_the_run_by_name() -> None:
    class Breaks(ConnectorV2):
        def __call__(self, **kwargs: Any) -> Any:
            raise OSError("disk full")

    envs, makers = numbered_envs(4)
    rollout = Rollout(makers, module=NumberedModule(), seed=0, learner_connector=lambda obs, act: Breaks())
    with pytest.raises(OSError, match="disk full") as raised:
        async with drawn(rollout).run() as run:
            async for _ in run["batches"]:
                pass
    assert raised.value.__notes__ == [
        "in connector piece 'Breaks' (1 of 5 in LearnerConnectorPipeline)",
        "in the train batch of lane 0, vector steps 0 to 128",
        "in node 'learner'",
    ]
    assert envs[0].closed
