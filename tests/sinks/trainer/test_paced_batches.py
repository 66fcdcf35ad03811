"""Train batches that are made where the rollout is are no older than the bound, and nothing is thrown away."""

from functools import partial

import pytest
import torch
from drawn_agents import Drawn, made
from feeding_rollouts import SHORT, fed, running, trainer, weights
from hypothesis import Phase, given, settings, strategies as st
from numbered_module import NumberedEnv, NumberedModule
from property_examples import examples
from remote_rollouts import await_that

from rollflow import Columns, Graph, MultiAgentRollout, Rollout, TrainerStream
from rollflow.sinks import LearnerPipeline, TrainerSink
from rollflow.stream import LagError, WireError

DRAWN = Drawn(3, 1, 4, 1, 9, at_once=False, fragment_length=8, lookback=1, by_episode=True, seed=11)


@settings(max_examples=examples(8), phases=[Phase.explicit, Phase.generate])
@given(max_lag=st.integers(0, 2), lanes=st.integers(1, 2), at_once=st.booleans(), seed=st.integers(0, 99))
def test_so_it_is_with_several_agents_but_for_actions_that_were_pending(
    max_lag: int, lanes: int, at_once: bool, seed: int
) -> None:
    _, rollout = made(DRAWN._replace(lanes=lanes, at_once=at_once, seed=seed), num_fragments=8)
    stream = trainer(max_lag=max_lag, on_excess="pace")
    with fed(stream, rollout):
        steps = masked = 0
        for batches in stream:
            for batch in batches.values():
                is_young = batch[Columns.POLICY_VERSION] >= stream.version - max_lag
                assert torch.equal(batch[Columns.LOSS_MASK], is_young)
                masked += int((~is_young).sum())
                steps += len(is_young)
            publish_next(stream, rollout)
    assert steps == rollout.num_steps
    assert stream.lost == ({"masked": masked} if masked else {})
    assert not (at_once and masked)


def test_of_several_agents_as_well_it_is_said_that_weights_are_published_too_often() -> None:
    _, rollout = made(DRAWN._replace(at_once=True))
    stream = trainer(max_lag=0, on_excess="pace")
    with fed(stream, rollout):
        batches = iter(stream)
        next(batches)
        stream._begin_next()
        await_that(lambda: stream._listener.arrived)
        for _ in range(2):
            publish_next(stream, rollout)
        with pytest.raises(
            LagError, match="is 2 policy versions old, expected at most max_lag=0: publish at most once"
        ):
            next(batches)


def publish_next(stream: TrainerStream, rollout: MultiAgentRollout) -> None:
    stream.publish({module_id: weights(stream.version + 1.0) for module_id in rollout.module})


def test_where_fragments_may_be_dropped_none_is_waited_for_in_vain() -> None:
    rollout = Rollout([partial(NumberedEnv, 0)], module=NumberedModule(), fragment_length=8, num_fragments=4)
    with trainer(max_lag=0, on_excess="pace", join_timeout=20.0) as stream:
        sink, graph = TrainerSink(str(stream.address), limits=SHORT), Graph("feed")
        graph.connect(rollout.fragments, sink, capacity=1, overflow="drop_oldest")
        with pytest.raises(WireError, match="expected no edge that drops"), running(graph, rollout, sink) as feed:
            stream._begin_next()
            feed.ended.result(60)


def test_a_rollout_whose_batches_somebody_else_makes_is_refused() -> None:
    rollout = Rollout([partial(NumberedEnv, 0)], module=NumberedModule(), fragment_length=8, num_fragments=4)
    with trainer(max_lag=0, on_excess="pace", join_timeout=20.0) as stream:
        sink = TrainerSink(str(stream.address), rollout, sends="batches", limits=SHORT)
        graph = Graph("feed")
        graph.add(
            rollout=rollout,
            learner=LearnerPipeline(rollout.learner_pipeline, rollout.module),
            mine=lambda batches: batches,
            trainer=sink,
        )
        graph.connect("rollout.fragments", "learner")
        graph.connect("learner", "mine")
        graph.connect("mine", "trainer")
        with pytest.raises(
            WireError, match="a LearnerPipeline alone between the rollout and a sink that sends batches"
        ):
            with running(graph, rollout, sink) as feed:
                stream._begin_next()
                feed.ended.result(60)
