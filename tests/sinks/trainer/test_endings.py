"""Trainers and rollouts that come late, end, raise, are killed or are somebody else: both ends know, none hangs."""

import json
import logging
import re
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest
from ending_envs import Doomed
from feeding_rollouts import (
    HASTY,
    SHORT,
    await_come,
    failing,
    feeding,
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
from remote_hosts import BrokenWire
from remote_rollouts import await_that

from rollflow import Graph, Rollout, feed
from rollflow.nodes.offloaded.fragment_message import PartSpaces
from rollflow.sinks import TrainerSink
from rollflow.sinks.trainer.listener import difference
from rollflow.sinks.trainer.messages import UNKNOWN
from rollflow.sinks.trainer.rollout_peer import RolloutPeer
from rollflow.stream import GraphError, RunError
from rollflow.stream.data.errors import WireError
from rollflow.stream.multi_agent.agent_part import AgentPart
from rollflow.stream.wire import Goodbye, Limits, TrainerSession, encode

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
        with pytest.raises(RunError, match="the stream has begun, expected load_state_dict before the first batch"):
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
        assert (
            "it has 2 fragments that it has not moved on from; leave the run, or press Ctrl-C again, to give it up"
            in caplog.text
        )
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
    one, other = RolloutPeer(TrainerSession(bytes(16))), RolloutPeer(TrainerSession(bytes(16)))
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
