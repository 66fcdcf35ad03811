"""Under "pace" no batch is older than the bound and none comes twice, whoever is killed meanwhile and started again."""

import random
import signal
import threading
from collections.abc import Sequence
from math import inf
from pathlib import Path
from typing import Any

import pytest
from feeding_rollouts import SHORT, feeding
from killable_trainer import FeedChild, Record, TrainerChild, check_whole, lost_by, records_of
from remote_rollouts import await_that

pytestmark = pytest.mark.slow

SENDS: dict[str, dict[str, Any]] = {"fragments": {}, "batches": {"sends": "batches", "fragments_per_batch": 2}}


def trainer_of(address: str, folder: Path, max_lag: int, **more: Any) -> TrainerChild:
    return TrainerChild(address, folder, ack="auto", yields="batches", limits=SHORT, max_lag=max_lag, **more)


def await_batches(folder: Path, batches: int) -> None:
    """Wait until so many more have been saved."""
    goal = len(records_of(folder)) + batches
    await_that(lambda: len(records_of(folder)) >= goal)


def steps_of(records: Sequence[Record], slot: int) -> list[int]:
    """The numbers of a slot's steps, as they came."""
    spans = [record.numbers[str(slot)] for record in records if str(slot) in record.numbers]
    return [number for first, last in spans for number in range(first, last + 1)]


@pytest.mark.parametrize(("address", "sends"), [("shm", "fragments"), ("unix", "batches")], indirect=["address"])
@pytest.mark.parametrize("max_lag", [0, 1])
def test_trainers_and_rollouts_may_be_killed_at_any_moment(
    max_lag: int, sends: str, address: str, tmp_path: Path
) -> None:
    """A rollout's own steps are whole up to some moment; those of one that goes on are, to the end."""
    drawn, sink = random.Random(11), SENDS[sends] | {"limits": SHORT}
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
    assert all(steps_of(records, slot) for slot in (10, 20, 30, 40, 50, 90))


@pytest.mark.parametrize("sends", SENDS)
@pytest.mark.parametrize("max_lag", [0, 1])
def test_one_that_is_killed_between_publishing_and_saving_leaves_out_what_it_counts(
    max_lag: int, sends: str, tmp_path: Path
) -> None:
    address = f"unix:{tmp_path}/trainer"
    with feeding(address, (0, 1, 2, 3), lanes=2, sink=SENDS[sends] | {"limits": SHORT}) as feed:
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
    left_out = lost["max_lag"] + missed * (32 if sends == "batches" else 16)
    assert sum(record.steps for record in records) + left_out == feed.rollout.num_steps
