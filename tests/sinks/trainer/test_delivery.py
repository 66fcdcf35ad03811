"""Every fragment is handed over once, and is as fresh as it must be, whoever is killed, cut off or frozen meanwhile."""

import os
import random
import signal
import socket
import threading
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from math import inf
from pathlib import Path
from typing import Any

import pytest
from feeding_rollouts import HASTY, SHORT, Feed, failing, feeding, sequences_of, trainer
from killable_trainer import FeedChild, Record, TrainerChild, check_whole, lost_by, records_of
from memory_lending import shared_address
from remote_rollouts import await_that

from rollflow.stream.net.dialler import Dialler
from rollflow.stream.wire import Limits

pytestmark = pytest.mark.wait_times(first_pause_s=0.01)


def end_whole(feed: Feed, child: TrainerChild, folder: Path) -> None:
    """Have the rollout end, and its trainer with it, which has been handed over every step once."""
    feed.drain()
    feed.ended.result(60)
    child.process.join()
    assert child.process.exitcode == 0
    check_whole(records_of(folder))
    assert sum(record.steps for record in records_of(folder)) == feed.rollout.num_steps
    assert feed.sink.lost == {}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scheme", "kills", "options"),
    [
        ("unix", 5, {}),
        ("unix", 5, {"ack": "manual", "agents": 2}),
        ("tcp", 5, {}),
        ("tcp", 5, {"yields": "batches", "agents": 2}),
        ("shm", 5, {"yields": "batches"}),
        ("shm", 5, {"agents": 2}),
        ("unix", 8, {"yields": "batches", "max_lag": 0}),
        ("unix", 5, {"yields": "batches", "max_lag": 2, "agents": 2}),
    ],
)
def test_a_trainer_that_is_killed_and_started_again_gets_the_rest(
    scheme: str, kills: int, options: dict[str, Any], tmp_path: Path
) -> None:
    """With `max_lag` the rollout is paced, and the trainer saves before it publishes."""
    drawn, agents = random.Random(kills), options.get("agents", 0)
    with shared_address() as shared, socket.create_server(("127.0.0.1", 0)) as unused:
        by_scheme = {"shm": shared, "tcp": f"tcp://127.0.0.1:{unused.getsockname()[1]}"}
        address = by_scheme.get(scheme, f"unix:{tmp_path}/trainer")
        unused.close()
        with feeding(address, lanes=2, agents=agents, sink={"max_bytes": 1 << 20}) as feed:
            for _ in range(kills):
                child = TrainerChild(address, tmp_path, **{"ack": "auto", **options})
                # Somewhere in what it does: a little after it has got so far.
                goal = len(records_of(tmp_path)) + drawn.randrange(6)
                await_that(lambda goal=goal: len(records_of(tmp_path)) >= goal)
                threading.Event().wait(drawn.random() * 0.02)
                child.kill()
            assert feed.sink._session.nbytes <= (1 << 20)
            child = TrainerChild(address, tmp_path, **{"ack": "auto", **options})
            end_whole(feed, child, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("scheme", "ack"), [("unix", "auto"), ("shm", "manual")])
