"""A trainer's stream as a dataset: for a `DataLoader`, and for a trainer of several processes."""

import secrets
import ssl
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing import parent_process
from typing import TYPE_CHECKING, Any, Self

import cloudpickle
from torch.utils.data import DataLoader, IterableDataset, default_convert, get_worker_info

from rollflow.nodes.argument_checks import check_numbers
from rollflow.nodes.env.remote.remote_envs import Secret, check_tls, secret_bytes
from rollflow.sinks.trainer.ranks.dataset_client import BatchWorker, DatasetClient, TaggedItem
from rollflow.sinks.trainer.ranks.dataset_protocol import BatchParts, DatasetPlace
from rollflow.sinks.trainer.trainer_side.item_maker import NO_WORKERS, LearnerConnector
from rollflow.sinks.trainer.trainer_side.state import BatchItem
from rollflow.stream.wire import Limits, check_secret, parse_address

if TYPE_CHECKING:
    from rollflow.sinks.trainer.stream import TrainerStream

_FIXED_OPTIONS = {
    "batch_size": "each item is a whole batch, of as many fragments as `TrainerStream` has fragments_per_batch",
    "prefetch_factor": "it is what `TrainerStream.dataset` has",
}


class TrainerDataset(IterableDataset[Any]):
    """Dataset of what a `TrainerStream` hands over: each item once, in the stream's order.

    Made by `TrainerStream.dataset`, and by `connect` in the other processes of a trainer. It is iterated as it is, or
    by `loader`, whose workers make the items: `for batch in stream.dataset().loader(num_workers=2)`.

    With workers the stream stays in its process. They ask it for items and run the learner pipeline. Each has metrics
    of its own, and a copy of the module that gets the published weights. Items count as handed over, for `handed` and
    for `TrainerStream.state_dict`, once the loop has been given them; prefetched ones do not. If a loop is left early
    or fails, the next loop gets the items that its workers still had. It also gets, whole, a fragment of which the loop
    was given some episodes.

    A `DataLoader` of your own, `DataLoader(dataset, batch_size=None, num_workers=…)`, gets each item once as well. But
    with workers it is unknown what the loop was given: `handed` stays empty. An item is done with when a worker's later
    requests show that the loop has moved on from it. The last items are done with when the loop has come to its end and
    the stream is left; until then `TrainerStream.state_dict` does not count them. A trainer that resumes from that
    state gets up to `prefetch_factor` + 1 items of each worker twice; so does one that loops again after a loop that
    was left early.

    address    of rank 0, with its port, for the other ranks' `connect`; None: there are none
    """

    def __init__(
        self,
        place: DatasetPlace,
        rank: int,
        parts: BatchParts,
        *,
        prefetch_factor: int,
        join_timeout: float | None,
        address: str | None = None,
        stream: "TrainerStream | None" = None,
        is_paced: bool = False,
    ) -> None:
        check_numbers(rank=(rank, 0), prefetch_factor=(prefetch_factor, 1), join_timeout=(join_timeout, 0))
        self.address = address
        self._place, self._rank, self._parts, self._prefetch = place, rank, parts, prefetch_factor
        self._join_timeout, self._stream, self._is_alone = join_timeout, stream, address is None
        self._is_of_stream = stream is not None
        self._is_paced = is_paced
        self._handed: list[BatchItem] = []
        self._token, self._loops = secrets.token_hex(8), 0

    @classmethod
    def connect(
        cls,
        address: str,
        *,
        rank: int,
        secret: Secret = None,
        tls: ssl.SSLContext | None = None,
        learner_connector: LearnerConnector | None = None,
        module: Any = None,
        prefetch_factor: int = 2,
        join_timeout: float | None = 120.0,
        limits: Limits | None = None,
    ) -> Self:
        """Make the dataset of another process of the trainer, on this machine or another.

        address                      the one that rank 0 gave to `TrainerStream.dataset`
        rank                         number of this process
        secret                       that of rank 0's stream
        tls                          a client's context, where rank 0's stream has a server's
        learner_connector, module    as rank 0's stream has them: this process makes its own batches. A copy of `module`
                                     gets the weights that rank 0 publishes
        prefetch_factor              items that each worker makes ahead; the same as that of a `DataLoader` of your own
        join_timeout                 seconds that rank 0 is waited for, at first and when a connection is lost; None:
                                     for ever. A rank that comes back later than `join_timeout` and `grace_s` of rank
                                     0's stream has been forgotten there
        limits                       of frames, times and bytes under way

        Raises WireError for an address that is none, or not without a secret. When it is iterated: RunError where
        rank 0 is not there or has ended, WireError where it has another secret.
        """
        place = DatasetPlace(parse_address(address), secret_bytes(secret), tls, limits or Limits())
        check_secret(place.address, place.secret)
        check_tls(place.address, tls)
        parts = BatchParts(learner_connector, module)
        return cls(place, rank, parts, prefetch_factor=prefetch_factor, join_timeout=join_timeout, address=address)

    @property
    def handed(self) -> list[BatchItem]:
        """Records of the items in the batch that this process' loop was given last."""
        return self._handed if self._stream is None else self._stream.handed

    def loader(
        self, *, num_workers: int = 0, collate_fn: Callable[[Any], Any] | None = None, **options: Any
    ) -> "TrainerLoader":
        """Make a `DataLoader` of this dataset that reports what its loop was given. One loop at a time.

        num_workers    processes that make the items; 0: they are made in the loop
        collate_fn     called with each item, where it is made; None: `torch.utils.data.default_convert`
        options        of the `DataLoader`: `pin_memory`, `multiprocessing_context`, … but not `batch_size`, which is
                       None, and `prefetch_factor`, which is the dataset's

        Raises TypeError for one of these two, ValueError for workers under on_excess="pace", and what the `DataLoader`
        does.
        """
        if num_workers and self._is_paced:
            raise ValueError(f"num_workers is {num_workers}: {NO_WORKERS}")
        return TrainerLoader(self, self._prefetch, num_workers=num_workers, collate_fn=collate_fn, **options)

    def __iter__(self) -> Iterator[Any]:
        if get_worker_info() is not None:
            return self._iterate_unfollowed()
        if self._stream is not None and self._is_alone:
            return iter(self._stream)
        return self._iterate_here()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_stream": None, "_parts": cloudpickle.dumps(self._parts)}  # for spawned workers

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _parts=cloudpickle.loads(state["_parts"]))

    def tagged(self) -> Iterator[TaggedItem]:
        """Make the items of a worker, for `follow` in the loop's process."""
        with self._client() as client:
            yield from self._make_items(client, self._begin_in_worker(client, is_followed=True), lambda: 0)

    def follow(self, items: Iterator[TaggedItem]) -> Iterator[Any]:
        """Yield the items that workers have made, and report to the stream how far the loop is."""
        with self._client() as client:
            client.follow()
            yield from self._report(client, items)

    def _iterate_here(self) -> Iterator[Any]:
        """Make the items in the loop's process."""
        with self._client() as client:
            worker = BatchWorker(client.begin(0, 1, 0, secrets.token_hex(8), self._parts, is_followed=True))
            yield from self._report(client, self._make_items(client, worker, lambda: 0))

    def _report(self, client: DatasetClient, items: Iterator[TaggedItem]) -> Iterator[Any]:
        """Yield items; report each when the loop is given it, and when the loop asks for the next."""
        for item, share, is_last in items:
            try:
                self._handed = client.take_up(share, is_last=is_last)
            except BaseException:  # also a signal's: torch raises in its handler if a worker is gone
                client.give_back(share)
                raise
            if item is not None:
                yield item
            if is_last:
                client.move_on(share)

    def _iterate_unfollowed(self) -> Iterator[Any]:
        """Make the items of a worker for a loop that reports nothing.

        A DataLoader lets no more than `prefetch` requests of a worker wait: each time the loop takes an item of the
        worker's, it adds a request. So when item k is asked for, the loop has taken item k - prefetch, and has moved
        on from the one before that.
        """
        ends: deque[int] = deque()  # of each share that is not done with: number of items up to its end
        yielded = done = 0

        def count_done() -> int:
            nonlocal done
            while ends and ends[0] <= yielded - self._prefetch:
                ends.popleft()
                done += 1
            return done

        with self._client() as client:
            worker = self._begin_in_worker(client, is_followed=False)
            for item, _, is_last in self._make_items(client, worker, count_done):
                yielded += item is not None
                if is_last:
                    ends.append(yielded)
                if item is not None:
                    yield item

    def _client(self) -> DatasetClient:
        # Rank 0's stream is there from the start, and its process is the parent of the workers.
        first = 0.0 if self._is_of_stream else self._join_timeout
        gone = (_has_no_parent,) if self._is_of_stream and get_worker_info() is not None else ()
        return DatasetClient(self._place, self._rank, first, self._join_timeout, *gone)

    def _begin_in_worker(self, client: DatasetClient, *, is_followed: bool) -> BatchWorker:
        info = get_worker_info()
        assert info is not None
        self._loops += 1
        loop = f"{self._token} {info.seed - info.id} {self._loops}"  # the same for all workers of a loop
        numbers = info.id, info.num_workers, self._prefetch
        return BatchWorker(client.begin(*numbers, loop, self._parts, is_followed=is_followed))

    def _make_items(
        self, client: DatasetClient, worker: BatchWorker, count_done: Callable[[], int]
    ) -> Iterator[TaggedItem]:
        """Ask for one share after the other, and make their items."""
        while (share := client.next_share(count_done(), worker.count_masked())) is not None:
            yield from worker.items_of(share)


