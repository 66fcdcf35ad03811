"""A trainer's weights: which rollouts act with them, and how it gets to know."""

import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from feeding_rollouts import SHORT, await_come, feeding, graph_over, running, trainer, weights
from numbered_module import NumberedModule
from remote_rollouts import await_that

from rollflow import Columns, Graph, Rollout, TrainerStream
from rollflow.sinks import TrainerSink
from rollflow.stream import GraphError, ModuleError, RunError, WireError
from rollflow.stream.wire import Limits


class Large(NumberedModule):
    """With more weights than go into 64 KiB."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.more = torch.nn.Parameter(torch.zeros(1 << 17))


def trainer_at(address: str) -> TrainerStream:
    return TrainerStream(address, limits=SHORT)


def test_a_rollout_begins_with_the_trainers_newest_weights() -> None:
    with trainer() as stream:
        stream.publish(weights(5.0))
        assert stream.publish(weights(7.0)) == 2
        with feeding(stream.address, num_fragments=2):
            for batch in stream:
                assert (batch[Columns.POLICY_VERSION] == 2).all()
                assert (batch["weight"] == 7.0).all()


def test_a_trainer_that_begins_anew_has_its_weights_used_all_the_same(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/trainer"
    with feeding(address, num_fragments=12, lanes=1) as feed:
        with pytest.raises(KeyError), trainer_at(address) as stream:
            for value in range(3):
                stream.publish(weights(float(value)))
            next(iter(stream))
            assert feed.rollout.policy_version == 3
            raise KeyError
        with trainer_at(address) as stream:
            assert stream.publish(weights(77.0)) == 1
            batches = list(stream)
            assert stream.version == 4
    assert (batches[-1]["weight"] == 77.0).all()
    assert (batches[-1][Columns.POLICY_VERSION] == 4).all()


def test_weights_of_another_module_are_refused_before_they_are_sent() -> None:
    with trainer() as stream, feeding(stream.address, num_fragments=2):
        for _ in stream:
            with pytest.raises(
                ModuleError,
                match=r"weights do not fit module 'NumberedModule of rollout feed .*': missing \['weight'\], unknown "
                r"\['bias'\]",
            ):
                stream.publish({"bias": torch.zeros(3)})
            with pytest.raises(ModuleError, match="expected a state_dict"):
                stream.publish([1, 2])  # type: ignore[arg-type]
            with pytest.raises(ModuleError, match=r"weights can't be sent, expected tensors and plain data: .*object"):
                stream.publish({"weight": torch.tensor(1.0), "extra": object()})
    assert stream.version == 0


@pytest.mark.slow
def test_weights_that_are_larger_than_a_rollout_takes_are_refused_where_they_are_published() -> None:
    large, told = (
        Large().state_dict(),
        r"weights of \d+ bytes, and rollout feed .* at most 65536: give its sink",
    )
    options: dict[str, Any] = {"module": Large(), "num_fragments": 1, "sink": {"limits": Limits(max_frame=1 << 16)}}
    with trainer() as stream:
        with feeding(stream.address, **options):
            for _ in stream:
                with pytest.raises(ModuleError, match=told):
                    stream.publish(large)
        assert stream.version == 0
    with trainer(join_timeout=1.0) as stream:
        stream.publish(large)
        with pytest.raises(WireError, match=told), feeding(stream.address, **options) as feed:
            await_come(stream)
            with pytest.raises(RunError, match=told):
                next(iter(stream))
            feed.ended.result()


def test_weights_that_are_more_than_may_wait_to_be_sent_are_refused() -> None:
    with trainer(limits=replace(SHORT, undelivered=1 << 12)) as stream, feeding(stream.address, num_fragments=1):
        for _ in stream:
            with pytest.raises(
                ModuleError, match=r"weights of \d+ bytes, and at most 4096 may wait to be sent: give Tr"
            ):
                stream.publish({"weight": torch.tensor(0.0), "extra": bytes(5000)})


def test_weights_of_another_module_that_are_published_too_early_end_the_rollout() -> None:
    with trainer(join_timeout=0.5) as stream:
        stream.publish({"bias": torch.zeros(3)})
        parts = graph_over(Rollout("CartPole-v1", fragment_length=8), stream.address)
        with (
            pytest.raises(WireError, match="weights do not fit module 'DefaultModule of rollout"),
            running(*parts) as feed,
        ):
            await_come(stream)
            with pytest.raises(RunError, match=r"0 of 1 rollouts came within 0\.5 s: .* weights do not fit module"):
                next(iter(stream))
            feed.ended.result()


def test_a_rollout_may_feed_two_trainers(caplog: pytest.LogCaptureFixture) -> None:
    with trainer(yields="fragments") as first, trainer(yields="fragments") as second:
        rollout = Rollout("CartPole-v1", num_envs=2, fragment_length=8, num_fragments=5)
        sinks = [TrainerSink(str(stream.address), name="both") for stream in (first, second)]
        graph = Graph("two")
        for sink in sinks:
            graph.connect(rollout.fragments, sink, capacity=1)
        with running(graph, rollout, sinks[0]):
            with ThreadPoolExecutor() as pool:
                others = pool.submit(lambda: [fragment.sequence for fragment in second])
                taken = []
                for fragment in first:
                    taken.append(fragment.sequence)
                    if len(taken) == 2:
                        first.publish(rollout.module.state_dict())
                        first.publish(rollout.module.state_dict())
                        await_that(lambda: rollout.policy_version == 2)
                        with caplog.at_level(logging.WARNING):
                            second.publish(rollout.module.state_dict())
                            await_that(lambda: "of another trainer" in caplog.text)
            assert taken == others.result() == [0, 1, 2, 3, 4]
    assert rollout.policy_version == 2


def test_a_sink_comes_before_its_rollout_is_in_the_graph() -> None:
    rollout = Rollout("CartPole-v1")
    Graph("g").add(rollout=rollout)
    with pytest.raises(GraphError, match="the rollout is in a graph already, expected what holds it back to come"):
        TrainerSink("tcp://127.0.0.1:1", rollout)
