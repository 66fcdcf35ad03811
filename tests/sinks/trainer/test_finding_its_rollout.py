"""A sink finds its rollout in the graph, wherever it stands, and in whatever order the graph is drawn."""

from functools import partial
from itertools import permutations
from typing import Any

import pytest
from feeding_rollouts import SHORT, in_lanes_order, running
from numbered_module import NumberedEnv, NumberedModule

from rollflow import Graph, Rollout, TrainerStream
from rollflow.sinks import LearnerPipeline, TrainerSink
from rollflow.stream import GraphError, Outlet
from rollflow.stream.fragments.fragment import Fragment


def numbered(**options: Any) -> Rollout:
    envs = [partial(NumberedEnv, slot) for slot in (0, 1)]
    return Rollout(envs, module=NumberedModule(), fragment_length=8, num_fragments=3, lanes=2, seed=0, **options)


def learner_of(rollout: Rollout) -> LearnerPipeline:
    return LearnerPipeline(rollout.learner_pipeline, rollout.module)


def passed_on(fragments: Fragment) -> Fragment:
    return fragments


def test_fragments_come_from_the_rollout_that_a_sink_is_connected_to(address: str) -> None:
    with TrainerStream(address, yields="fragments", limits=SHORT, join_timeout=60.0) as stream:
        rollout, sink = numbered(), TrainerSink(str(stream.address), limits=SHORT)
        graph = Graph("short")
        graph.connect(rollout.fragments, sink)
        assert list(graph.nodes)[-1] == "trainer_sink"
        assert "passes a gate" in graph.explain()
        with running(graph, rollout, sink):
            fragments = list(stream)
    told = [(fragment.lane, fragment.sequence) for fragment in in_lanes_order(fragments)]
    assert told == [(lane, sequence) for lane in (0, 1) for sequence in range(3)]
    assert sum(fragment.num_steps for fragment in fragments) == rollout.num_steps


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_it_is_found_behind_others_in_whatever_order_edges_are_drawn(order: tuple[int, ...]) -> None:
    rollout, sink = numbered(), TrainerSink("unix:/nowhere", sends="batches")
    graph = Graph("behind")
    graph.add(rollout=rollout, pass_on=passed_on, learner=learner_of(rollout), trainer=sink)
    edges = [("rollout.fragments", "pass_on"), ("pass_on", "learner"), ("learner", "trainer")]
    for number in order:
        graph.connect(*edges[number])
    graph.validate()
    assert sink._rollout_end.rollout is rollout
    assert "rollout/seen_0" in graph.nodes
    assert graph.explain().count("passes a gate") == 1
    sink.close()
    rollout.environments.close()


def test_it_is_found_in_a_graph_within_a_graph() -> None:
    rollout, sink = numbered(), TrainerSink("unix:/nowhere")
    sources, sinks, whole = Graph("sources"), Graph("sinks"), Graph("whole")
    sources.add(rollout=rollout)
    sources.output("made", "rollout.fragments")
    sinks.add(trainer=sink)
    sinks.input("taken", "trainer")
    whole.add(sources=sources, sinks=sinks)
    whole.connect("sources", "sinks")
    whole.validate()
    assert sink._rollout_end.rollout is rollout
    assert "passes a gate" in whole.explain()
    sink.close()
    rollout.environments.close()


def test_where_no_rollout_leads_to_a_sink_the_graph_is_refused() -> None:
    async def source(out: Outlet[Fragment]) -> None:
        raise AssertionError

    sink = TrainerSink("unix:/nowhere")
    graph = Graph("none")
    graph.add(source=source, trainer=sink)
    graph.connect("source", "trainer")
    with pytest.raises(
        GraphError, match="no rollout leads to the TrainerSink to unix:/nowhere, but function; exp"
    ) as e:
        graph.validate()
    assert "in node 'trainer'" in e.value.__notes__
    sink.close()


def test_two_rollouts_for_one_sink_are_refused_where_the_second_is_connected() -> None:
    rollouts, sink = [numbered(), numbered()], TrainerSink("unix:/nowhere")
    graph = Graph("two")
    graph.connect(rollouts[0].fragments, sink)
    with pytest.raises(GraphError, match="2 rollouts lead to the TrainerSink to unix:/nowhere, expected one") as raised:
        graph.connect(rollouts[1].fragments, sink)
    assert "in node 'trainer_sink'" in raised.value.__notes__
    assert not any(edge.source[0].startswith("rollout_2/") and edge.target[0] == "trainer_sink" for edge in graph.edges)
    another = Graph("another")
    with pytest.raises(GraphError, match="the TrainerSink to unix:/nowhere has another rollout by now, expected a sin"):
        another.connect(rollouts[1].fragments, sink)
    sink.close()
    for rollout in rollouts:
        rollout.environments.close()


def test_a_rollout_that_runs_is_found_too_late() -> None:
    with numbered() as rollout:
        next(iter(rollout.fragments()))
        with pytest.raises(GraphError, match="the rollout runs already; expected a sink that holds it back"):
            Graph("late").connect(rollout.fragments, TrainerSink("unix:/nowhere"))


def test_a_rollout_that_was_given_is_not_looked_for() -> None:
    rollout = numbered()
    sink = TrainerSink("unix:/nowhere", rollout)
    graph = Graph("given")
    graph.connect(rollout.fragments, sink)
    graph.validate()
    assert graph.explain().count("passes a gate") == 1
    sink.close()
    rollout.environments.close()
