"""Trainers and rollouts that come late, end, raise, are killed or do not fit: both ends say so, and none hangs."""

import json
import logging
import re
import socket
import ssl
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import numpy as np
import pytest
from ending_envs import Doomed
from feeding_rollouts import (
    HASTY,
    SHORT,
    await_come,
    failing,
    feeding,
    graph_of,
    graph_over,
    learner_of,
    rollout_of,
    running,
    sequences_of,
    trainer,
    weights,
)
from gymnasium.spaces import Discrete
from killable_trainer import FeedChild
from numbered_module import NumberedModule
from remote_hosts import BrokenWire, hosting, listening
from remote_rollouts import await_that, makers

from rollflow import (
    DatasetSource,
    DefaultModelConfig,
    EpsilonGreedy,
    Forward,
    GeneralAdvantageEstimation,
    Graph,
    RemoteEnvs,
    Replay,
    Rollout,
    Timeouts,
    TrainerStream,
    VTrace,
    Watch,
    feed,
)
from rollflow.nodes import EnvHost, RolloutHost
from rollflow.nodes.offloaded.fragment_message import PartSpaces
from rollflow.sinks import Batches, Sources, TrainerProcess, TrainerSink
from rollflow.sinks.trainer.listener import difference
from rollflow.sinks.trainer.messages import UNKNOWN
from rollflow.sinks.trainer.rollout_peer import RolloutPeer
from rollflow.sinks.trainer.stream import _failure_of
from rollflow.stream import GraphError, RunError, WireError
from rollflow.stream.multi_agent.agent_part import AgentPart
from rollflow.stream.wire import (
    Fragment,
    Goodbye,
    Hello,
    Limits,
    Metrics,
    ReceiverSession,
    SenderConnection,
    SenderSession,
    TcpAddress,
    encode,
)

STATE: dict[str, Any] = {"version": 5, "weights": [5, "ab" * 8], "sources": {}}


def test_a_trainer_that_goes_on_and_publishes_in_its_loop_gets_what_new_rollouts_make() -> None:
    with trainer() as stream:
        stream.load_state_dict(STATE)
        with feeding(stream.address, num_fragments=3):
            lags = []
            for _ in stream:
                lags += [each.lag for each in stream.handed]
                stream.publish(weights(1.0))
    assert lags[0] == 5
    assert stream.version == 8


@pytest.mark.parametrize("on_excess", ["drop", "pace", "raise"])
def test_with_a_bound_it_must_publish_first(on_excess: Any) -> None:
    told = "is 5 policy versions old, and no weights have been published here: publish those that"
    with trainer(max_lag=0, on_excess=on_excess) as stream:
        stream.load_state_dict(STATE)
        with feeding(stream.address), pytest.raises(RunError, match=told):
            next(iter(stream))


def test_under_pace_what_was_made_for_the_one_before_is_left_out(tmp_path: Path) -> None:
    address, bound = f"unix:{tmp_path}/trainer", {"max_lag": 0, "on_excess": "pace"}
    with feeding(address, num_fragments=6, lanes=1) as feed:
        with failing(address, **bound) as stream:
            for _ in stream:
                stream.publish(weights(1.0))
                if stream.version == 3:
                    state = stream.state_dict()
                    break
        with trainer(address, **bound) as stream:
            stream.load_state_dict(state)
            stream.publish(weights(9.0))
            handed = []
            for batch in stream:
                assert (batch["policy_version"] == stream.version).all()
                handed += stream.handed
                stream.publish(weights(9.0))
    steps = sum(each.num_steps for each in handed) + stream.lost.get("max_lag", 0)
    assert steps == feed.rollout.num_steps - 3 * 8 * 4
    assert [each.sequence for each in handed][-1] == 5


def test_under_pace_nothing_is_left_out_where_the_trainer_goes_on_with_the_same_weights(tmp_path: Path) -> None:
    address, handed = f"unix:{tmp_path}/trainer", list[Any]()
    state, stream = None, None
    with feeding(address, num_fragments=10, lanes=2) as feed:
        for life in range(4):
            with suppress(KeyError), trainer(address, max_lag=1, on_excess="pace") as stream:
                if state is not None:
                    stream.load_state_dict(json.loads(json.dumps(state)))
                    assert stream.publish(weights(life - 1.0)) == stream.version == state["version"]
                for batch in stream:
                    assert (batch["policy_version"] >= stream.version - 1).all()
                    handed += stream.handed
                    stream.publish(weights(float(life)))
                    state = stream.state_dict()
                    if life < 3 and len(handed) >= 4 * (life + 1):
                        raise KeyError
    assert stream is not None
    assert stream.lost == {}
    assert sum(each.num_steps for each in handed) == feed.rollout.num_steps
    assert all(each.lag <= 1 for each in handed)
    for lane in (0, 1):
        assert [each.sequence for each in handed if each.lane == lane] == list(range(10))


