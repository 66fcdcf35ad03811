"""A trainer's weights and its rollouts' returns: who acts with which weights, and what each end gets to know."""

import logging
import queue
import ssl
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from drawn_agents import Drawn, made
from feeding_rollouts import (
    HASTY,
    SHORT,
    await_come,
    failing,
    fed,
    feeding,
    graph_of,
    graph_over,
    running,
    trainer,
    weights,
    weights_of_agents,
)
from hypothesis import Phase, given, settings, strategies as st
from numbered_module import WideModule
from property_examples import examples
from remote_hosts import BrokenWire
from remote_rollouts import await_that
from wire_messages import TOKEN

from rollflow import Columns, Graph, MultiAgentRollout, Rollout, TrainerStream
from rollflow.nodes import EpisodeReturns, LambdaConnector
from rollflow.sinks import Batches, TrainerSink, WeightsFollower
from rollflow.sinks.trainer import newest_weights
from rollflow.sinks.trainer.item_maker import StreamReturns
from rollflow.sinks.trainer.messages import UNKNOWN, FinishedEpisodes, message_of_batch
from rollflow.sinks.trainer.rollout_peer import RolloutPeer
from rollflow.sinks.trainer.sink import BatchObserver
from rollflow.stream import ModuleError, RunError, WireError
from rollflow.stream.data.errors import GraphError
from rollflow.stream.wire import Fragment, Limits, ReceiverSession, SenderConnection, decode, encode


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
            told = r"weights of \d+ bytes, and at most 4096 may wait to be sent: give Tr"
            with pytest.raises(ModuleError, match=told):
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
        connection: SenderConnection = peer.connection
        if connection.next == 1 and connection.phase.name == "RUNNING":
            self.session.given = 1
            connection.send(Fragment(0, 1, {}, {}))

    monkeypatch.setattr("rollflow.sinks.trainer.uplink.TrainerUplink._send", send_one)
    with trainer() as stream:
        stream._listener.open()
        with WeightsFollower(stream.address, taking()[1]) as follower:
            await_that(lambda: follower.error is not None)
            assert "fragment 1, expected at most 0" in follower.problem


DRAWN = Drawn(3, 1, 4, 1, 9, False, 8, 1, True, 11)
Made = Callable[..., Any]


def told_of(returns: Any) -> Any:
    """All that returns say."""
    by_module = {each: told_of(own) for each, own in sorted(getattr(returns, "by_module", {}).items()) if own.count}
    return returns.count, list(returns.returns), list(returns.lengths), by_module


@cache
def returns_here(made: Made, **options: Any) -> Any:
    """Return the episodes' returns in a loop over the same rollout."""
    with made(**options) as rollout:
        for _ in rollout.batches():
            pass
    assert rollout.returns.count
    return told_of(rollout.returns)


def cartpoles(**options: Any) -> Rollout:
    return Rollout("CartPole-v1", **{"num_envs": 4, "fragment_length": 32, "num_fragments": 6, "seed": 3, **options})


def agents(**options: Any) -> MultiAgentRollout:
    return made(DRAWN, **{"num_fragments": 20, **options})[1]


def test_what_a_batch_could_not_be_made_of_is_counted_once_it_is() -> None:
    errors = [KeyError("once")]

    def fail_once() -> None:
        if errors:
            raise errors.pop()

    with trainer(yields=Batches(learner_connector=lambda obs_space, act_space: LambdaConnector(fail_once))) as stream:
        with feeding(stream.address, num_fragments=8):
            with pytest.raises(KeyError, match="once"):
                next(iter(stream))
            assert stream.returns.count == 0
            ended = sum(int((batch["terminateds"] | batch["truncateds"]).sum()) for batch in stream)
    assert stream.returns.count == ended > 0