class TrainerLoader(DataLoader[Any]):
    """`DataLoader` that reports what its loop was given; `TrainerDataset.loader` makes it, and explains its parameters.

    prefetch    items that each worker makes ahead
    """

    def __init__(
        self,
        source: TrainerDataset,
        prefetch: int,
        *,
        num_workers: int,
        collate_fn: Callable[[Any], Any] | None,
        **options: Any,
    ) -> None:
        for name, reason in _FIXED_OPTIONS.items():
            if options.pop(name, None) is not None:
                raise TypeError(f"{name} is given to the loader, expected none: {reason}")
        self._source = source
        if num_workers:
            options |= {"prefetch_factor": prefetch}
            collate_fn = partial(_converted, collate_fn or default_convert)  # picklable, for spawned workers
        dataset: IterableDataset[Any] = _Tagged(source) if num_workers else source
        super().__init__(dataset, batch_size=None, num_workers=num_workers, collate_fn=collate_fn, **options)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # torch's is a class of its own
        items: Iterator[Any] = super().__iter__()
        return self._source.follow(items) if self.num_workers else items


class _Tagged(IterableDataset[TaggedItem]):
    """Dataset that workers iterate: items with the shares that they were made of."""

    def __init__(self, source: TrainerDataset) -> None:
        self._source = source

    def __iter__(self) -> Iterator[TaggedItem]:
        return self._source.tagged()


def _has_no_parent() -> bool:
    """True once the process has ended that began this one."""
    parent = parent_process()
    return parent is not None and not parent.is_alive()


def _converted(convert: Callable[[Any], Any], tagged: TaggedItem) -> TaggedItem:
    return tagged._replace(item=convert(tagged.item))