@pytest.mark.parametrize("is_learnt", [False, True])
def test_the_first_weights_behind_a_state_are_those_that_were_saved_with_it(is_learnt: bool, tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/trainer"
    with feeding(address, num_fragments=12, lanes=1):
        with failing(address) as stream:
            stream.publish(weights(1.0))
            next(iter(stream))
            states = [stream.state_dict()]
            stream.publish(weights(2.0))
            states.append(stream.state_dict())
        with trainer(address) as stream:
            stream.load_state_dict(states[0 if is_learnt else 1])  # in the latter it has been published already
            assert stream.publish(weights(2.0)) == 2
            batches = list(stream)
            assert stream.publish(weights(3.0)) == 3  # the first alone goes on
    assert (batches[-1]["policy_version"] == 2).all()
    assert (batches[-1]["weight"] == 2.0).all()


def test_a_version_that_a_rollout_has_of_another_trainer_is_gone_beyond(tmp_path: Path) -> None:
    address, states = f"unix:{tmp_path}/trainer", dict[str, Any]()
    with feeding(address, num_fragments=12, lanes=1) as feed:
        for name, value in ("one", 1.0), ("other", 2.0):
            with failing(address if name == "other" else f"{address}2") as stream:
                stream.publish(weights(value))
                states[name] = stream.state_dict()
        with failing(address) as stream:
            stream.load_state_dict(states["other"])
            stream.publish(weights(2.0))
            next(iter(stream))
            assert feed.rollout.policy_version == 1
        with trainer(address) as stream:
            stream.load_state_dict({**states["one"], "sources": stream.state_dict()["sources"]})
            assert stream.publish(weights(1.0)) == 1
            batches = list(stream)
            assert stream.version == 2
    assert (batches[-1]["weight"] == 1.0).all()


@pytest.mark.parametrize(
    "state",
    [
        {"version": 0},
        STATE | {"weights": 5},
        STATE | {"weights": [5, "ab"]},
        STATE | {"weights": [5, "x" * 16]},
        STATE | {"weights": [-1, "ab" * 8]},
        STATE | {"lost": {"max_lag": -1}},
        STATE | {"counted": [1]},
    ],
    ids=str,
)
def test_what_is_no_state_is_refused(state: dict[str, Any]) -> None:
    with trainer() as stream, pytest.raises(ValueError, match=r"state is \{.*, expected what state_dict\(\) gave"):
        stream.load_state_dict(state)


def test_a_state_is_loaded_before_the_stream_begins_and_has_what_was_lost() -> None:
    state = {**STATE, "lost": {"max_lag": 3}}
    with trainer(join_timeout=0.01) as stream:
        stream.load_state_dict(state)
        assert stream.lost == {"max_lag": 3}
        assert stream.state_dict() == state
        with pytest.raises(RunError, match="0 of 1 rollouts came"):
            next(iter(stream))
        with pytest.raises(
            RunError, match="the stream has begun, expected resume or load_state_dict before the first batch"
        ):
            stream.load_state_dict(state)


def test_a_drained_rollout_whose_trainer_takes_no_more_says_what_it_waits_for(caplog: pytest.LogCaptureFixture) -> None:
    with trainer(yields="fragments", prefetch=0) as stream, feeding(stream.address, lanes=2) as feed:
        fragments = iter(stream)
        taken = [next(fragments)]
        await_that(lambda: feed.sink._session.given == 2)  # what the window takes
        assert "drained" not in caplog.text
        feed.drain()
        told = "the run is drained, and what it has made waits for the trainer at tcp:"
        await_that(lambda: told in caplog.text)
        told = "it has 2 fragments that it has not moved on from; leave the run, or press Ctrl-C again, to give it up"
        assert told in caplog.text
        taken += fragments
    assert caplog.text.count("drained") == 1
    assert sum(fragment.num_steps for fragment in taken) == feed.rollout.num_steps


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"max_lag": 0, "on_excess": "pace"}, {"prefetch": 0}], ids=["pace", "no prefetch"])
def test_fragments_without_a_transition_hold_nobody_up(options: dict[str, Any]) -> None:
    with trainer(**options) as stream:
        rollout = Rollout("CartPole-v1", num_envs=2, lanes=2, fragment_length=1, num_fragments=120, seed=1)
        with running(*graph_over(rollout, stream.address)):
            steps = 0
            for batch in stream:
                steps += len(batch["obs"])
                stream.publish(rollout.module.state_dict())
    assert steps == rollout.num_steps < 2 * 120  # some rows only reset


@pytest.mark.slow
@pytest.mark.parametrize("end", ["max_frame", "undelivered"])
def test_a_fragment_that_is_too_large_ends_the_rollout_and_both_ends_say_what_to_do(end: str) -> None:
    at_trainer = Limits(max_frame=1 << 16) if end == "max_frame" else SHORT
    at_rollout = Limits(undelivered=1 << 14) if end == "undelivered" else SHORT
    told = rf"frame of \d+ bytes, .*limits=Limits\({end}=\d+ or more\)"
    with trainer(limits=at_trainer, join_timeout=1.0) as stream:
        sink = {"limits": at_rollout}
        with pytest.raises(WireError, match=told), feeding(stream.address, fragment_length=512, sink=sink) as feed:
            await_come(stream)
            with pytest.raises(RunError, match=rf"every rollout is lost and none came within 1 s: feed .*: {told}"):
                next(iter(stream))
            feed.ended.result()


