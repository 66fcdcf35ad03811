"""A loader over a trainer's stream knows what its loop was given: nothing comes twice, also after a restart."""

import itertools
import json
import multiprocessing
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from feeding_rollouts import feeding, trainer

from rollflow.sinks import TrainerDataset, TrainerStream
from rollflow.sinks.trainer.ranks.dataset_client import DatasetClient
from rollflow.sinks.trainer.trainer_side.state import BatchItem

pytestmark = [
    pytest.mark.slow,  # processes that import torch, in every test
    pytest.mark.usefixtures("loaders_end_with_their_test"),
]

FED: dict[str, Any] = {"lanes": 1, "fragment_length": 4, "num_fragments": 12}
FORK = multiprocessing.get_context("fork")


def options_of(workers: int, context: str = "fork") -> dict[str, Any]:
    return {"num_workers": workers, "multiprocessing_context": context} if workers else {}


def stream_at(address: str, **options: Any) -> TrainerStream:
    return TrainerStream(address, **{"yields": "fragments", "join_timeout": 60.0, "prefetch": 4, **options})


def sequences(loader: Any) -> list[int]:
    return [fragment.sequence for fragment in loader]


# Restarts


def first_life(address: str, workers: int, ack: Any, stop: int, told: Any) -> None:
    """Train until so many fragments have come, say how far it is, and be gone at once."""
    seen = []
    with stream_at(address, ack=ack) as stream:
        for fragment in stream.dataset().loader(**options_of(workers)):
            seen.append(fragment.sequence)
            if len(seen) == stop:
                told.put((seen, json.dumps(stream.state_dict())))
                told.close()
                told.join_thread()
                os._exit(1)


@pytest.mark.parametrize(("workers", "ack"), [(0, "manual"), (1, "auto"), (1, "manual"), (2, "auto"), (2, "manual")])
def test_who_resumes_goes_on_behind_what_the_loop_was_given(tmp_path: Path, workers: int, ack: Any) -> None:
    address, told = f"unix:{tmp_path}/trainer", FORK.Queue()
    life = FORK.Process(target=first_life, args=(address, workers, ack, 5, told))
    life.start()
    with feeding(address, **FED) as feed:
        seen, state = told.get()
        life.join()
        with stream_at(address, ack=ack) as stream:
            stream.load_state_dict(json.loads(state))
            rest = sequences(stream.dataset().loader(**options_of(workers)))
    assert seen == [0, 1, 2, 3, 4]
    assert rest == [5, 6, 7, 8, 9, 10, 11]
    assert feed.sink.lost == {}


def test_what_was_acknowledged_is_what_the_loop_was_given(tmp_path: Path) -> None:
    address, seen = f"unix:{tmp_path}/trainer", []
    with feeding(address, **FED):
        with pytest.raises(Left), stream_at(address, ack="manual") as stream:
            for fragment in stream.dataset().loader(**options_of(2)):
                seen.append(fragment.sequence)
                if len(seen) == 5:
                    stream.ack()
                if len(seen) == 7:
                    raise Left
        with stream_at(address) as stream:  # without a checkpoint
            rest = sequences(stream.dataset().loader(**options_of(2)))
    assert seen == [0, 1, 2, 3, 4, 5, 6]
    assert rest == [5, 6, 7, 8, 9, 10, 11]


class Left(Exception):
    """Raised to leave a stream that is not done with all."""


# Ranks


def rank_s_life(
    number: int, where: tuple[str, str], workers: int, stop: int, state: str | None, meet: Callable[[], Any], told: Any
) -> None:
    """A rank that stops when so many fragments have come: once both are there, rank 0 says how far they are."""
    address, ranks = where
    if number:
        seen = []
        for fragment in TrainerDataset.connect(ranks, rank=number).loader(**options_of(workers)):
            seen.append(fragment.sequence)
            if len(seen) == stop:
                meet()
                break
        meet()
        told.put((number, seen, None))
        return
    with stream_at(address, ack="manual") as stream:
        stream.load_state_dict(json.loads(state)) if state else None
        seen, saved = [], None
        for fragment in stream.dataset(world_size=2, address=ranks).loader(**options_of(workers)):
            seen.append(fragment.sequence)
            if len(seen) == stop:
                meet()
                saved = json.dumps(stream.state_dict())
                told.put((number, seen, saved))
                told.close()
                told.join_thread()
                meet()
                os._exit(1)
        meet()
    told.put((number, seen, None))


