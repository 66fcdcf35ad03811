"""One rollout for several trainers: those that leave and come back."""

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from feeding_rollouts import SHORT, running
from remote_rollouts import await_that

from rollflow import Graph, Rollout, TrainerStream
from rollflow.sinks import LearnerPipeline, TrainerSink
from rollflow.stream.fragments.fragment import Fragment


def graph_for(folder: Path, *, sends: Any = "fragments", **options: Any) -> tuple[Graph, Rollout, list[TrainerSink]]:
    """A rollout of two lanes for two trainers."""
    given: dict[str, Any] = {"num_envs": 2, "lanes": 2, "fragment_length": 8, "num_fragments": 24, **options}
    rollout = Rollout("CartPole-v1", **given)
    sinks = [TrainerSink(f"unix:{folder}/{name}", limits=SHORT, sends=sends) for name in ("one", "other")]
    graph = Graph("several")
    graph.add(rollout=rollout, one=sinks[0], other=sinks[1])
    source = "rollout.fragments"
    if sends == "batches":
        graph.add(learner=LearnerPipeline(rollout.learner_pipeline, rollout.module))
        graph.connect(source, "learner")
        source = "learner"
    for name in ("one", "other"):
        graph.connect(source, name, capacity=1)
    return graph, rollout, sinks


def take(address: str, most: int | None = None, publishes: Any = None, **options: Any) -> list[Any]:
    """Take items as a trainer until it leaves: a number of them, or all."""
    taken: list[Any] = []
    with TrainerStream(address, **{"yields": "fragments", "limits": SHORT, **options}) as stream:
        for item in stream:
            taken.append(item)
            if len(taken) == most:
                break
            if publishes is not None:
                stream.publish(publishes)
    return taken


def steps_of(items: list[Any]) -> int:
    """In fragments or train batches."""
    return sum(item.num_steps if isinstance(item, Fragment) else len(item["obs"]) for item in items)


def test_where_all_have_left_they_are_waited_for(tmp_path: Path) -> None:
    graph, rollout, (one, other) = graph_for(tmp_path)
    with running(graph, rollout, one), ThreadPoolExecutor() as pool:
        leavers = [pool.submit(take, str(sink._uplink.address), 3) for sink in (one, other)]
        taken = [leaver.result() for leaver in leavers]
        await_that(lambda: all(sink.goodbye is not None for sink in (one, other)))
        back = [pool.submit(take, str(sink._uplink.address)) for sink in (one, other)]
        taken = [some + later.result() for some, later in zip(taken, back, strict=True)]
    for fragments in taken:
        assert steps_of(fragments) == rollout.num_steps


def test_nobody_keeps_a_rollout_that_is_done_with(tmp_path: Path) -> None:
    graph, rollout, sinks = graph_for(tmp_path)
    for sink in sinks:
        sink.close()
    there = weakref.ref(rollout)
    rollout.environments.close()
    del graph, rollout, sinks, sink
    gc.collect()
    assert there() is None
