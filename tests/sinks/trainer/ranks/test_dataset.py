"""A trainer's stream under torch's own DataLoader, and in several processes."""

import multiprocessing
import os
import signal
import stat
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from feeding_rollouts import Feed, feeding, trainer
from numbered_module import NumberedModule
from torch.utils.data import DataLoader

from rollflow.nodes import ConnectorV2, GeneralAdvantageEstimation, LambdaConnector
from rollflow.sinks import TrainerDataset, TrainerStream
from rollflow.stream.data.errors import RunError

pytestmark = [
    pytest.mark.slow,  # processes that import torch, in every test
    pytest.mark.usefixtures("loaders_end_with_their_test"),
]

FED: dict[str, Any] = {"lanes": 2, "fragment_length": 4, "num_fragments": 12}


@contextmanager
def fed(*, feed: dict[str, Any] | None = None, **options: Any) -> Iterator[tuple[TrainerStream, Feed]]:
    """A stream, and a rollout that feeds it, which ends after the stream has been left."""
    with trainer(**options) as stream:
        feeder = feeding(stream.address, **(FED if feed is None else feed))
        yield stream, feeder.__enter__()
    feeder.__exit__(None, None, None)


def loader(dataset: TrainerDataset, workers: int, prefetch: int = 2, context: str = "fork") -> DataLoader[Any]:
    if not workers:
        return DataLoader(dataset, batch_size=None)
    return DataLoader(
        dataset,
        batch_size=None,
        num_workers=workers,
        prefetch_factor=prefetch,
        multiprocessing_context=context,
    )


def name_of(fragment: Any) -> tuple[int, int]:
    return fragment.lane, fragment.sequence


class LearntWith(ConnectorV2):
    """Says which weight its module has."""

    def __call__(self, *, rl_module: Any, batch: dict[str, Any], episodes: Any, **kwargs: Any) -> dict[str, Any]:
        batch["learnt_with"] = torch.full((len(episodes),), rl_module.weight.item())
        return batch


EVERY_FRAGMENT = sorted((lane, sequence) for lane in (0, 1) for sequence in range(12))


def num_done(stream: TrainerStream) -> int:
    return sum(told["done"] + len(told["beyond"]) for told in stream.state_dict()["sources"].values())


@pytest.mark.parametrize(
    ("workers", "prefetch", "context"),
    [(0, 2, ""), (1, 1, "fork"), (1, 2, "fork"), (2, 1, "fork"), (2, 2, "fork"), (2, 3, "fork"), (2, 2, "spawn")],
)
def test_each_item_comes_once_and_is_done_only_when_the_loop_has_moved_on(
    workers: int, prefetch: int, context: str
) -> None:
    seen: list[tuple[int, int]] = []
    behind = []
    with fed(yields="fragments") as (stream, feed):
        for fragment in loader(stream.dataset(prefetch_factor=prefetch), workers, prefetch, context):
            if workers:
                assert num_done(stream) <= len(seen)
            behind.append(len(seen) - num_done(stream))
            seen.append(name_of(fragment))
    assert sorted(seen) == EVERY_FRAGMENT
    for lane in (0, 1):
        assert [sequence for each, sequence in seen if each == lane] == list(range(12))
    assert min(behind[-4:]) <= (prefetch + 1) * workers + 1  # it does come along
    assert feed.sink.lost == {}


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_batches_that_workers_make_are_those_that_the_stream_makes(context: str) -> None:
    batches = []
    for workers in (0, 2):
        made: dict[str, Any] = {"learner_connector": lambda obs, act: GeneralAdvantageEstimation()}
        made["module"] = NumberedModule()
        with fed(feed=FED | {"lanes": 1}, **made) as (stream, _):
            batches.append(list(loader(stream.dataset(), workers, context=context)))
            returns = stream.returns.mean
    plain, others = batches
    assert len(plain) == len(others) == 12
    assert returns > 0
    for batch, other in zip(plain, others, strict=True):
        assert batch.keys() == other.keys()
        for name in batch:
            torch.testing.assert_close(batch[name], other[name], rtol=0, atol=0)


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_what_lies_in_shared_memory_gets_to_workers_as_well(context: str, tmp_path: Path) -> None:
    numbers = []
    for number, address in enumerate((None, f"shm:{tmp_path}/trainer")):
        stream = trainer() if address is None else TrainerStream(address, join_timeout=60.0)
        with stream:
            feeder = feeding(stream.address, **(FED | {"lanes": 1}))
            feeder.__enter__()
            batches = list(loader(stream.dataset(), 2, context=context))
        feeder.__exit__(None, None, None)
        numbers.append([batch["rewards"].tolist() for batch in batches])
        assert len(batches) == 12, number
    assert numbers[0] == numbers[1]