def lives(where: tuple[str, str], workers: int, stops: tuple[int, int], state: str | None) -> tuple[Any, Any]:
    """Return the items that two ranks have seen, and the progress that rank 0 reported."""
    told, meeting = FORK.Queue(), FORK.Barrier(2)
    processes = [
        FORK.Process(target=rank_s_life, args=(number, where, workers, stops[number], state, meeting.wait, told))
        for number in (0, 1)
    ]
    for process in processes:
        process.start()
    answers = sorted([told.get(), told.get()])
    for process in processes:
        process.join()
    return [seen for _, seen, _ in answers], answers[0][2]


@pytest.mark.parametrize(("workers", "stops"), [(0, (3, 3)), (0, (3, 4)), (1, (3, 3)), (1, (4, 3)), (2, (3, 3))])
def test_ranks_that_resume_go_on_behind_what_each_was_given(
    tmp_path: Path, workers: int, stops: tuple[int, int]
) -> None:
    where = f"unix:{tmp_path}/trainer", f"unix:{tmp_path}/ranks"
    feed = FED | {"num_fragments": 13 if sum(stops) % 2 else 12}
    with feeding(where[0], **feed):
        first, state = lives(where, workers, stops, None)
        rest, _ = lives(where, workers, (0, 0), state)
    assert [len(seen) for seen in first] == list(stops)
    assert sorted([*first[0], *first[1], *rest[0], *rest[1]]) == list(range(feed["num_fragments"]))


# Loops


def test_a_loop_that_is_left_early_leaves_the_rest_to_the_next_and_repeats_nothing() -> None:
    with trainer(yields="fragments") as stream, feeding(stream.address, **FED) as feed:
        dataset = stream.dataset()
        first = []
        for fragment in dataset.loader(**options_of(2)):
            first.append(fragment.sequence)
            if len(first) == 5:
                break
        rest = sequences(dataset.loader(**options_of(1)))
    assert first == [0, 1, 2, 3, 4]
    assert rest == [5, 6, 7, 8, 9, 10, 11]
    assert feed.sink.lost == {}


def test_epochs_of_persistent_workers_repeat_nothing() -> None:
    with trainer(yields="fragments") as stream, feeding(stream.address, **FED):
        loader = stream.dataset().loader(**options_of(2), persistent_workers=True)
        epochs = iter(loader)
        first = [next(epochs).sequence for _ in range(5)]
        epochs.close()  # type: ignore[attr-defined]  # it is a generator
        assert first + sequences(loader) == list(range(12))
        assert list(loader) == []


def test_a_worker_that_is_killed_is_an_error_and_nothing_comes_twice() -> None:
    with trainer(yields="fragments") as stream, feeding(stream.address, **FED) as feed:
        dataset = stream.dataset()
        seen = []
        with pytest.raises(RuntimeError):
            for fragment in dataset.loader(**options_of(2)):
                seen.append(fragment.sequence)
                if len(seen) == 5:
                    os.kill(multiprocessing.active_children()[0].pid, signal.SIGKILL)  # type: ignore[arg-type]
        rest = sequences(dataset.loader(**options_of(2)))
    assert seen + rest == list(range(12))
    assert feed.sink.lost == {}


