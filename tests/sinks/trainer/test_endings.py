"""Trainers and rollouts that come late, leave early or are somebody else: nobody hangs, and nothing is made up."""

import json
import logging
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
from feeding_rollouts import SHORT, await_come, feeding, graph_over, rollout_of, running, sequences_of, trainer, weights
from remote_rollouts import await_that

from rollflow import Rollout, TrainerStream, feed
from rollflow.stream import LagError, RunError
from rollflow.stream.data.errors import WireError
from rollflow.stream.wire import Goodbye, Limits, encode

STATE: dict[str, Any] = {"version": 5, "weights": [5, "ab" * 8], "sources": {}}


def at(address: str, **options: Any) -> TrainerStream:
    return TrainerStream(address, limits=SHORT, **options)


# Trainers that go on from a state


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
    with trainer(max_lag=0, on_excess=on_excess) as stream:
        stream.load_state_dict(STATE)
        with (
            feeding(stream.address),
            pytest.raises(
                RunError, match="is 5 policy versions old, and no weights have been published here: publish those that"
            ),
        ):
            next(iter(stream))


def test_under_pace_what_was_made_for_the_one_before_is_left_out(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/trainer"
    with feeding(address, num_fragments=6, lanes=1) as feed:
        with pytest.raises(KeyError), at(address, max_lag=0, on_excess="pace") as stream:
            for _ in stream:
                stream.publish(weights(1.0))
                if stream.version == 3:
                    state = stream.state_dict()
                    raise KeyError
        with at(address, max_lag=0, on_excess="pace") as stream:
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
            with suppress(KeyError), at(address, max_lag=1, on_excess="pace") as stream:
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
        with pytest.raises(KeyError), at(address) as stream:
            stream.publish(weights(1.0))
            for _ in stream:
                if is_learnt:  # else what is saved has been published already
                    state = stream.state_dict()
                stream.publish(weights(2.0))
                state = state if is_learnt else stream.state_dict()
                raise KeyError
        with at(address) as stream:
            stream.load_state_dict(state)
            assert stream.publish(weights(2.0)) == 2
            batches = list(stream)
            assert stream.publish(weights(3.0)) == 3  # the first alone goes on
    assert (batches[-1]["policy_version"] == 2).all()
    assert (batches[-1]["weight"] == 2.0).all()


def test_a_version_that_a_rollout_has_of_another_trainer_is_gone_beyond(tmp_path: Path) -> None:
    address, states = f"unix:{tmp_path}/trainer", dict[str, Any]()
    with feeding(address, num_fragments=12, lanes=1) as feed:
        for name, value in ("one", 1.0), ("other", 2.0):
            with pytest.raises(KeyError), at(address if name == "other" else f"{address}2") as stream:
                stream.publish(weights(value))
                states[name] = stream.state_dict()
                raise KeyError
        with pytest.raises(KeyError), at(address) as stream:
            stream.load_state_dict(states["other"])
            stream.publish(weights(2.0))
            next(iter(stream))
            assert feed.rollout.policy_version == 1
            raise KeyError
        with at(address) as stream:
            stream.load_state_dict({**states["one"], "sources": stream.state_dict()["sources"]})
            assert stream.publish(weights(1.0)) == 1
            batches = list(stream)
            assert stream.version == 2
    assert (batches[-1]["weight"] == 1.0).all()


@pytest.mark.parametrize(
    "entry",
    [
        {"weights": 5},
        {"weights": [5, "ab"]},
        {"weights": [5, "x" * 16]},
        {"weights": [-1, "ab" * 8]},
        {"lost": {"max_lag": -1}},
        {"counted": [1]},
    ],
    ids=str,
)
def test_a_state_that_was_tampered_with_is_refused(entry: dict[str, Any]) -> None:
    with trainer() as stream, pytest.raises(ValueError, match=r"expected what state_dict\(\) gave"):
        stream.load_state_dict({**STATE, **entry})


def test_what_was_lost_is_known_after_a_restart() -> None:
    with trainer() as stream:
        stream.load_state_dict({**STATE, "lost": {"max_lag": 3}})
        assert stream.lost == {"max_lag": 3}
        state = stream.state_dict()
    assert state == {**STATE, "lost": {"max_lag": 3}}


# Rollouts that are drained


def test_a_drained_rollout_whose_trainer_takes_no_more_says_what_it_waits_for(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with trainer(yields="fragments", prefetch=0) as stream, feeding(stream.address, lanes=2) as feed:
        fragments = iter(stream)
        taken = [next(fragments)]
        await_that(lambda: feed.sink.given == 2)  # what the window takes
        assert "drained" not in caplog.text
        feed.drain()
        told = "the run is drained, and what it has made waits for the trainer at tcp:"
        await_that(lambda: told in caplog.text)
        assert "it has 2 fragments that it has not moved on from; leave the run to give it up" in caplog.text
        taken += fragments
    assert caplog.text.count("drained") == 1
    assert sum(fragment.num_steps for fragment in taken) == feed.rollout.num_steps


# Fragments without a transition


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


# Rollouts that are lost for good


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


# Weights and what is done


def test_a_trainer_that_has_ended_publishes_and_acknowledges_no_more() -> None:
    with trainer(ack="manual") as stream, feeding(stream.address, num_fragments=1):
        assert len(list(stream)) == 1
    for late in (stream.ack, lambda: stream.publish(weights(1.0))):
        with pytest.raises(RunError, match="the stream is closed, expected this before its block is left"):
            late()


# Age


def test_age_is_looked_at_when_something_is_handed_over() -> None:
    with trainer(yields="fragments", max_lag=0, on_excess="pace") as stream, feeding(stream.address, lanes=2):
        fragments = iter(stream)
        next(fragments)
        stream.publish(weights(1.0))
        for _ in range(2):  # it is not forgotten either
            with pytest.raises(LagError, match="is 1 policy versions old, expected at most max_lag=0"):
                next(iter(stream))


# Somebody else at the address


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\n\r\n", "frame of 1347703880 bytes"),
        (b"".join(encode(Goodbye("the trainer has ended"))), "goodbye in the handshake: the trainer has ended"),
    ],
    ids=["a proxy", "a stranger's goodbye"],
)
def test_somebody_else_at_the_trainers_address_is_not_taken_for_it(
    words: bytes, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        with feeding(address, num_fragments=2, lanes=1, sink={"linger": None}) as feed:
            sock, _ = listener.accept()
            with closing(sock):
                sock.sendall(words)
                await_that(lambda: told in feed.sink._uplink.problem)
            assert feed.sink.goodbye is None
            listener.close()
            with at(address, yields="fragments") as stream:
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
            with strange_connection(stream):
                fed = threads.submit(feed, rollout_of([0]), str(stream.address), limits=SHORT, retry_s=5.0)
                next(iter(stream))
                stream.__exit__(None, None, None)
        assert fed.result() == "the trainer has ended"


def strange_connection(stream: Any) -> socket.socket:
    """A connection to a trainer that does not say a word."""
    host, _, port = str(stream.address).removeprefix("tcp://").rpartition(":")
    return socket.create_connection((host, int(port)))
