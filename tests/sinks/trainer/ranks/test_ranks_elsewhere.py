"""Ranks over TCP, as on several machines: each fragment goes to one of them, whatever breaks."""

import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from feeding_rollouts import Feed, feeding, trainer
from killable_trainer import Record, check_whole, record_of
from numbered_module import NumberedModule
from remote_rollouts import await_that
from wide_module import WIDE_BYTES, NumberedModule as WideModule

from rollflow.nodes import ConnectorV2
from rollflow.sinks import TrainerDataset, TrainerStream
from rollflow.sinks.trainer.ranks import dataset_server
from rollflow.sinks.trainer.ranks.dataset_client import DatasetClient
from rollflow.sinks.trainer.ranks.dataset_protocol import BatchParts, DatasetPlace
from rollflow.stream.data.errors import LagError, RunError, WireError
from rollflow.stream.net.request_clients import RequestClients
from rollflow.stream.wire import Limits, parse_address

SECRET = "known to all ranks"
FED: dict[str, Any] = {"lanes": 2, "fragment_length": 4, "num_fragments": 12, "sink": {"secret": SECRET}}
FORK = multiprocessing.get_context("fork")


@contextmanager
def fed(*, feed: dict[str, Any] | None = None, **options: Any) -> Iterator[tuple[TrainerStream, Feed]]:
    """A stream with a secret, and a rollout that feeds it, which ends after the stream has been left."""
    with trainer(**{"secret": SECRET, "yields": "fragments", **options}) as stream:
        feeder = feeding(stream.address, **(FED | (feed or {})))
        yield stream, feeder.__enter__()
    feeder.__exit__(None, None, None)


def dataset_of(stream: TrainerStream) -> TrainerDataset:
    """The dataset of rank 0, which another one may connect to."""
    return stream.dataset(world_size=2, address="tcp://127.0.0.1:0")


def connect(address: str | None, **options: Any) -> TrainerDataset:
    assert address is not None
    return TrainerDataset.connect(address, **{"rank": 1, "secret": SECRET, "join_timeout": 60.0, **options})


def rank(address: str, workers: int, stops_at: int | None, told: Any) -> None:
    """A rank with its secret from the environment; it says at once what it is given, and may stand still then."""
    dataset = connect(address, secret=os.environ["SECRET_OF_RANKS"])
    options: dict[str, Any] = {"multiprocessing_context": "fork"} if workers else {}
    for number, fragment in enumerate(dataset.loader(num_workers=workers, **options), start=1):
        told.put(record_of(fragment))
        if number == stops_at:
            time.sleep(3600)  # until it is killed
    told.put(None)


def closing_client(dataset: TrainerDataset) -> DatasetClient:
    """A client of rank 1's, to be left."""
    assert dataset.address is not None
    place = DatasetPlace(parse_address(dataset.address), SECRET.encode(), None, Limits())
    return DatasetClient(place, 1, 60.0, 60.0)


@contextmanager
def rank_process(dataset: TrainerDataset, monkeypatch: pytest.MonkeyPatch, *options: Any) -> Iterator[tuple[Any, Any]]:
    """Rank 1 in a process of its own, and the queue of what it is given."""
    monkeypatch.setenv("SECRET_OF_RANKS", SECRET)
    told: Any = FORK.Queue()
    process = FORK.Process(target=rank, args=(dataset.address, *options, told))
    process.start()
    try:
        yield process, told
    finally:
        process.kill()
        process.join()


def check_conserved(records: Sequence[Record], feed: Feed) -> None:
    """All steps that the rollout has made are there, each once, by the numbers that the environments give them."""
    check_whole(sorted(records, key=lambda record: (record.lane, record.sequence)))
    assert sum(record.steps for record in records) == feed.rollout.num_steps
    assert feed.sink.lost == {}


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "agents"), [(0, 0), (0, 2), (1, 0)])
def test_ranks_in_two_processes_share_every_step(workers: int, agents: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with fed(feed={"agents": agents} if agents else None) as (stream, feed):
        dataset = dataset_of(stream)
        with rank_process(dataset, monkeypatch, workers, None) as (_, told):
            mine = [record_of(fragment) for fragment in dataset]
            others = list(iter(told.get, None))
    assert len(mine) == len(others) == 12
    check_conserved([*mine, *others], feed)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1])