@pytest.mark.parametrize("is_counted", [True, False], ids=["counted", "not counted"])
@pytest.mark.parametrize("workers", [0, 2])
def test_what_the_loop_is_not_given_after_all_is_for_the_next_one(
    workers: int, is_counted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    take_up, calls = DatasetClient.take_up, itertools.count(1)

    def interrupted(asking: DatasetClient, share: int, *, is_last: bool) -> list[BatchItem]:
        """As by a signal, while the stream is told or its answer is read."""
        if (number := next(calls)) == 5 and not is_counted:
            raise KeyboardInterrupt
        told = take_up(asking, share, is_last=is_last)
        if number == 5:
            raise KeyboardInterrupt
        return told

    monkeypatch.setattr(DatasetClient, "take_up", interrupted)
    with trainer(yields="fragments") as stream, feeding(stream.address, **FED) as feed:
        dataset = stream.dataset()
        dataset._is_alone = False  # asks, as those of other ranks do
        seen: list[int] = []
        with pytest.raises(KeyboardInterrupt):
            seen.extend(fragment.sequence for fragment in dataset.loader(**options_of(workers)))
        (told,) = stream.state_dict()["sources"].values()
        assert told["done"] == 4
        rest = sequences(dataset.loader(**options_of(workers)))
    assert seen == list(range(4))
    assert seen + rest == list(range(12))
    assert feed.sink.lost == {}


@pytest.mark.parametrize("yields", ["batches", "episodes"])
@pytest.mark.parametrize("workers", [0, 2])
def test_all_is_done_with_at_the_end(yields: Any, workers: int) -> None:
    with trainer(yields=yields) as stream, feeding(stream.address, **FED) as feed:
        loader, done = stream.dataset().loader(**options_of(workers)), 0
        for _ in loader:
            (told,) = stream.state_dict()["sources"].values()
            assert done <= told["done"] <= done + 1
            done = told["done"]
    assert done == 12
    assert feed.sink.lost == {}


def test_the_lag_is_that_of_when_the_loop_is_given_a_batch() -> None:
    told: list[BatchItem] = []
    lags = []
    with trainer() as stream, feeding(stream.address, **FED) as feed:
        dataset = stream.dataset()
        for batch in dataset.loader(**options_of(2)):
            assert dataset.handed == stream.handed
            told += stream.handed
            lags.append(stream.version - batch["policy_version"].min().item())
            stream.publish(feed.rollout.module.state_dict())
    assert [(each.lane, each.sequence, each.num_steps) for each in told] == [(0, number, 16) for number in range(12)]
    assert {each.source for each in told} == {"feed"}
    assert [each.lag for each in told] == lags


def told_of(dataset: TrainerDataset, workers: int) -> list[tuple[int, ...]]:
    """The number of each fragment, and those that are told of it."""
    told = []
    for fragment in dataset.loader(**options_of(workers)):
        told.append((fragment.sequence, *(each.sequence for each in dataset.handed)))  # noqa: PERF401  # so it's a loop
    return told


@pytest.mark.parametrize("workers", [0, 1])
def test_every_rank_knows_what_it_was_given(tmp_path: Path, workers: int) -> None:
    def other_rank() -> None:
        told.put(told_of(TrainerDataset.connect(address, rank=1), workers))

    address, told = f"unix:{tmp_path}/ranks", FORK.Queue()
    process = FORK.Process(target=other_rank)
    process.start()
    with trainer(yields="fragments") as stream, feeding(stream.address, **FED):
        mine = stream.dataset(world_size=2, address=address)
        assert told_of(mine, workers) == [(number, number) for number in range(0, 12, 2)]
        assert [each.sequence for each in stream.handed] == [10]
        assert told.get() == [(number, number) for number in range(1, 12, 2)]
    process.join()


# Its options


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_items_are_converted_where_they_are_made(context: str) -> None:
    with trainer() as stream, feeding(stream.address, **FED):
        assert list(stream.dataset().loader(**options_of(1, context), collate_fn=type)) == [dict] * 12


def test_options_are_the_loader_s() -> None:
    with trainer() as stream:
        dataset = stream.dataset(prefetch_factor=3)
        loader = dataset.loader(num_workers=2, pin_memory=True, persistent_workers=True)
        assert (loader.batch_size, loader.prefetch_factor) == (None, 3)
        assert loader.pin_memory
        assert loader.persistent_workers
        assert dataset.loader().prefetch_factor is None
        with pytest.raises(TypeError, match="batch_size is given to the loader, expected none: each item is a whole"):
            dataset.loader(batch_size=2)
        with pytest.raises(TypeError, match="prefetch_factor is given to the loader, expected none: it is what"):
            dataset.loader(num_workers=1, prefetch_factor=2)
        assert dataset.loader(batch_size=None).batch_size is None


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_come_pinned_where_there_is_an_accelerator(workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch sees it: one that is not there, and memory that is said to be pinned."""
    pinned: list[torch.Tensor] = []

    def pin(tensor: torch.Tensor) -> torch.Tensor:
        pinned.append(tensor.clone())
        return pinned[-1]

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    for name, told in {"is_available": True, "current_accelerator": None, "current_device_index": 0}.items():
        monkeypatch.setattr(torch.accelerator, name, lambda told=told: told)
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda index: None)
    with trainer(prefetch=4) as stream, feeding(stream.address, **FED):
        count = 0
        for batch in stream.dataset().loader(pin_memory=True, **options_of(workers)):
            places = {tensor.data_ptr() for tensor in pinned}
            assert all(tensor.data_ptr() in places for tensor in batch.values())
            assert [each.sequence for each in stream.handed] == [count]
            count += 1
    assert count == 12