def test_a_worker_s_copy_of_the_module_has_the_weights_that_were_published() -> None:
    module, seen = NumberedModule(), []
    with fed(module=module, learner_connector=lambda obs, act: LearntWith()) as (stream, _):
        for version, batch in enumerate(loader(stream.dataset(), 1, 1), start=1):
            seen.append(batch["learnt_with"][0].item())
            module.weight.data.fill_(version)
            stream.publish(module.state_dict())
    assert seen == sorted(seen)
    assert seen[0] == 0.0
    assert 0 < len(seen) - seen[-1] <= 3 + 1  # what was prefetched was made with older ones


def test_train_batches_can_be_pinned() -> None:
    with fed() as (stream, _):
        for batch in loader(stream.dataset(), 1):
            for column in batch.values():
                assert type(column) is torch.Tensor
                assert (column.device.type, column.layout) == ("cpu", torch.strided)


def test_batches_that_were_made_where_the_rollout_is_come_as_they_are() -> None:
    with fed(feed=FED | {"lanes": 1, "sink": {"sends": "batches"}}) as (stream, _):
        batches = list(loader(stream.dataset(), 2))
    assert len(batches) == 12
    assert all(len(batch["obs"]) for batch in batches)


def test_a_request_that_gives_several_items_is_done_with_the_last_of_them() -> None:
    count = 0
    with fed(yields="episodes") as (stream, feed):
        for episode in loader(stream.dataset(), 2):
            count += len(episode)
    assert count == feed.rollout.num_steps
    assert feed.sink.lost == {}


def test_rollouts_that_may_send_nothing_ahead_don_t_stand_still_before_workers_that_prefetch() -> None:
    with fed(prefetch=0) as (stream, _):
        assert len(list(loader(stream.dataset(prefetch_factor=4), 2, 4))) == 12


def test_what_the_loop_s_end_leaves_open_is_done_with_when_the_stream_is_left() -> None:
    with fed(yields="fragments", feed=FED | {"num_fragments": 1}) as (stream, feed):
        assert len(list(loader(stream.dataset(), 2))) == 2
        assert num_done(stream) == 0
    assert feed.sink.lost == {}


def test_a_loop_that_is_left_early_leaves_the_rest_to_the_next() -> None:
    with fed(yields="fragments") as (stream, feed):
        dataset = stream.dataset()
        first, rest = [], []
        for fragment in loader(dataset, 2):
            first.append(name_of(fragment))
            if len(first) == 9:
                break
        for fragment in loader(dataset, 1):
            rest.append(name_of(fragment))  # noqa: PERF401  # the loop is what is tested
    assert sorted({*first, *rest}) == EVERY_FRAGMENT
    assert len(set(rest)) == len(rest)
    assert len({*first} & {*rest}) <= 2 * 3  # that the loop may have seen
    assert feed.sink.lost == {}


def test_epochs_of_persistent_workers_are_one_stream() -> None:
    with fed(yields="fragments") as (stream, _):
        batches = DataLoader(stream.dataset(), batch_size=None, num_workers=2, persistent_workers=True)
        assert sorted(map(name_of, batches)) == EVERY_FRAGMENT
        assert list(batches) == []


def test_a_worker_that_is_killed_is_an_error_and_what_it_had_is_for_others() -> None:
    with fed(yields="fragments") as (stream, feed):
        dataset = stream.dataset()
        seen = []
        with pytest.raises(RuntimeError, match="DataLoader worker"):
            for fragment in loader(dataset, 2):
                seen.append(name_of(fragment))
                if len(seen) == 5:
                    os.kill(multiprocessing.active_children()[0].pid, signal.SIGKILL)  # type: ignore[arg-type]
        rest = list(map(name_of, loader(dataset, 2)))
    assert sorted({*seen, *rest}) == EVERY_FRAGMENT
    assert feed.sink.lost == {}