@pytest.mark.parametrize(
    ("made", "sends", "per_batch"),
    [
        pytest.param(cartpoles, "batches", 3, marks=pytest.mark.slow),
        pytest.param(agents, "batches", 1, marks=pytest.mark.slow),
        pytest.param(agents, "batches", 3, marks=pytest.mark.slow),
        (agents, "fragments", 1),
    ],
)
def test_returns_are_those_of_the_rollout(made: Made, sends: str, per_batch: int) -> None:
    stream = trainer(yields=Batches(fragments=per_batch))
    returns = stream.returns
    assert told_of(returns) == (0, [], [], {})
    with fed(stream, made(), sends=sends):
        for _ in stream:
            pass
    here = returns_here(made)
    assert told_of(returns) == here
    assert here[3].keys() == (set() if made is cartpoles else {"nested 0", "nested 1", "plain 0", "plain 1"})
    for module_id, (_, values, _, _) in here[3].items():
        assert returns.by_module[module_id].mean == np.mean(values)


@settings(max_examples=examples(3), phases=[Phase.explicit, Phase.generate])
@given(cuts=st.lists(st.integers(0, 40_000), max_size=4), made=st.sampled_from([cartpoles, agents]))
def test_connections_that_are_cut_lose_none_and_double_none(cuts: list[int], made: Made) -> None:
    """After so many bytes."""
    with (
        trainer(limits=HASTY, prefetch=8) as stream,
        closing(BrokenWire(stream.address, lambda: cuts.pop() if cuts else None)) as wire,
        running(*graph_over(made(), wire.address, sends="batches")),
    ):
        for _ in stream:
            pass
    assert told_of(stream.returns) == returns_here(made)


def test_what_is_left_out_is_not_counted() -> None:
    """A batch that is too old, and with it the episodes that it tells of."""
    rollout, stream, steps = agents(), trainer(max_lag=0, on_excess="drop"), 0
    with fed(stream, rollout, sends="batches"):
        for batches in stream:
            steps += sum(len(batch["rewards"]) for batch in batches.values())
            stream.publish({each: {"weight": torch.tensor(0.0)} for each in rollout.module})
    assert steps + stream.lost["max_lag"] == rollout.num_steps
    assert 0 < stream.returns.count < returns_here(agents)[0]


def test_who_watches_comes_before_the_rollout_is_in_a_graph() -> None:
    with agents() as rollout:
        Graph("g").add(rollout=rollout)
        with pytest.raises(GraphError, match="in a graph already, expected what watches it to come before that"):
            rollout.watch(rollout.returns)


# What goes over the wire


def told(module_id: str | None, count: int, first: int = 0) -> FinishedEpisodes:
    kept = min(count, 100)
    return module_id, count, np.arange(first, first + kept, dtype=float), np.ones(kept, np.int64)


def test_more_episodes_than_are_told_one_by_one_are_counted() -> None:
    batch = message_of_batch(1, {"rewards": np.zeros(3), "policy_version": np.zeros(3)}, episodes=[told(None, 250, 5)])
    came = decode(bytearray(b"".join(encode(batch))))
    assert isinstance(came, Fragment)
    source, returns = RolloutPeer(ReceiverSession(TOKEN), rollout=replace(UNKNOWN, sends="batches")), StreamReturns()
    returns.add_item(source.read(came))
    assert (returns.count, len(returns.returns), returns.returns[-1]) == (250, 100, 104.0)


# What the sink sees


def test_episodes_of_modules_are_told_once() -> None:
    rollout = agents()
    seen = BatchObserver(rollout)
    returns: Any = seen._returns

    def finish(count: int, *ids: Any) -> None:
        for each in ids:
            returns.by_module.setdefault(each, EpisodeReturns()).take(count, [1.0] * count, [1] * count)

    finish(3, "a", 7)
    finish(2, "a")

    def taken() -> list[tuple[Any, int, list[float]]]:
        return [(module_id, count, values.tolist()) for module_id, count, values, _ in seen.take_episodes()]

    assert taken() == [("a", 5, [1.0] * 5)]
    assert taken() == []
    finish(1, "a")
    assert taken() == [("a", 1, [1.0])]
    rollout.environments.close()


def test_a_sink_that_sends_fragments_watches_nothing() -> None:
    rollout, graph = cartpoles(), Graph("feed")
    graph.connect(rollout.fragments, TrainerSink("unix:/nowhere"))
    assert "seen" not in "".join(graph.nodes)
    rollout.environments.close()