def test_a_rollout_that_is_lost_for_good_may_be_followed_by_one_that_is_mended() -> None:
    with trainer() as stream:
        with feeding(stream.address, fragment_length=512, sink={"limits": Limits(undelivered=1 << 14)}) as feed:
            with ThreadPoolExecutor() as pool:
                batches = pool.submit(list, stream)
                with pytest.raises(WireError, match="frame of"):
                    feed.ended.result()
                with feeding(stream.address, num_fragments=2, lanes=1):
                    assert len(batches.result()) == 2


def test_a_trainer_that_has_ended_publishes_and_acknowledges_no_more() -> None:
    with trainer(ack="manual") as stream, feeding(stream.address, num_fragments=1):
        assert len(list(stream)) == 1
    for late in (stream.ack, lambda: stream.publish(weights(1.0))):
        with pytest.raises(RunError, match="the stream is closed, expected this before its block is left"):
            late()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\n\r\n", "frame of 1347703880 bytes"),
        (b"".join(encode(Goodbye("the trainer has ended"))), "goodbye in the handshake: the trainer has ended"),
    ],
    ids=["a proxy", "a stranger's goodbye"],
)
def test_a_stranger_at_its_address_is_not_mistaken(words: bytes, told: str, caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        with feeding(address, num_fragments=2, lanes=1, sink={"linger": None}) as feed:
            sock, _ = listener.accept()
            with closing(sock):
                sock.sendall(words)
                await_that(lambda: told in feed.sink._uplink.problem)
            assert feed.sink.goodbye is None
            listener.close()
            with trainer(address, yields="fragments") as stream:
                assert sequences_of(list(stream)) == {0: [0, 1]}


@pytest.mark.wait_times(first_word_s=0.05)
@pytest.mark.slow
def test_a_trainer_that_acknowledges_nothing_is_named(caplog: pytest.LogCaptureFixture) -> None:
    with trainer(yields="fragments", ack="manual", prefetch=9) as stream:
        with caplog.at_level(logging.WARNING), feeding(stream.address, lanes=1, sink={"max_bytes": 6_000}):
            fragments = iter(stream)
            next(fragments)
            next(fragments)
            await_that(lambda: "bytes are kept until it acknowledges them, by ack() or by moving on" in caplog.text)
            stream.ack()
            next(fragments)


def test_a_rollout_gets_its_goodbye_behind_whoever_has_not_said_a_word() -> None:
    with ThreadPoolExecutor() as threads:
        with trainer(yields="fragments") as stream:
            address: Any = stream.address
            with socket.create_connection((address.host, address.port)):
                fed = threads.submit(feed, rollout_of([0]), str(address), limits=SHORT, retry_s=5.0)
                next(iter(stream))
                stream.__exit__(None, None, None)
        assert fed.result() == "the trainer has ended"


def test_a_rollout_that_is_killed_when_all_of_it_has_come_is_not_missed(tmp_path: Path) -> None:
    with trainer(yields="fragments", limits=HASTY, join_timeout=60.0) as stream:
        child = FeedChild(str(stream.address), [0, 1], num_fragments=2, sink={"limits": HASTY})
        fragments = iter(stream)
        taken = [next(fragments), next(fragments)]
        await_that(lambda: not any(stream._listener.present()))  # it has said that no more comes
        child.kill()
        assert list(fragments) == []
    assert sequences_of(taken) == {0: [0, 1]}


def doomed(folder: Path) -> Rollout:
    """A rollout whose environment raises."""
    return Rollout([partial(Doomed, 0, folder, "raise", 20, 1)], module=NumberedModule(), fragment_length=8)


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
    assert re.search(
        r"rollout one \(.*\) has come in place of one \(.*\), which went away and is waited for no more", caplog.text
    )
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
    rollout = rollout_of([0])
    graph, sink = Graph("feed"), TrainerSink("unix:/tmp/nobody", sends=sends)
    source: Any = rollout.fragments
    if is_learnt:
        source = learner_of(rollout)
        graph.connect(rollout.fragments, source)
    graph.connect(source, sink)
    with pytest.raises(GraphError, match=told):
        graph.validate()


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: Rollout("CartPole-v1", fragment_length=8), r"action_space is Discrete\(2\), expected Discrete\(.*\)"),
        (lambda: rollout_of([0], agents=2), "is_by_module is True, expected False"),
    ],
    ids=["another action space", "several agents"],
)
def test_rollouts_that_can_not_be_learnt_from_together_are_not_both_taken_in(make: Any, told: str) -> None:
    with trainer() as stream, feeding(stream.address):
        batches = iter(stream)
        next(batches)
        other = graph_over(make(), stream.address, name="other")
        refused = pytest.raises(WireError, match=f"{told}, as NumberedModule of rollout feed .* has")
        with refused, running(*other) as feed:
            while not feed.ended.done():
                next(batches)
            feed.ended.result()