def test_what_a_piece_raises_in_a_worker_is_raised_in_the_loop() -> None:
    def fails(batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        raise ArithmeticError("it broke")

    with pytest.raises(Left), fed(learner_connector=lambda obs, act: LambdaConnector(fails)) as (stream, feed):
        with pytest.raises(ArithmeticError, match="it broke"):
            list(loader(stream.dataset(), 1))
        feed.ended.cancel()
        raise Left


class Left(Exception):
    """Raised to leave a stream that is not done with all."""


def test_that_no_rollout_comes_is_told_by_the_workers() -> None:
    with trainer(join_timeout=0) as stream:
        for workers in (1, 2):
            with pytest.raises(RunError, match="0 of 1 rollouts came within 0 s"):
                list(loader(stream.dataset() if workers == 1 else stream_dataset(stream), workers))


def stream_dataset(stream: TrainerStream) -> TrainerDataset:
    with pytest.raises(RunError, match="has a dataset already"):
        stream.dataset()
    assert stream._server is not None
    return TrainerDataset.connect(f"unix:{stream._server._sockets[0].getsockname()}", rank=0)


def test_pace_is_not_for_workers_that_prefetch() -> None:
    with trainer(max_lag=0, on_excess="pace") as stream:
        dataset = stream.dataset()
        with pytest.raises(ValueError, match=r"num_workers is 1: on_excess='pace' .* expected num_workers=0"):
            dataset.loader(num_workers=1)
        with pytest.raises(RunError, match="expected num_workers=0"):  # one of the user's own says it in the loop
            list(loader(dataset, 1))


def test_workers_meet_in_a_folder_of_their_own_that_is_gone_afterwards() -> None:
    with trainer() as stream:
        stream.dataset()
        assert stream._server is not None
        folder = Path(stream._server._sockets[0].getsockname()).parent
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert not folder.exists()


def inodes_here(told: Any) -> None:
    inodes = []
    for fd in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the one that the list was read by
            inodes.append(os.fstat(int(fd)).st_ino)
    told.put(inodes)


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="nothing tells which descriptors a process has")
def test_forked_processes_hold_none_of_the_trainer_s_sockets() -> None:
    context = multiprocessing.get_context("fork")
    told: Any = context.Queue()
    with fed(yields="fragments") as (stream, _):
        fragments = iter(stream)
        next(fragments)
        stream.dataset()
        assert stream._server is not None
        holders = (stream._listener, stream._server)
        ours = {os.fstat(fd).st_ino for holder in holders for fd in holder.filenos()}
        process = context.Process(target=inodes_here, args=(told,))
        process.start()
        theirs = told.get()
        process.join()
        list(fragments)
    assert len(ours) >= 3
    assert not ours & set(theirs)


# Ranks


def rank(address: str, number: int, told: Any) -> None:
    told.put([name_of(fragment) for fragment in TrainerDataset.connect(address, rank=number)])


@pytest.mark.parametrize("workers", [0, 1])
def test_ranks_get_as_many_and_each_item_goes_to_one_of_them(tmp_path: Path, workers: int) -> None:
    address = f"unix:{tmp_path}/ranks"
    feed = {"lanes": 1, "fragment_length": 4, "num_fragments": 9}
    with fed(yields="fragments", feed=feed) as (stream, feeder), ThreadPoolExecutor() as threads:
        first = stream.dataset(world_size=2, address=address)
        other = threads.submit(lambda: [name_of(each) for each in TrainerDataset.connect(address, rank=1)])
        mine = [name_of(each) for each in loader(first, workers)]
        others = other.result()
    assert mine == [(0, 0), (0, 2), (0, 4), (0, 6)]
    assert others == [(0, 1), (0, 3), (0, 5), (0, 7)]
    assert stream.lost["uneven"] > 0
    assert feeder.sink.lost == {}


