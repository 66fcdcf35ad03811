"""A trainer's weights: which rollouts and followers act with them, and how it gets to know."""

import logging
import queue
import ssl
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from feeding_rollouts import (
    SHORT,
    await_come,
    failing,
    feeding,
    graph_of,
    graph_over,
    running,
    trainer,
    weights,
    weights_of_agents,
)
from numbered_module import WideModule
from remote_rollouts import await_that

from rollflow import Columns, Rollout, TrainerStream
from rollflow.sinks import TrainerSink, WeightsFollower
from rollflow.sinks.trainer import newest_weights
from rollflow.stream import ModuleError, RunError, WireError
from rollflow.stream.wire import Fragment, Limits, SourceConnection, encode


@pytest.mark.parametrize(("agents", "sends"), [(0, "fragments"), (2, "fragments"), (2, "batches")])
def test_a_rollout_begins_with_the_trainers_newest_weights(agents: int, sends: str) -> None:
    weights_for = weights_of_agents if agents else weights
    with trainer() as stream:
        stream.publish(weights_for(5.0))
        assert stream.publish(weights_for(7.0)) == 2
        with feeding(stream.address, agents=agents, num_fragments=2, sink={"sends": sends}):
            for batch in stream:
                for part in batch.values() if agents else [batch]:
                    assert (part[Columns.POLICY_VERSION] == 2).all()
                    assert (part["weight"] == 7.0).all()


def test_weights_are_measured_once_however_many_rollouts_come(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[int] = []
    monkeypatch.setattr(newest_weights, "encode", lambda each: (measured.append(each.version), encode(each))[1])
    with trainer() as stream:
        stream.publish(weights(5.0))
        with feeding(stream.address, num_fragments=1), feeding(stream.address, num_fragments=1):
            assert {int(version) for batch in stream for version in batch[Columns.POLICY_VERSION]} == {1}
    assert measured == [0]


def test_a_trainer_that_begins_anew_has_its_weights_used_all_the_same(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/trainer"
    with feeding(address, num_fragments=12, lanes=1) as feed:
        with failing(address) as stream:
            for value in range(3):
                stream.publish(weights(float(value)))
            next(iter(stream))
            assert feed.rollout.policy_version == 3
        with trainer(address) as stream:
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
    module, told = WideModule(1 << 17), r"weights of \d+ bytes, and rollout feed .* at most 65536: give its sink"
    options: dict[str, Any] = {"module": module, "num_fragments": 1, "sink": {"limits": Limits(max_frame=1 << 16)}}
    large = module.state_dict()
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
        refused = pytest.raises(WireError, match="weights do not fit module 'DefaultModule of rollout")
        with refused, running(*parts) as feed:
            await_come(stream)
            with pytest.raises(RunError, match=r"0 of 1 rollouts came within 0\.5 s: .* weights do not fit module"):
                next(iter(stream))
            feed.ended.result()


def test_a_rollout_may_feed_two_trainers(caplog: pytest.LogCaptureFixture) -> None:
    with trainer(yields="fragments") as first, trainer(yields="fragments") as second, ThreadPoolExecutor() as pool:
        graph, rollout, sink = graph_of(first.address, (0, 1), num_fragments=5)
        graph.connect("rollout.fragments", TrainerSink(str(second.address)), capacity=1)
        with running(graph, rollout, sink):
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


Taken = queue.Queue[tuple[int, float]]


def taking() -> tuple[Taken, Any]:
    """A queue of versions and weights, and what puts them there."""
    taken: Taken = queue.Queue()
    return taken, lambda version, came: taken.put((version, float(came["weight"])))


@pytest.mark.parametrize("options", [{}, {"max_lag": 0, "on_excess": "pace"}], ids=["free", "paced"])
@pytest.mark.parametrize("shares", [False, True], ids=["sent", "shared"])
def test_a_trainer_learns_as_without_its_followers(shares: bool, options: dict[str, Any], tmp_path: Path) -> None:
    taken, take = taking()
    address = f"shm:{tmp_path}/trainer" if shares else "tcp://127.0.0.1:0"
    with (
        trainer(address, **options) as stream,
        feeding(stream.address, num_fragments=6, lanes=2),
        WeightsFollower(stream.address, take),
    ):
        counts = []
        for batch in stream:
            counts.append(len(batch[Columns.REWARDS]))
            version = stream.publish(weights(float(len(counts))))
            while taken.get(timeout=30) != (version, float(len(counts))):
                pass
            assert len(stream.sources) <= 1
    assert len(set(counts)) == 1
    assert len(counts) == 6


@pytest.mark.parametrize("scheme", ["unix", "shm"])
def test_a_follower_begins_with_the_newest_weights_and_follows_the_next_trainer(scheme: str, tmp_path: Path) -> None:
    address, (taken, take) = f"{scheme}:{tmp_path}/trainer", taking()
    with WeightsFollower(address, take) as follower:
        assert follower.problem
        for value in (7.0, 9.0):  # the second one counts anew
            with TrainerStream(address) as stream:
                stream.publish(weights(value - 1.0))
                stream.publish(weights(value))
                stream._listener.open()
                assert taken.get(timeout=30) == (2, value)
                await_that(lambda: not follower.problem)
            await_that(lambda: "said goodbye" in follower.problem)
    assert taken.empty()


def test_an_orderly_end_is_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    with trainer() as stream:
        stream._listener.open()
        with WeightsFollower(stream.address, taking()[1]) as follower, feeding(stream.address, num_fragments=1):
            await_that(lambda: not follower.problem)
            assert len(list(stream)) == 1
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_a_follower_speaks_tls_and_proves_the_secret(certificates: dict[str, ssl.SSLContext]) -> None:
    (taken, take), server, client = taking(), certificates["server"], certificates["client"]
    with TrainerStream("tcp://127.0.0.1:0", secret="one", tls=server) as stream:
        stream.publish(weights(3.0))
        stream._listener.open()
        with WeightsFollower(stream.address, take, secret="one", tls=client):
            assert taken.get(timeout=30) == (1, 3.0)
        with WeightsFollower(stream.address, take, secret="another", tls=client) as follower:
            await_that(lambda: follower.error is not None)
            assert "secret" in follower.problem
    with pytest.raises(WireError, match="memory is not encrypted, expected tls=None"):
        WeightsFollower("shm:/memory", take, tls=client)
    with pytest.raises(WireError, match=r"expected 'tcp:.*'unix:/path' or 'shm:/path'"):
        WeightsFollower("/memory", take)


def test_what_a_follower_raises_ends_its_following_alone() -> None:
    def take(version: int, came: Any) -> None:
        raise ValueError("not these")

    taken, other = taking()
    with trainer() as stream:
        stream._listener.open()
        with WeightsFollower(stream.address, take) as follower, WeightsFollower(stream.address, other):
            stream.publish({"weight": torch.tensor(1.0)})
            await_that(lambda: follower.error is not None)
            assert follower.problem == "not these"
            stream.publish(weights(2.0))
            while taken.get(timeout=30) != (2, 2.0):
                pass


def test_fragments_of_a_follower_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def send_one(self: Any, peer: Any) -> None:
        connection: SourceConnection = peer.connection
        if connection.next == 1 and connection.phase.name == "RUNNING":
            self.session.given = 1
            connection.send(Fragment(0, 1, {}, {}))

    monkeypatch.setattr("rollflow.sinks.trainer.uplink.TrainerUplink._send", send_one)
    with trainer() as stream:
        stream._listener.open()
        with WeightsFollower(stream.address, taking()[1]) as follower:
            await_that(lambda: follower.error is not None)
            assert "fragment 1, expected at most 0" in follower.problem