def part_of(
    *seen: Discrete,
    action_space: Discrete = Discrete(2),  # noqa: B008
    agents: tuple[str, ...] = ("agent",),
) -> PartSpaces:
    return PartSpaces(AgentPart(agents, Discrete(2), action_space), seen or (Discrete(2), Discrete(4)))


@pytest.mark.parametrize(
    ("known", "told"),
    [
        ({}, ""),
        ({"is_stateful": True}, "is_stateful is True, expected False"),
        ({"parts": [part_of(action_space=Discrete(3))]}, "action_space is Discrete(3), expected Discrete(2)"),
        ({"parts": [part_of(Discrete(2), Discrete(3))]}, "spaces[1] is Discrete(3), expected Discrete(4)"),
        ({"parts": [part_of(Discrete(2))]}, "spaces[1] is missing, expected Discrete(4)"),
        ({"parts": [part_of(agents=("a", "b"))]}, "agents is ('a', 'b'), expected ('agent',)"),
        ({"weights": {"a": (3,), "b": (2, 5)}}, "the shape of weight 'b' is (2, 5), expected (2, 4)"),
        ({"weights": {"a": (3,)}}, "the shape of weight 'b' is missing, expected (2, 4)"),
        ({"weights": {"a": (3,), "b": (2, 4), "c": ()}}, "the shape of weight 'c' is (), expected none of that name"),
    ],
)
def test_what_differs_is_told(known: dict[str, Any], told: str) -> None:
    one, other = RolloutPeer(ReceiverSession(bytes(16))), RolloutPeer(ReceiverSession(bytes(16)))
    for source in (one, other):
        source.rollout = replace(UNKNOWN, parts=[part_of()], weights={"a": (3,), "b": (2, 4)})
    one.rollout = replace(one.rollout, **known)
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

    with trainer(yields="fragments", join_timeout=0.5) as stream:
        with pytest.raises(KeyError, match="watched"), feeding(stream.address, [0], sink={"watch": fails}) as feed:
            await_come(stream)
            with pytest.raises(RunError, match="the rollout has failed: KeyError: 'watched'"):
                for _ in stream:
                    fails_now.set()
            feed.ended.result(60)


def test_a_rollout_that_raises_has_not_come_to_its_end_and_whoever_waits_for_a_goodbye_is_told(tmp_path: Path) -> None:
    async def main(address: str) -> None:
        graph, _, sink = graph_over(doomed(tmp_path), address)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(sink.wait_goodbye)  # would keep the group from ending
            with pytest.raises(RuntimeError, match="it broke"):
                async with graph.run() as run:
                    await run.wait()

    with ThreadPoolExecutor() as threads, trainer(yields="fragments", limits=HASTY, join_timeout=0.5) as stream:
        ended = threads.submit(anyio.run, main, str(stream.address))
        await_come(stream)
        told = r"every rollout is lost and none came within 0\.5 s: .* the rollout has failed: RuntimeError: it broke"
        with pytest.raises(RunError, match=told):
            list(stream)
        ended.result(60)


def test_a_seed_may_be_any_whole_number() -> None:
    with trainer() as stream, feeding(stream.address, seed=1 << 70, num_fragments=2) as feed:
        assert sum(len(batch["rewards"]) for batch in stream) == feed.rollout.num_steps


@pytest.mark.slow
@pytest.mark.wait_times(first_word_s=0.02)
def test_both_ends_say_that_they_wait_and_that_the_connection_is_back(caplog: pytest.LogCaptureFixture) -> None:
    names, options = set(), {"lanes": 1, "num_fragments": 9, "sink": {"name": "b1"}}
    with trainer(yields="fragments") as stream:
        with closing(BrokenWire(stream.address, lambda: None)) as wire, feeding(wire.address, **options):
            there = f"trainer {wire.address}"
            for count, _ in enumerate(stream):
                names |= {stream.handed[0].source, *stream.sources}
                if count in (2, 5):
                    caplog.clear()
                    wire.go_down()
                    await_that(lambda: len(re.findall(rf"waiting for \d+ s: {there}: ", caplog.text)) >= 2)
                    await_that(lambda: len(re.findall(r"waiting: rollout b1 \(.*\) is lost since", caplog.text)) >= 2)
                    wire.is_down = False
                    await_that(lambda: re.search(rf"{there}: connected again after \d+\.\d s", caplog.text))
                    await_that(lambda: re.search(r"rollout b1 \(.*\) is connected again after \d+\.\d s", caplog.text))
    assert count == 8
    assert names == {"b1"}


