"""Rollouts that end, raise, are killed or come twice: their trainers know which, and wait for no one in vain."""

import re
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest
from ending_envs import Doomed
from feeding_rollouts import HASTY, await_come, feeding, graph_over, running, sequences_of, trainer
from gymnasium.spaces import Discrete
from killable_trainer import FeedChild
from numbered_module import NumberedEnv, NumberedModule
from remote_rollouts import await_that

from rollflow import Graph, Rollout
from rollflow.sinks import LearnerPipeline, TrainerSink
from rollflow.sinks.trainer.listener import difference
from rollflow.sinks.trainer.rollout_peer import RolloutPeer
from rollflow.stream import GraphError, RunError
from rollflow.stream.data.errors import WireError
from rollflow.stream.wire import TrainerSession


def test_a_rollout_that_is_killed_when_all_of_it_has_come_is_not_missed(tmp_path: Path) -> None:
    with trainer(yields="fragments", limits=HASTY, join_timeout=60.0) as stream:
        child = FeedChild(str(stream.address), [0, 1], num_fragments=2, sink={"limits": HASTY})
        fragments = iter(stream)
        taken = [next(fragments), next(fragments)]
        await_that(lambda: not stream._listener.present)  # it has said that no more comes
        child.kill()
        assert list(fragments) == []
    assert sequences_of(taken) == {0: [0, 1]}


def test_a_rollout_that_raises_has_not_come_to_its_end(tmp_path: Path) -> None:
    with trainer(yields="fragments", limits=HASTY, join_timeout=0.5) as stream:
        rollout = Rollout([partial(Doomed, 0, tmp_path, "raise", 20, 1)], module=NumberedModule(), fragment_length=8)
        with pytest.raises(RuntimeError, match="it broke"), running(*graph_over(rollout, stream.address)) as feed:
            told = (
                r"every rollout is lost and none came within 0\.5 s: .* the rollout has failed: RuntimeError: it broke"
            )
            await_come(stream)
            with pytest.raises(RunError, match=told):
                for _ in stream:
                    pass
            feed.ended.result(60)


@pytest.mark.slow
def test_one_of_the_same_name_takes_the_place_of_one_that_was_killed(caplog: pytest.LogCaptureFixture) -> None:
    """Under "pace", where all would wait for it otherwise."""
    with trainer(yields="fragments", max_lag=0, on_excess="pace", sources=2) as stream:
        child = FeedChild(str(stream.address), [0, 1], seed=1, sink={"name": "one"})
        with feeding(stream.address, (2, 3), num_fragments=9, seed=2, sink={"name": "other"}):
            names: list[str] = []
            for _ in stream:
                names.append(stream.handed[0].source)
                if names.count("one") == 2 and child.process.is_alive():
                    child.kill()
                    again = FeedChild(str(stream.address), [0, 1], seed=3, num_fragments=4, sink={"name": "one"})
    again.process.join()
    assert (names.count("other"), names.count("one")) == (9, 2 + 4)
    assert re.search(r"rollout one \(.*\) has come in place of one \(.*\), which is not waited for", caplog.text)
    assert "is not back within" not in caplog.text


@pytest.mark.wait_times(first_word_s=0.05)
def test_those_that_are_lost_are_told_of_with_the_time_that_they_have(caplog: pytest.LogCaptureFixture) -> None:
    with trainer(yields="fragments", max_lag=0, on_excess="pace") as stream:
        child = FeedChild(str(stream.address), [0, 1], sink={"name": "one"})
        fragments = iter(stream)
        next(fragments)
        child.kill()
        with ThreadPoolExecutor() as threads:
            rest = threads.submit(list, fragments)
            await_that(lambda: "one rollout: one (" in caplog.text)
            with feeding(stream.address, (0, 1), num_fragments=3, sink={"name": "another"}):
                await_that(lambda: "of 2 rollouts: one (" in caplog.text)
                [lost] = [source for source in stream._listener.sources.values() if source.name.startswith("one")]
                lost.lost_at = 0.0  # long ago
                rest.result(60)
    assert re.search(r"one \(.*\) is lost since \d+ s, and waited for \d+ s more \(Limits.grace_s\)", caplog.text)
    assert re.search(r"another \(.*\) is there", caplog.text)


@pytest.mark.parametrize(
    ("sends", "is_learnt", "told"),
    [("batches", False, "expected a LearnerPipeline between it"), ("fragments", True, "expected sends='batches'")],
)
def test_what_does_not_come_can_not_be_sent(sends: Any, is_learnt: bool, told: str) -> None:
    rollout = Rollout([partial(NumberedEnv, 0)], module=NumberedModule())
    graph, sink = Graph("feed"), TrainerSink("unix:/tmp/nobody", sends=sends)
    source: Any = rollout.fragments
    if is_learnt:
        source = LearnerPipeline(rollout.learner_pipeline, rollout.module)
        graph.connect(rollout.fragments, source)
    graph.connect(source, sink)
    with pytest.raises(GraphError, match=told):
        graph.validate()