def test_a_rank_may_be_a_process(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/ranks"
    told: Any = multiprocessing.get_context("fork").Queue()
    other = multiprocessing.get_context("fork").Process(target=rank, args=(address, 1, told))
    other.start()
    with fed(yields="fragments") as (stream, _):
        mine = [name_of(each) for each in stream.dataset(world_size=2, address=address)]
        others = told.get()
        other.join()
    assert len(mine) == len(others) == 12
    assert sorted(mine + others) == EVERY_FRAGMENT


def test_ranks_under_pace_are_exactly_on_policy(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/ranks"
    feed = {"lanes": 2, "fragment_length": 4, "num_fragments": 12}
    with fed(max_lag=0, on_excess="pace", feed=feed) as (stream, feeder), ThreadPoolExecutor() as threads:
        first = stream.dataset(world_size=2, address=address)
        other = threads.submit(
            lambda: [set(batch["policy_version"].tolist()) for batch in TrainerDataset.connect(address, rank=1)]
        )
        mine = []
        for batch in first:
            mine.append(set(batch["policy_version"].tolist()))
            stream.publish(feeder.rollout.module.state_dict())
        assert mine == other.result() == [{version} for version in range(6)]


@pytest.mark.parametrize("asks_first", [True, False])
def test_a_rollout_that_comes_while_ranks_are_at_their_batches_is_as_fresh(tmp_path: Path, asks_first: bool) -> None:
    address, has_come = f"unix:{tmp_path}/ranks", threading.Event()
    feed: Any = {"lanes": 2, "fragment_length": 4, "num_fragments": 16}
    others: list[set[int]] = []

    def rank_1() -> None:
        for batch in TrainerDataset.connect(address, rank=1):
            others.append(set(batch["policy_version"].tolist()))
            if len(others) == 3 and not asks_first:
                has_come.wait()

    mine, lanes = [], []
    with ExitStack() as later, fed(max_lag=0, on_excess="pace", feed=feed) as (stream, feeder):
        first, other = stream.dataset(world_size=2, address=address), later.enter_context(ThreadPoolExecutor())
        done = other.submit(rank_1)
        for batch in first:
            mine.append(set(batch["policy_version"].tolist()))
            lanes.append(len(stream.handed))
            if len(mine) == 3:
                while len(others) < 3:  # this one has nothing to wait for: the other is at its batch, or behind it
                    time.sleep(0)
                come = later.enter_context(feeding(stream.address, (10, 11), seed=1, **feed))
                while come.sink._rollout_end.gate.order is None:
                    time.sleep(0)
                has_come.set()
            stream.publish(feeder.rollout.module.state_dict())
        done.result()
    assert mine == others == [{version} for version in range(len(mine))]
    assert lanes[:3] == [2, 2, 2]
    assert max(lanes) == 4


def test_a_rank_that_there_is_not_is_refused(tmp_path: Path) -> None:
    with trainer() as stream:
        stream.dataset(world_size=2, address=f"unix:{tmp_path}/ranks")
        with pytest.raises(RunError, match="rank is 2, expected 0 to 1"):
            next(iter(TrainerDataset.connect(f"unix:{tmp_path}/ranks", rank=2)))


def test_a_rank_that_does_not_come_is_named(tmp_path: Path) -> None:
    with trainer(join_timeout=1) as stream, pytest.raises(Left):
        feeder = feeding(stream.address, **FED)
        feed = feeder.__enter__()
        with pytest.raises(RunError, match="rank 1 of 2 has not asked for batches for 1 s"):
            list(stream.dataset(world_size=2, address=f"unix:{tmp_path}/ranks"))
        feed.ended.cancel()
        raise Left
    with pytest.raises(BaseException):  # noqa: B017, PT011  # it was cancelled
        feeder.__exit__(None, None, None)


def test_an_address_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="address 'tcp:nowhere'"):
        TrainerDataset.connect("tcp:nowhere", rank=1)
    with pytest.raises(ValueError, match="without a secret"):
        TrainerDataset.connect("tcp://10.0.0.1:7021", rank=1)
    with trainer() as stream:
        with pytest.raises(ValueError, match="without a secret"):
            stream.dataset(world_size=2, address="tcp://0.0.0.0:7021")
        with pytest.raises(ValueError, match="world_size is 2, expected an address"):
            stream.dataset(world_size=2)