@pytest.mark.slow
@pytest.mark.wait_times(first_word_s=0.02)
def test_a_rollout_whose_trainer_is_away_for_longer_than_it_may_be_ends() -> None:
    with ThreadPoolExecutor() as threads, trainer(yields="fragments") as stream:
        with closing(BrokenWire(stream.address, lambda: None)) as wire:
            there, fragments = wire.address, iter(stream)
            fed = threads.submit(feed, rollout_of([0]), there, limits=SHORT, retry_s=0.5)
            next(fragments)
            wire.go_down()
            with pytest.raises(WireError, match=rf"trainer {there} not reached for 0\.5 s: connection lost"):
                fed.result(60)
        stream.expect_no_more()


SECRET = "correct horse battery staple"


def refused_by(stream: TrainerStream, told: str) -> None:
    """The stream turns somebody away, and says why once it has waited for long enough."""
    stream._listener.open()
    await_that(lambda: any(re.search(told, each) for each in stream._listener.refusals))
    with pytest.raises(RunError, match=f"0 of 1 rollouts came within 0.01 s: listening on .*{told}"):
        next(iter(stream))


def test_a_secret_is_proved_by_both_ends() -> None:
    with trainer(secret=SECRET, yields="fragments") as stream:
        with feeding(stream.address, num_fragments=2, sink={"secret": SECRET}):
            assert len(list(stream)) == 2


@pytest.mark.parametrize(
    ("at_trainer", "at_rollout", "told"),
    [
        ({"secret": SECRET}, {"secret": "another"}, "proof.mac: the rollout has another secret"),
        ({"secret": SECRET}, {}, "the trainer asks for a secret, and this rollout has none"),
        (
            {"yields": "fragments"},
            {"sends": "batches"},
            "this rollout sends train batches, and the trainer has yields='fragments'",
        ),
    ],
)
def test_a_rollout_that_does_not_fit_is_refused_at_both_ends(
    at_trainer: dict[str, Any], at_rollout: dict[str, Any], told: str
) -> None:
    with trainer(join_timeout=0.01, **at_trainer) as stream:
        with pytest.raises(WireError, match=told), feeding(stream.address, sink=at_rollout, num_fragments=1) as feed:
            refused_by(stream, told)
            feed.ended.result(60)


IN_MEMORY = {"address": "shm:/x", "tls": ssl.create_default_context()}


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"on_excess": "pace"}, "on_excess='pace' is for fragments older than max_lag, expected max_lag=0 or more"),
        ({"on_excess": "mask"}, "on_excess='mask' is for fragments older than max_lag"),
        ({"on_excess": "mask", "yields": "fragments"}, "is for batches, expected another one with yields='fragments'"),
        (
            {"on_excess": "pace", "yields": Batches(fragments=3)},
            "a batch is one fragment of every lane, expected Batch",
        ),
        ({"module": "x"}, "module is 'x', expected a module, or module id -> module"),
        ({"module": NumberedModule}, "module is <class .*NumberedModule'>, expected a module"),
        (
            {"watch": Watch(on_stall="raise")},
            "on_stall is 'raise', expected 'log': a trainer's stream has no stall doctor",
        ),
        ({"yields": "steps"}, "yields is 'steps', expected one of 'batches', 'fragments', 'Batches\\(...\\)'"),
        ({"sources": 0}, "sources is 0, expected a whole number from 1 on"),
        ({"on_excess": "wait"}, "on_excess is 'wait', expected one of 'drop', 'pace', 'mask', 'raise'"),
        ({"max_lag": -1}, "max_lag is -1, expected a whole number from 0 on"),
        ({"on_excess": "raise"}, "on_excess='raise' is for fragments older than max_lag"),
        ({"secret": 5}, "secret is of type int, expected text or bytes"),
        ({"address": None}, "address None, expected a string: 'tcp://host:port', .*, 'unix:/path' or 'shm:/path'"),
        ({"tls": ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)}, "tls is a client's context, expected a server's"),
        ({"address": "tcp://0.0.0.0:7020"}, "without a secret, expected one, or a loopback address or Unix socket"),
        (IN_MEMORY, "address 'shm:/x' with tls: memory is not encrypted, expected tls=None"),
        *(
            ({"address": address}, "expected an absolute path of at most 103 bytes behind 'shm:'")
            for address in ("shm:x", "shm:/" + "x" * 103, "shm:/\0")
        ),
    ],
)
def test_what_a_stream_can_not_work_with_is_refused_when_it_is_made(options: dict[str, Any], told: str) -> None:
    with pytest.raises((ValueError, WireError), match=told):
        TrainerStream(**{"address": "tcp://127.0.0.1:0", **options})


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (partial(Batches, learner_connector=3), "learner_connector is 3, expected a function that returns a piece"),
        (partial(Batches, fragments=0), "fragments is 0, expected a whole number from 1 on"),
        (partial(feed, None, "tcp://127.0.0.1:1"), "rollout is None, expected a Rollout or a MultiAgentRollout"),
    ],
)
def test_what_is_no_batch_and_no_rollout_is_refused(call: Callable[[], object], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        call()


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (
            partial(TrainerStream, fragments_per_batch=4, trace=None),
            r"TrainerStream has no keyword 'fragments_per_batch', expected yields=.*; 'trace', expected watch=",
        ),
        (
            lambda address: TrainerProcess(print, stream={"log_x": "steps"}),
            r"TrainerStream has no keyword 'log_x', expected watch=Watch\(log_x=…\)",
        ),
        (
            lambda address: TrainerProcess(print, stream={"max_lagg": 1}),
            "TrainerStream has no keyword 'max_lagg', expected 'max_lag'",
        ),
        (
            lambda address: TrainerProcess(print, yields="fragments", learner_connector=None, lingers=1),
            r"TrainerProcess has no keyword 'yields', expected stream=dict\(yields=…\); 'learner_connector', expected "
            r"stream=dict\(yields=Batches\(learner_connector=…\)\); 'lingers', expected 'linger'",
        ),
        (
            lambda address: TrainerProcess(print, stream={1: 2}),
            r"TrainerStream has no keyword 1, expected one of those in help\(TrainerStream\)",
        ),
        (
            partial(feed, None, trace="x"),
            r"feed has no keyword 'trace', expected watch=Watch\(trace=…\) of the rollout",
        ),
        (partial(feed, None, max_lag=1), r"feed has no keyword 'max_lag', expected TrainerStream\(max_lag=…\)"),
        (
            lambda address: TrainerProcess(print, stream={"address": address}),
            r"TrainerStream has no keyword 'address', expected none, for it has its own",
        ),
        (
            partial(TrainerStream, join_timeout=4, prefetched=2),
            r"'join_timeout', expected sources=Sources\(join_timeout=…\); 'prefetched', expected 'prefetch'",
        ),
        (partial(TrainerSink, lingers=4), "TrainerSink has no keyword 'lingers', expected 'linger'"),
        (partial(DatasetSource, batchsize=4), "DatasetSource has no keyword 'batchsize', expected 'batch_size'"),
        (
            partial(RolloutHost, secret="s"),
            r"RolloutHost has no keyword 'secret', expected connect\(address, secret=…\), or listening",
        ),
        (partial(EnvHost, tls=None), r"EnvHost has no keyword 'tls', expected connect\(address, tls=…\), or listening"),
    ],
)
def test_a_keyword_that_has_moved_is_told_its_place(call: Any, told: str) -> None:
    with pytest.raises(TypeError, match=told):
        call("tcp://127.0.0.1:0")