@pytest.mark.parametrize("ends", ["trainer", "rollout"])
def test_a_graph_waits_for_whichever_end_comes_first(ends: str) -> None:
    goodbyes: list[str | None] = []

    async def main(address: str) -> None:
        rollout = Rollout(
            [partial(NumberedEnv, 0)],
            module=NumberedModule(),
            fragment_length=8,
            num_fragments=3 if ends == "rollout" else None,
        )
        sink, graph = TrainerSink(address), Graph("rollout")
        graph.connect(rollout.fragments, sink)
        async with graph.run():
            goodbyes.append(await sink.wait_goodbye())

    with ThreadPoolExecutor() as threads, trainer(yields="fragments") as stream:
        feeding = threads.submit(anyio.run, main, str(stream.address))
        fragments = [next(iter(stream))] if ends == "trainer" else list(stream)
        if ends == "rollout":
            feeding.result(60)
    assert len(fragments) == (1 if ends == "trainer" else 3)
    assert goodbyes == ["the trainer has ended" if ends == "trainer" else None]


def test_rollouts_that_can_not_be_learnt_from_together_are_not_both_taken_in() -> None:
    with trainer() as stream, feeding(stream.address):
        batches = iter(stream)
        next(batches)
        other = graph_over(Rollout("CartPole-v1", fragment_length=8), stream.address, name="other")
        with (
            pytest.raises(
                WireError, match=r"action_space is Discrete\(2\), expected Discrete\(.*\), as rollout feed .*"
            ),
            running(*other) as feed,
        ):
            while not feed.ended.done():
                next(batches)
            feed.ended.result()


@pytest.mark.parametrize(
    ("known", "told"),
    [
        ({}, ""),
        ({"is_stateful": True}, "is_stateful is True, expected False"),
        ({"action_space": Discrete(3)}, "action_space is Discrete(3), expected Discrete(2)"),
        ({"spaces": [Discrete(2), Discrete(3)]}, "spaces[1] is Discrete(3), expected Discrete(4)"),
        ({"spaces": [Discrete(2)]}, "spaces[1] is None, expected Discrete(4)"),
        ({"weights": {"a": (3,), "b": (2, 5)}}, "the shape of weight 'b' is (2, 5), expected (2, 4)"),
        ({"weights": {"a": (3,)}}, "the shape of weight 'b' is None, expected (2, 4)"),
        ({"weights": {"a": (3,), "b": (2, 4), "c": ()}}, "the shape of weight 'c' is (), expected None"),
    ],
)
def test_what_differs_is_told(known: dict[str, Any], told: str) -> None:
    one, other = RolloutPeer(TrainerSession(bytes(16))), RolloutPeer(TrainerSession(bytes(16)))
    for source in (one, other):
        source.spaces, source.action_space = [Discrete(2), Discrete(4)], Discrete(2)
        source.weights = {"a": (3,), "b": (2, 4)}
    vars(one).update(known)
    assert difference(one, other) == told


def test_rollouts_that_make_the_same_episodes_are_told_of(caplog: pytest.LogCaptureFixture) -> None:
    with trainer(sources=3) as stream:
        options: dict[str, Any] = {"lanes": 1, "num_fragments": 2}
        with (
            feeding(stream.address, (0,), seed=7, sink={"name": "one"}, **options),
            feeding(stream.address, (1,), seed=8, sink={"name": "another"}, **options),
            feeding(stream.address, (2,), seed=7, sink={"name": "its twin"}, **options),
        ):
            assert len(list(stream)) > 1
    told = [record.message for record in caplog.records if "seed" in record.message]
    assert len(told) == 1
    assert re.match(r"rollouts (one|its twin) \(.*\) and (one|its twin) \(.*\) both have seed=7: ", told[0])


def test_what_was_watched_and_has_failed_is_told_as_well() -> None:
    fails_now = threading.Event()

    async def fails() -> None:
        await anyio.to_thread.run_sync(fails_now.wait)
        raise KeyError("watched")

    rollout = Rollout([partial(NumberedEnv, 0)], module=NumberedModule(), fragment_length=8)
    with trainer(yields="fragments", join_timeout=0.5) as stream:
        graph = graph_over(rollout, stream.address, watch=fails)
        with pytest.raises(KeyError, match="watched"), running(*graph) as feed:
            await_come(stream)
            with pytest.raises(RunError, match="the rollout has failed: KeyError: 'watched'"):
                for _ in stream:
                    fails_now.set()
            feed.ended.result(60)


def test_whoever_waits_for_a_goodbye_outside_of_the_run_is_told_of_its_end(tmp_path: Path) -> None:
    async def main(address: str) -> None:
        rollout = Rollout([partial(Doomed, 0, tmp_path, "raise", 20, 1)], module=NumberedModule(), fragment_length=8)
        sink, graph = TrainerSink(address), Graph("rollout")
        graph.connect(rollout.fragments, sink)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(sink.wait_goodbye)  # would keep the group from ending
            with pytest.raises(RuntimeError, match="it broke"):
                async with graph.run() as run:
                    await run.wait()

    with ThreadPoolExecutor() as threads, trainer(yields="fragments", limits=HASTY, join_timeout=0.5) as stream:
        ended = threads.submit(anyio.run, main, str(stream.address))
        await_come(stream)
        with pytest.raises(RunError, match="it broke"):
            list(stream)
        ended.result(60)


def test_a_seed_may_be_any_whole_number() -> None:
    with trainer() as stream, feeding(stream.address, seed=1 << 70, num_fragments=2) as feed:
        assert sum(len(batch["rewards"]) for batch in stream) == feed.rollout.num_steps
