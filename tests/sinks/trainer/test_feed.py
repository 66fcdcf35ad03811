"""A rollout that feeds trainers: a sink finds it in the graph, wherever it stands, or a script runs it by `feed`."""

import gc
import json
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice, permutations
from pathlib import Path
from typing import Any

import pytest
from feeding_rollouts import SHORT, fed, graph_for_two, learner_of, rollout_of, running, sequences_of, trainer
from fragment_equality import in_time
from numbered_env import BreakingEnv, NumberedEnv
from remote_rollouts import await_that

from rollflow import Graph, Watch, feed
from rollflow.sinks import TrainerSink
from rollflow.stream import GraphError, Outlet
from rollflow.stream.data.errors import RunError, WireError
from rollflow.stream.fragments.fragment import Fragment


@pytest.mark.parametrize("ends", ["rollout", "trainer"])
def test_it_ends_with_whichever_end_comes_first(ends: str) -> None:
    rollout = rollout_of([0], num_fragments=3 if ends == "rollout" else None)
    with fed(trainer(yields="fragments"), rollout) as (stream, feeding):
        taken = [next(iter(stream))] if ends == "trainer" else list(stream)
        assert ends == "trainer" or feeding.result() is None
    assert ends == "rollout" or feeding.result() == "the trainer has ended"
    assert sequences_of(taken) == {0: [0] if ends == "trainer" else [0, 1, 2]}
    assert rollout.environments.is_closed


@pytest.mark.parametrize(
    ("env", "secret", "error", "told"),
    [
        (BreakingEnv, "open sesame", RuntimeError, "^it broke"),
        (NumberedEnv, "open barley", WireError, "^trainer tcp:.*: refuses: .*another secret"),
    ],
    ids=["an environment's", "the trainer's"],
)
def test_an_error_is_raised_as_it_is(env: Any, secret: str, error: Any, told: str) -> None:
    rollout = rollout_of([0], env=env)
    with ThreadPoolExecutor() as threads, trainer(secret="open sesame", join_timeout=0) as stream:
        with pytest.raises(RunError, match="0 of 1 rollouts came"):
            next(iter(stream))  # from now on it takes them in
        fed = threads.submit(feed, rollout, str(stream.address), secret=secret, limits=SHORT)
        with pytest.raises(error, match=told):
            fed.result()
    assert rollout.environments.is_closed


def test_what_the_rollout_logs_is_logged_while_it_feeds(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    rollout = rollout_of([0], num_fragments=3, log=f"jsonl:{path}", watch=Watch(log_every=3600.0))
    with fed(trainer(yields="fragments"), rollout) as (stream, _):
        assert len(list(stream)) == 3
    [row] = [json.loads(line) for line in path.read_text().splitlines()]
    assert (row["steps"], row["updates"]) == (rollout.num_steps, 3)
    assert {"busy/rollout/env", "busy/trainer"} <= row.keys()


def numbered() -> Any:
    return rollout_of((0, 1), num_fragments=3, lanes=2)


def passed_on(fragments: Fragment) -> Fragment:
    return fragments


def test_fragments_come_from_the_rollout_that_a_sink_is_connected_to(address: str) -> None:
    with trainer(address, yields="fragments") as stream:
        rollout, sink, graph = numbered(), TrainerSink(address, limits=SHORT), Graph("short")
        graph.connect(rollout.fragments, sink)
        assert list(graph.nodes)[-1] == "trainer_sink"
        assert "passes a gate" in graph.explain()
        with running(graph, rollout, sink):
            fragments = list(stream)
    assert sequences_of(in_time(fragments)) == {0: [0, 1, 2], 1: [0, 1, 2]}
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
    assert sink._rollout is rollout
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
    whole.add(sources=sources, sinks=sinks)
    whole.connect("sources", "sinks/trainer")
    whole.validate()
    assert sink._rollout is rollout
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
    told = "no rollout leads to the TrainerSink to unix:/nowhere, but function; exp"
    with pytest.raises(GraphError, match=told) as e:
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


def take(address: str, most: int | None = None) -> int:
    """Take fragments as a trainer until it leaves: a number of them, or all; their steps."""
    with trainer(address, yields="fragments") as stream:
        return sum(fragment.num_steps for fragment in islice(stream, most))


def test_where_all_have_left_they_are_waited_for(tmp_path: Path) -> None:
    graph, rollout, sinks = graph_for_two(rollout_of((0, 1), lanes=2, num_fragments=24), tmp_path)
    addresses = [f"unix:{tmp_path}/{name}" for name in ("one", "other")]
    with running(graph, rollout, sinks[0]), ThreadPoolExecutor() as pool:
        first = list(pool.map(partial(take, most=3), addresses))
        await_that(lambda: all(sink.goodbye is not None for sink in sinks))
        rest = list(pool.map(take, addresses))
    assert [sum(steps) for steps in zip(first, rest, strict=True)] == 2 * [rollout.num_steps]


def test_nobody_keeps_a_rollout_that_is_done_with(tmp_path: Path) -> None:
    graph, rollout, sinks = graph_for_two(numbered(), tmp_path)
    for sink in sinks:
        sink.close()
    there = weakref.ref(rollout)
    rollout.environments.close()
    del graph, rollout, sinks, sink
    gc.collect()
    assert there() is None