@pytest.mark.parametrize(
    ("made", "wrong", "told"),
    [
        (GeneralAdvantageEstimation, "lam", "lambda_=…"),
        (GeneralAdvantageEstimation, "gae_lambda", "lambda_=…"),
        (VTrace, "rho_clipped", "'rho_clip'"),
        (EpsilonGreedy, "epsilon", "schedule=…"),
        (DefaultModelConfig, "fcnet_hidden", "'fcnet_hiddens'"),
        (Replay, "batchsize", "'batch_size'"),
        (Batches, "fragment", "'fragments'"),
        (Sources, "join_timeouts", "'join_timeout'"),
        (Forward, "device", "device=… of the rollout"),
        (Forward, "maxbatch", "'max_batch'"),
        (Timeouts, "steps", "'step'"),
        (Watch, "stall_afters", "'stall_after'"),
    ],
)
def test_a_constructor_tells_the_keyword_that_was_meant(made: type, wrong: str, told: str) -> None:
    with pytest.raises(TypeError, match=f"^{made.__name__} has no keyword '{wrong}', expected {told}$"):
        made(**{wrong: 1})


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"linger": -1}, "linger is -1, expected seconds from 0 on"),
        ({"max_bytes": 0}, "max_bytes is 0, expected a whole number from 1 on"),
        ({"secret": 5}, "secret is of type int, expected text or bytes"),
        ({"address": None}, "address None, expected a string: .*'shm:/path'"),
        ({"address": "tcp://example.org:7020"}, "without a secret, expected one, or a loopback address or Unix soc"),
        (IN_MEMORY, "address 'shm:/x' with tls: memory is not encrypted, expected tls=None"),
    ],
)
def test_what_a_sink_can_not_work_with_is_refused_when_it_is_made(options: dict[str, Any], told: str) -> None:
    given = {"address": "tcp://127.0.0.1:1", **options}
    with pytest.raises((ValueError, WireError), match=told):
        TrainerSink(**given)
    with pytest.raises((ValueError, WireError), match=told):
        feed(Rollout("CartPole-v1"), **given)


@pytest.mark.parametrize(
    ("name", "value"), [("learner_connector", lambda *_: GeneralAdvantageEstimation()), ("max_lag", 1)]
)
def test_how_batches_are_made_is_said_to_the_trainer(name: str, value: Any) -> None:
    rollout = Rollout("CartPole-v1", prefetch=1, **{name: value})
    with pytest.raises(ValueError, match=rf"the rollout has {name}=, .*: expected TrainerStream\(.*{name}=…\)+ there"):
        feed(rollout, "tcp://127.0.0.1:1")