def test_one_that_is_frozen_beyond_every_limit_loses_nothing(
    scheme: str, ack: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is taken for lost, dialled in vain until several handshakes were given up, and passes all its own limits."""
    dialled: list[int] = []
    call = Dialler._call
    monkeypatch.setattr(Dialler, "_call", lambda self, *given: dialled.append(1) or call(self, *given))
    with shared_address() as shared:
        address = f"{scheme}:{shared.removeprefix('shm:')}"
        with feeding(address, lanes=2, sink={"limits": replace(HASTY, handshake_s=0.5)}) as feed:
            child = TrainerChild(address, tmp_path, ack=ack, limits=Limits(heartbeat_s=0.3, grace_s=0.5))
            for _ in range(2):
                goal = len(records_of(tmp_path)) + 5
                await_that(lambda goal=goal: len(records_of(tmp_path)) >= goal)
                assert child.process.pid is not None
                os.kill(child.process.pid, signal.SIGSTOP)
                await_that(lambda: feed.sink._uplink.problem)
                held, most = feed.sink._session.given, len(dialled) + 4
                await_that(lambda most=most: len(dialled) >= most)
                assert feed.sink._session.given <= held + 2 * 2  # a window of both lanes' fragments
                os.kill(child.process.pid, signal.SIGCONT)
                await_that(lambda: not feed.sink._uplink.problem)
            end_whole(feed, child, tmp_path)


def test_a_trainer_that_raises_is_waited_for_and_one_that_ends_says_goodbye(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/trainer"
    with feeding(address, num_fragments=6) as feed:
        with failing(address, yields="fragments") as stream:
            first = [next(iter(stream))]
        assert feed.sink.goodbye is None
        with trainer(address, yields="fragments") as stream:
            second = list(islice(stream, 3))
        await_that(lambda: feed.sink.goodbye == "the trainer has ended")
        with trainer(address, yields="fragments") as stream:
            third = list(stream)
    assert sequences_of(first) == {0: [0]}
    assert sequences_of([*second, *third]) == {0: [0, 1, 2, 3, 4, 5]}  # the first one had not moved on


@pytest.mark.wait_times(first_word_s=0.05)
def test_a_rollout_with_no_trainer_keeps_bounds_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with feeding(f"unix:{tmp_path}/trainer", sink={"linger": 0.1}) as feed:
        await_that(lambda: "has not been reached" in caplog.text or "No such file" in caplog.text)
        assert feed.rollout.num_steps == 0  # it begins with its trainer's weights
    assert feed.sink.lost == {}


def test_what_a_trainer_never_got_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    address = f"unix:{tmp_path}/trainer"
    with feeding(address) as feed:
        with failing(address, yields="fragments", prefetch=0) as stream:
            next(iter(stream))
        await_that(lambda: feed.sink._uplink.problem)
    assert feed.sink.lost == {"undelivered": feed.sink._session.given * 8 * 4}
    assert "transitions not delivered: trainer unix:" in caplog.text


def trainer_of(address: str, folder: Path, max_lag: int | None, **more: Any) -> TrainerChild:
    return TrainerChild(address, folder, ack="auto", yields="batches", limits=SHORT, max_lag=max_lag, **more)


def await_batches(folder: Path, batches: int) -> None:
    """Wait until so many more have been saved."""
    goal = len(records_of(folder)) + batches
    await_that(lambda: len(records_of(folder)) >= goal)


def steps_of(records: Sequence[Record], slot: int) -> list[int]:
    """The numbers of a slot's steps, as they came."""
    spans = [record.numbers[str(slot)] for record in records if str(slot) in record.numbers]
    return [number for first, last in spans for number in range(first, last + 1)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("address", "sends", "max_lag"),
    [("shm", {}, 0), ("unix", {}, 1), ("unix", {"sends": "batches", "fragments_per_batch": 2}, None)],
    indirect=["address"],
)
def test_trainers_and_rollouts_may_be_killed_anytime(
    max_lag: int | None, sends: dict[str, Any], address: str, tmp_path: Path
) -> None:
    """A rollout's own steps are whole up to some moment; those of one that goes on are, to the end."""
    drawn, sink = random.Random(11), sends | {"limits": SHORT}
    with feeding(address, (0, 1, 2, 3), lanes=2, sink=sink | {"name": "steady"}) as steady:
        trainer = trainer_of(address, tmp_path, max_lag, sources=2)
        for life in range(1, 6):
            other = FeedChild(address, [10 * life, 10 * life + 1], seed=life, lanes=2, sink=sink | {"name": "other"})
            await_batches(tmp_path, 1 + drawn.randrange(6))
            threading.Event().wait(drawn.random() * 0.02)
            order = drawn.choice(["r", "t", "rt", "tr"])
            for struck in order:
                if struck == "r":
                    other.kill()
                else:
                    trainer.kill()
                    trainer = trainer_of(address, tmp_path, max_lag, sources=2)
            if "r" not in order:
                await_batches(tmp_path, 2)
                other.kill()
        last = FeedChild(address, [90, 91], seed=90, lanes=2, num_fragments=5, sink=sink | {"name": "other"})
        await_that(lambda: not last.process.is_alive())
        steady.drain()
        steady.ended.result(60)
        trainer.process.join()
    assert last.process.exitcode == trainer.process.exitcode == 0
    records = records_of(tmp_path)
    check_whole(records)
    assert sum(len(steps_of(records, slot)) for slot in range(4)) == steady.rollout.num_steps
    # Rounds wait for all under pace alone: else one that was killed at once may have given nothing.
    assert max_lag is None or all(steps_of(records, slot) for slot in (10, 20, 30, 40, 50, 90))


@pytest.mark.slow
@pytest.mark.parametrize("max_lag", [0, 1])
def test_one_killed_between_publishing_and_saving_counts_what_is_lost(max_lag: int, tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/trainer"
    with feeding(address, (0, 1, 2, 3), lanes=2, sink={"limits": SHORT}) as feed:
        for dies_at in (2, 0, 0, 3, 1):
            child = trainer_of(address, tmp_path, max_lag, dies_at=dies_at)
            child.process.join(30)
            assert child.process.exitcode == -signal.SIGKILL
        child = trainer_of(address, tmp_path, max_lag, dies_at=inf)
        await_batches(tmp_path, 3)
        feed.drain()
        feed.ended.result(60)
        child.process.join()
    assert child.process.exitcode == 0
    records = records_of(tmp_path)
    for slot in range(4):
        numbers = steps_of(records, slot)
        assert numbers == sorted(set(numbers))
    lost, missed = lost_by(tmp_path)
    assert set(lost) == {"max_lag"}
    assert missed
    left_out = lost["max_lag"] + missed * 16
    assert sum(record.steps for record in records) + left_out == feed.rollout.num_steps
