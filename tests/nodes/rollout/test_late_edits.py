"""Edits of connector pipelines that come too late: refused while a rollout runs."""

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from graph_rows import row
from numbered_agents import numbered_agents
from numbered_module import NumberedEnv, NumberedModule
from piece_forms import Breaks, OneByOne

from rollflow import MultiAgentRollout, Rollout
from rollflow.nodes import ConnectorPipelineV2, LambdaConnector, LearnerConnectorPipeline
from rollflow.sinks import LearnerPipeline
from rollflow.stream import ConnectorError, RunError

TOLD = "is edited while it is in use by a rollout that runs, .*; expected the edit before the run, or pieces by a conn"


def made(**options: Any) -> Rollout:
    makers = [partial(NumberedEnv, slot) for slot in range(2)]
    return Rollout(makers, module=NumberedModule(), fragment_length=4, num_fragments=2, seed=0, **options)


def of_agents(**options: Any) -> MultiAgentRollout:
    _, envs = numbered_agents(1, agents=2, nested=0)
    return MultiAgentRollout(
        envs, joint_connector=lambda envs: OneByOne(), fragment_length=4, num_fragments=2, seed=0, **options
    )


def edits_of(pipeline: ConnectorPipelineV2) -> Iterator[Callable[[], Any]]:
    first = pipeline.names[0]
    yield partial(pipeline.prepend, OneByOne())
    yield partial(pipeline.append, OneByOne())
    yield partial(pipeline.insert_before, first, OneByOne())
    yield partial(pipeline.insert_after, first, OneByOne())
    yield partial(pipeline.remove, first)


def check_refused(*pipelines: ConnectorPipelineV2) -> None:
    for pipeline in pipelines:
        names = pipeline.names
        for edit in edits_of(pipeline):
            with pytest.raises(ConnectorError, match=f"{pipeline.name} {TOLD}"):
                edit()
        assert pipeline.names == names


def check_taken(*pipelines: ConnectorPipelineV2) -> None:
    for pipeline in pipelines:
        count = len(pipeline)
        for edit in edits_of(pipeline):
            edit()
        assert len(pipeline) == count + 3


def all_of(rollout: Any) -> list[ConnectorPipelineV2]:
    if isinstance(rollout, Rollout):
        return [rollout.env_to_module, rollout.module_to_env, rollout.learner_pipeline]
    learning = [rollout.learner.pipeline_of(module_id) for module_id in rollout.module]
    return [rollout.joint.pipeline, *rollout.env_to_module, *rollout.module_to_env, *learning]


WAYS: dict[str, Callable[[], Any]] = {
    "inline": made,
    "prefetch": partial(made, prefetch=1),
    "threads": partial(made, where="threads"),
    "processes": partial(made, where="processes", workers=1, lanes=1),
    "rollouts": partial(made, where="rollouts", workers=1, lanes=1),
    "several agents": of_agents,
    "several agents in threads": partial(of_agents, where="threads"),
    "several agents in processes": partial(of_agents, where="processes", workers=1),
}


@pytest.mark.parametrize("way", WAYS)
def test_an_edit_within_the_block_is_refused(way: str) -> None:
    with WAYS[way]() as rollout:
        check_refused(*all_of(rollout))
        with pytest.raises(RunError, match="their lookback stays as it is"):
            rollout._make_lanes()
        for _ in rollout.batches():
            check_refused(*all_of(rollout))
    check_taken(*all_of(rollout))


@pytest.mark.anyio
@pytest.mark.parametrize("make", [made, of_agents])
async def test_an_edit_within_an_async_block_is_refused(make: Any) -> None:
    async with make() as rollout:
        check_refused(*all_of(rollout))
        async for _ in rollout.fragments():
            check_refused(*all_of(rollout))


@pytest.mark.anyio
@pytest.mark.parametrize("make", [made, of_agents])
async def test_an_edit_while_a_graph_runs_is_refused(make: Any) -> None:
    rollout = make()
    async with row(rollout=rollout, output="fragments").run() as run:
        await run["fragments"].receive()
        check_refused(*all_of(rollout))
    check_taken(*all_of(rollout)[:1])


@pytest.mark.anyio
async def test_an_edit_of_a_learner_pipeline_of_a_graph_is_refused_once_it_has_begun() -> None:
    rollout, pipeline = made(), LearnerConnectorPipeline.default()
    graph = row(rollout=rollout, learner=LearnerPipeline(pipeline, rollout.module), output="batches")
    pipeline.prepend(OneByOne())
    async with graph.run() as run:
        await run["batches"].receive()
        check_refused(pipeline)
    check_taken(pipeline)


@pytest.mark.parametrize("make", [made, of_agents])
def test_lanes_stand_until_they_are_to_be_others(make: Any) -> None:
    rollout = make()
    rollout.explain()  # of several agents there are none before
    changes: list[Callable[[], Any]] = [
        lambda: None,
        lambda: all_of(rollout)[-1].prepend(LambdaConnector(lambda batch: batch, lookback=9)),
        rollout.environments.share,
    ]
    for change, stands in zip(changes, (True, False, False), strict=True):
        [lane] = rollout.environments.lanes
        change()
        rollout.explain()
        assert (rollout.environments.lanes[0] is lane) == stands


def test_pipelines_within_are_refused_too_and_copies_are_not() -> None:
    inner = ConnectorPipelineV2(connectors=[OneByOne()])
    middle = ConnectorPipelineV2(connectors=[inner])
    with made(env_to_module_connector=lambda env: middle) as rollout:
        check_refused(inner, middle)
        check_taken(copy.deepcopy(rollout.learner_pipeline))
    check_taken(inner, middle)


def test_a_pipeline_taken_out_before_the_run_is_free() -> None:
    inner = ConnectorPipelineV2(connectors=[OneByOne()])
    rollout = made(env_to_module_connector=lambda env: inner)
    rollout.env_to_module.remove(ConnectorPipelineV2)
    with rollout:
        check_taken(inner)


def test_a_run_that_has_failed_refuses_nothing() -> None:
    rollout = made(env_to_module_connector=lambda env: Breaks(at=1))
    with pytest.raises(ZeroDivisionError), rollout:
        next(iter(rollout.fragments()))
    check_taken(*all_of(rollout))