def test_a_secret_that_is_none_and_shared_memory_are_refused_by_hosts_and_gateways_and_nothing_is_left_open() -> None:
    for make in (
        lambda: EnvHost(makers(1)).connect("tcp://127.0.0.1:1", secret=5),  # type: ignore[arg-type]
        lambda: RemoteEnvs.listen("tcp://127.0.0.1:0", secret=5),  # type: ignore[arg-type]
        lambda: RemoteEnvs.connect("tcp://127.0.0.1:1", secret=5),  # type: ignore[arg-type]
    ):
        with pytest.raises(WireError, match="secret is of type int, expected text or bytes"):
            make()
    for other in (RemoteEnvs.listen, lambda text: EnvHost(makers(1)).connect(text)):
        with pytest.raises(WireError, match=r"address 'shm:/x', expected 'tcp://host:port'"):
            other("shm:/x")


def test_an_address_that_is_none_or_taken_is_refused(tmp_path: Path) -> None:
    taken = pytest.raises(RunError, match=r"can't listen on tcp://127.0.0.1:.*Address already in use")
    with trainer() as stream, taken:
        TrainerStream(str(stream.address)).__enter__()
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match=r"can't listen on shm:.*something else is there, expected nothing or a socket"):
        TrainerStream(f"shm:{tmp_path}/file").__enter__()
    assert (tmp_path / "file").exists()
    with pytest.raises(RunError, match=r"can't listen on unix:.*No such file or directory"):
        TrainerStream(f"unix:{tmp_path}/missing/trainer").__enter__()


def test_hosts_are_no_rollouts_and_a_trainer_is_no_gateway() -> None:
    with trainer(join_timeout=0.01) as stream:
        with pytest.raises(WireError, match=r"hello.role is 'env', expected 'source': this is a trainer"):
            with hosting(stream.address, makers(0), kind=EnvHost):
                refused_by(stream, "hello.role is 'env'")
    envs = listening()
    with hosting(envs.addresses[0], makers(0)):
        with Rollout(envs, module=NumberedModule(), fragment_length=8) as other:
            next(iter(other.fragments()))
            graph, rollout, sink = graph_of(envs.addresses[0], (0,), num_fragments=1)
            told = "hello.role is 'source', expected 'env'"
            with pytest.raises(WireError, match=told), running(graph, rollout, sink) as feed:
                for _ in other.fragments():
                    if feed.ended.done():
                        break


@pytest.mark.slow
def test_a_sink_gets_what_it_was_told_to_send() -> None:
    with trainer(join_timeout=2.0, limits=HASTY) as stream:
        rollout, graph = rollout_of([0], num_fragments=2), Graph("no")
        sink = TrainerSink(stream.address, sends="batches")
        graph.add(rollout=rollout, passes_on=lambda fragments: fragments)
        graph.connect("rollout.fragments", "passes_on")
        graph.connect("passes_on", sink)
        refused = pytest.raises(TypeError, match="a Fragment came to a sink that sends batches, expected these")
        with refused, running(graph, rollout, sink) as feed:
            with pytest.raises((RunError, StopIteration)):
                next(iter(stream))
            feed.ended.result(60)


PART = {"agents": ["agent"], "action_space": {"kind": "Sphere"}}
BATCHES = {"sends": "batches"}
BATCH = {"batch": True, "policy_version": 0, "steps": 1, "episodes": []}
ENDS = np.zeros(1)


@pytest.mark.parametrize(
    ("said", "sent", "told"),
    [
        ({"parts": [{**PART, "spaces": [{"kind": "Sphere"}]}]}, None, "Sphere"),
        ({"weights": {"a": 7}}, None, "TypeError"),
        ({"letters": "all"}, None, "unexpected keyword argument 'letters'"),
        ({"version": 1.5}, None, "a number in hello.metadata is 1.5, expected a whole number"),
        ({"aside": [[0, "x"]]}, None, "a number in hello.metadata is 'x', expected a whole number"),
        ({}, Fragment(0, 1, {}, {}), "layout is None, expected a map"),
        ({}, Fragment(0, 1, {}, {"layout": {"num_slots": True}}), "layout.num_slots is True, expected a whole number"),
        ({}, Fragment(0, 1, {}, {"lent": {"new": [], "gone": [7]}, "batch": True}), "a train batch among fragments"),
        ({}, Fragment(0, 1, {}, {"batch": True}), "a train batch among fragments"),
        (BATCHES, Fragment(0, 1, {}, BATCH | {"steps": "x"}), "steps is 'x', expected a whole number"),
        (BATCHES, Fragment(0, 1, {}, BATCH | {"episodes": [[[], 1, ENDS, ENDS]]}), "episodes is [], expected a string"),
        (BATCHES, Fragment(0, 1, {}, BATCH | {"episodes": [[None, 1, ENDS, 7]]}), "episodes is 7, expected an array"),
        (BATCHES | {"is_by_module": True}, Fragment(0, 1, {"a": ENDS}, BATCH), "it is no train batch by module"),
        ({}, Metrics({"left": [0, "x"]}), "left[1] is 'x', expected a whole number"),
        ({}, Metrics({"lanes": 1 << 40}), "1099511627776 lanes, expected at most 4096"),
        ({}, Metrics({"last": 1 << 60}), "last is 1152921504606846976, expected a whole number"),
    ],
)
def test_a_rollout_that_says_or_sends_nonsense_is_refused(said: dict[str, Any], sent: Any, told: str) -> None:
    with trainer(join_timeout=60.0) as stream:
        rollout, sink = rollout_of([0]), TrainerSink(str(stream.address))
        Graph("feed").connect(rollout.fragments, sink)
        hello = sink._uplink.hello()
        sink.close()
        raw = RawSource(stream, replace(hello, metadata={**hello.metadata, **said}))
        stream._begin_next()
        if sent is not None:
            raw.welcomed()
            raw.sock.sendall(b"".join(encode(sent)))
        assert told in raw.refusal()