def test_a_rank_that_is_killed_and_comes_back_goes_on(workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with fed() as (stream, feed), ThreadPoolExecutor() as threads:
        dataset = dataset_of(stream)
        mine = threads.submit(lambda: [record_of(fragment) for fragment in dataset])
        with rank_process(dataset, monkeypatch, workers, 4) as (process, told):
            others = [told.get() for _ in range(4)]
            process.kill()
            process.join()
        with rank_process(dataset, monkeypatch, workers, None) as (_, told):
            others += iter(told.get, None)
        assert len(mine.result()) == len(others) == 12
    check_conserved([*mine.result(), *others], feed)


@pytest.mark.parametrize("join_timeout", [60.0, None])
def test_a_connection_that_breaks_again_and_again_loses_nothing(
    join_timeout: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank has the time that ranks are waited for, though the grace of others is over before it dials again."""
    ask: Callable[..., Any] = DatasetClient._request
    calls = []

    def cut(client: DatasetClient, name: Any, *args: Any, **values: Any) -> Any:
        calls.append(name)
        if client._rank == 1 and len(calls) % 4 == 0:
            for peer in client._link.loop.peers:
                peer.transport._sock.shutdown(socket.SHUT_RDWR)
        return ask(client, name, *args, **values)

    monkeypatch.setattr(DatasetClient, "_request", cut)
    with fed(limits=Limits(grace_s=0.01), join_timeout=join_timeout) as (stream, feed), ThreadPoolExecutor() as threads:
        dataset = dataset_of(stream)
        other = threads.submit(lambda: [record_of(fragment) for fragment in connect(dataset.address)])
        mine = [record_of(fragment) for fragment in dataset]
        assert len(mine) == len(other.result()) == 12
    check_conserved([*mine, *other.result()], feed)


def stream_in_a_process(told: Any, join_timeout: float) -> None:
    """A stream and its rollout; another process is told of rank 0's dataset, and takes the loop over."""
    limits = Limits(heartbeat_s=0.05)
    with trainer(yields="fragments", join_timeout=join_timeout, limits=limits) as stream:
        with feeding(stream.address, lanes=2, fragment_length=4, num_fragments=12):
            told.send(stream.dataset())
            told.recv()  # that the loop has ended


@contextmanager
def another_trainer(join_timeout: float) -> Iterator[tuple[Any, Any, Iterator[Any]]]:
    """The process of a stream, its end of a pipe, and the loop over rank 0's dataset, which runs here."""
    here, there = FORK.Pipe()
    process = FORK.Process(target=stream_in_a_process, args=(there, join_timeout))
    process.start()
    try:
        yield process, here, iter(here.recv())
    finally:
        process.kill()
        process.join()


def test_a_loop_goes_on_when_the_stream_s_process_has_stood_still(monkeypatch: pytest.MonkeyPatch) -> None:
    clients: list[DatasetClient] = []
    begin: Callable[..., Any] = DatasetClient.begin
    monkeypatch.setattr(DatasetClient, "begin", lambda it, *args, **of: clients.append(it) or begin(it, *args, **of))
    with another_trainer(60.0) as (process, told, loop):
        seen = [record_of(next(loop)) for _ in range(6)]
        os.kill(process.pid, signal.SIGSTOP)
        await_that(lambda: not clients[0]._link.is_connected)
        os.kill(process.pid, signal.SIGCONT)
        seen += map(record_of, loop)
        told.send("the end")
    check_whole(sorted(seen, key=lambda record: (record.lane, record.sequence)))
    assert len(seen) == 24


def test_a_loop_whose_stream_has_gone_ends_after_its_patience() -> None:
    with another_trainer(0.3) as (process, _, loop):
        next(loop)
        process.kill()
        with pytest.raises(RunError, match=r"the trainer at unix:.* has not answered within 0.3 s"):
            list(loop)


def test_a_rank_that_comes_late_is_waited_for() -> None:
    with fed() as (stream, feed), ThreadPoolExecutor() as threads:
        dataset = dataset_of(stream)
        mine = threads.submit(lambda: [record_of(fragment) for fragment in dataset])
        assert stream._server is not None
        while stream._server._absence is None:  # rank 0 has all that it gets without the other
            time.sleep(0.001)
        others = [record_of(fragment) for fragment in connect(dataset.address)]
        assert len(mine.result()) == len(others)
    check_conserved([*mine.result(), *others], feed)


def test_who_does_not_know_the_secret_is_refused_and_the_others_go_on() -> None:
    with fed() as (stream, _), ThreadPoolExecutor() as threads:
        dataset = dataset_of(stream)
        with pytest.raises(WireError, match="the rank has another secret"):
            next(iter(connect(dataset.address, secret="a guess")))
        with pytest.raises(WireError, match="the trainer asks for a secret, and this rank has none"):
            next(iter(connect(dataset.address, secret=None)))
        other = threads.submit(lambda: len(list(connect(dataset.address))))
        assert len(list(dataset)) == other.result() == 12


class LearntWith(ConnectorV2):
    """Says which weight its module has."""

    def __call__(self, *, rl_module: Any, batch: dict[str, Any], episodes: Any, **kwargs: Any) -> dict[str, Any]:
        batch["learnt_with"] = torch.full((len(episodes),), rl_module.weight.item())
        return batch


def test_a_rank_makes_its_batches_with_a_copy_that_has_the_published_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dataset_server, "_MOST_ITEMS", 1)  # of a part of a share
    made: dict[str, Any] = {"module": NumberedModule(), "learner_connector": lambda obs, act: LearntWith()}
    its_own = NumberedModule()
    with fed(yields="batches", fragments_per_batch=2, **made) as (stream, feed), ThreadPoolExecutor() as threads:
        stream.publish({"weight": torch.tensor(3.0)})
        dataset = dataset_of(stream)
        other = connect(dataset.address, **made | {"module": its_own})
        others = threads.submit(lambda: list(other))
        batches = [*dataset, *others.result()]
    assert all((batch["learnt_with"] == 3.0).all() for batch in batches)
    assert its_own.weight.item() == made["module"].weight.item() == 0.0  # the loops train these
    assert len(batches) == 12
    assert sum(len(batch["rewards"]) for batch in batches) == feed.rollout.num_steps


@pytest.mark.parametrize(
    ("module", "fragment_length", "max_frame"), [(WideModule, 1, WIDE_BYTES + 4096), (NumberedModule, 32, 1 << 16)]
)
def test_a_share_comes_in_parts_that_fit_into_a_frame(module: Any, fragment_length: int, max_frame: int) -> None:
    """A batch has 32 fragments: those of one step don't fit beside the weights, and those of 32 not into one frame."""
    feed = {"fragment_length": fragment_length, "num_fragments": 16, "module": module()}
    options: dict[str, Any] = {"yields": "batches", "fragments_per_batch": 32, "limits": Limits(max_frame=max_frame)}
    with fed(feed=feed, module=module(), **options) as (stream, feeder):
        dataset = stream.dataset(address="tcp://127.0.0.1:0")
        stream.publish(feeder.rollout.module.state_dict())
        [batch] = dataset
    assert len(batch["rewards"]) == feeder.rollout.num_steps


def test_what_batches_are_made_with_must_be_there_in_all_ranks_or_in_none() -> None:
    with trainer(secret=SECRET, learner_connector=lambda obs, act: LearntWith()) as stream:
        dataset = dataset_of(stream)
        with pytest.raises(RunError, match="learner_connector: rank 1 has none, and rank 0 one, expected the same"):
            next(iter(connect(dataset.address)))
        with pytest.raises(RunError, match="module: rank 1 has one, and rank 0 none"):
            next(iter(connect(dataset.address, learner_connector=lambda obs, act: [], module=NumberedModule())))


def test_an_error_that_ends_the_stream_is_the_same_in_every_rank() -> None:
    with (
        pytest.raises(LagError, match=r"\d policy versions old, expected at most max_lag=0"),
        fed(max_lag=0, on_excess="raise") as (stream, feed),
        ThreadPoolExecutor() as threads,
    ):
        dataset = dataset_of(stream)
        other = threads.submit(lambda: list(connect(dataset.address)))
        try:
            for _ in dataset:
                stream.publish({"weight": torch.tensor(1.0)})
        finally:
            with pytest.raises(LagError, match=r"\d policy versions old, expected at most max_lag=0"):
                other.result()
            feed.ended.cancel()


def test_a_worker_of_a_loop_with_others_is_refused_and_the_rest_goes_on() -> None:
    with fed() as (stream, feed), ThreadPoolExecutor() as threads:
        dataset = dataset_of(stream)
        with closing_client(dataset) as first, closing_client(dataset) as second:
            first.begin(0, 1, 0, "loop", BatchParts(), is_followed=True)
            with pytest.raises(RunError, match="workers is 5, expected 1"):
                second.begin(4, 5, 0, "loop", BatchParts(), is_followed=True)
            with pytest.raises(RunError, match="expected one at a time"):
                second.next_share(0, 0)
        other = threads.submit(lambda: [record_of(fragment) for fragment in connect(dataset.address)])
        mine = [record_of(fragment) for fragment in dataset]
    check_conserved([*mine, *other.result()], feed)


def test_an_error_of_the_server_itself_is_told_to_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    with trainer(secret=SECRET) as stream, ThreadPoolExecutor() as threads:
        dataset = dataset_of(stream)
        others = [threads.submit(list, each) for each in (dataset, connect(dataset.address))]
        assert stream._server is not None
        await_that(lambda: sum(reader.asked > 0 for reader in list(stream._server._readers.values())) == 2)
        monkeypatch.setattr(RequestClients, "tick", lambda clients, now: [][0])
        stream._server._loop.wakeup.ring()
        for other in others:
            with pytest.raises(RunError, match="list index out of range"):
                other.result()


def test_a_rank_that_is_away_when_the_stream_is_left_hears_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dataset_server, "_GOODBYE_S", 30.0)
    monkeypatch.setattr("rollflow.stream.net.dialler.pause_s", lambda *args: 0.3)
    with ThreadPoolExecutor() as threads, trainer(secret=SECRET) as stream:
        client = closing_client(dataset_of(stream))
        client.begin(0, 1, 0, "loop", BatchParts(), is_followed=True)
        asked = threads.submit(client.next_share, 0, 0)
        assert stream._server is not None
        [reader] = stream._server._readers.values()
        await_that(lambda: reader.asked)
        for peer in client._link.loop.peers:
            peer.transport._sock.shutdown(socket.SHUT_RDWR)
        await_that(lambda: reader.client.lost_at is not None)
    with client, pytest.raises(RunError, match="the stream was left before its dataset's loop"):
        asked.result()


def test_a_stream_that_is_left_and_one_that_is_gone_end_a_rank() -> None:
    with ThreadPoolExecutor() as threads, trainer(secret=SECRET) as stream:
        address = dataset_of(stream).address
        other = threads.submit(lambda: list(connect(address)))
        assert stream._server is not None
        while not any(reader.asked for reader in list(stream._server._readers.values())):
            time.sleep(0.001)
    with pytest.raises(RunError, match="the stream was left before its dataset's loop"):
        other.result()
    with pytest.raises(RunError, match=r"the trainer at tcp://127.0.0.1:\d+ has not answered within 0.1 s: .*refused"):
        next(iter(connect(address, join_timeout=0.1)))