class RawSource:
    """A source made by hand."""

    def __init__(self, stream: TrainerStream, hello: Hello) -> None:
        address: Any = stream.address
        self.sock = socket.create_connection((address.host, address.port))
        session = SenderSession(hello.session)
        session.given = 1
        self.connection = SenderConnection(hello, session, secret=None, limits=Limits(), now=0.0)

    def events(self) -> list[Any]:
        """The next ones."""
        while True:
            for buffer in self.connection.outgoing():
                self.sock.sendall(buffer)
            data = self.sock.recv(1 << 16)
            events = self.connection.receive(data, 0.0)
            if events or not data:
                return events

    def welcomed(self) -> None:
        """Wait until the trainer has taken it in."""
        self.events()
        await_that(lambda: self.connection.next)

    def refusal(self) -> str:
        """Return the trainer's last message."""
        while self.connection.error is None:
            self.events()
        self.sock.close()
        return str(self.connection.error)


def test_a_connection_may_be_encrypted_at_both_ends_and_not_at_one(certificates: dict[str, ssl.SSLContext]) -> None:
    server, client = certificates["server"], certificates["client"]
    with trainer(tls=server, secret=SECRET, yields="fragments") as stream:
        with feeding(stream.address, num_fragments=3, sink={"tls": client, "secret": SECRET}) as feed:
            assert sum(fragment.num_steps for fragment in stream) == feed.rollout.num_steps
    with trainer(tls=server, join_timeout=0.01) as stream:
        refused = pytest.raises(WireError, match="the trainer speaks TLS and the rollout does not")
        with refused, feeding(stream.address, num_fragments=1) as feed:
            refused_by(stream, "the trainer speaks TLS and the rollout does not")
            feed.ended.result(60)
    with pytest.raises(WireError, match="no host name to check in a certificate"):
        graph_of("unix:/tmp/trainer", (0,), sink={"tls": client})


def test_why_a_trainer_has_failed_is_told_to_its_rollouts_which_wait_for_another(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    address = f"unix:{tmp_path}/trainer"
    with ThreadPoolExecutor() as threads:
        with failing(address, yields="fragments") as stream:
            fed = threads.submit(feed, rollout_of([0], num_fragments=3), stream.address, limits=SHORT)
            next(iter(stream))
        told = f"waiting: trainer {address}: it has failed: ZeroDivisionError: no steps"
        await_that(lambda: told in caplog.text)
        assert f"{told}; it is dialled again until it answers" in [record.getMessage() for record in caplog.records]
        with trainer(address, yields="fragments") as stream:
            assert [fragment.sequence for fragment in stream] == [0, 1, 2]
        fed.result(60)
    assert re.search(rf"trainer {address}: connected again after \d+\.\d s", caplog.text)


def test_why_a_trainer_has_failed_is_told_to_nobody_who_has_not_proved_the_secret() -> None:
    with pytest.raises(KeyError), trainer(secret=SECRET, join_timeout=0) as stream:
        with pytest.raises(RunError, match="0 of 1 rollouts came"):
            next(iter(stream))  # from now on it takes them in
        assert isinstance(stream.address, TcpAddress)
        stranger = socket.create_connection((stream.address.host, stream.address.port))
        await_that(lambda: list(stream._listener._loop.peers))
        raise KeyError("hunter2")
    with stranger:
        stranger.settimeout(60)
        assert stranger.recv(1 << 16) == b""


def test_leaving_a_trainer_by_no_error_of_its_own_is_no_failure() -> None:
    assert _failure_of(None) is None
    assert _failure_of(KeyboardInterrupt()) == _failure_of(SystemExit(0)) == "it was interrupted"
    assert _failure_of(ValueError("x")) == "it has failed: ValueError: x"
