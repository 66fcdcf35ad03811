"""A trainer's stream as a dataset: for a `DataLoader`, and for a trainer of several processes."""

import secrets
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Protocol, Self

from torch.utils.data import IterableDataset, get_worker_info

from rollflow.nodes.given import check_numbers
from rollflow.sinks.trainer.asking import Asking
from rollflow.sinks.trainer.choices import NO_WORKERS
from rollflow.sinks.trainer.loader import TrainerLoader
from rollflow.sinks.trainer.making import Making, Tagged
from rollflow.sinks.trainer.told import Handed
from rollflow.stream.wire import UnixAddress, parse_address


class _Stream(Protocol):
    """A stream in this process."""

    handed: list[Handed]

    def __iter__(self) -> Iterator[Any]: ...


class TrainerDataset(IterableDataset[Any]):
    """What a `TrainerStream` hands over: each item once, in the stream's order.

    Made by `TrainerStream.dataset`, and by `connect` in the other processes of a trainer. It is iterated as it is, or
    by `loader`, whose workers make the items: `for batch in stream.dataset().loader(num_workers=2)`.

    With workers the stream stays in its process; they ask it for items, and run the learner pipeline, with a copy of
    the module that gets the weights that are published, and with metrics of their own. What counts as handed over, for
    `handed` and for `TrainerStream.state_dict`, is what the loop has been given, the last of it included, and not what
    workers have prefetched. What those of a loop that was left early, or failed, still had, is given to the next loop;
    so is a fragment, whole, of which the loop was given some of its episodes.

    Under a `DataLoader` of one's own, `DataLoader(dataset, batch_size=None, num_workers=…)`, each item comes once as
    well, but with workers it isn't known what the loop was given: `handed` stays empty. An item is done with when a
    worker's later requests show that the loop has moved on from it, and the last ones when the loop has come to its end
    and the stream is left: until then `TrainerStream.state_dict` does not count them, and who resumes from it, or loops
    again after a loop that was left early, gets up to `prefetch_factor` + 1 items for each worker twice.
    """

    def __init__(
        self,
        address: UnixAddress,
        rank: int,
        *,
        prefetch_factor: int = 2,
        join_timeout: float | None = 120.0,
        stream: _Stream | None = None,
        is_alone: bool = False,
        is_paced: bool = False,
    ) -> None:
        check_numbers(rank=(rank, 0), prefetch_factor=(prefetch_factor, 1), join_timeout=(join_timeout, 0))
        self._address, self._rank, self._prefetch = address, rank, prefetch_factor
        self._join_timeout, self._stream, self._is_alone = join_timeout, stream, is_alone
        self._is_paced = is_paced
        self._handed: list[Handed] = []
        self._loops = 0

    @classmethod
    def connect(cls, address: str, *, rank: int, prefetch_factor: int = 2, join_timeout: float | None = 120.0) -> Self:
        """The dataset of another process of the trainer, on the same machine.

        address            that rank 0 gave to `TrainerStream.dataset`
        rank               which process it is
        prefetch_factor    items that each worker makes ahead; as the `DataLoader` has it, where that is one's own
        join_timeout       seconds that rank 0 is waited for; None: for ever

        Raises WireError or ValueError where the address is none for it. RunError, when it is iterated, where rank 0 is
        not there.
        """
        return cls(unix_address(address), rank, prefetch_factor=prefetch_factor, join_timeout=join_timeout)

    @property
    def handed(self) -> list[Handed]:
        """What is in the batch that this process' loop was given last."""
        return self._handed if self._stream is None else self._stream.handed

    def loader(
        self, *, num_workers: int = 0, collate_fn: Callable[[Any], Any] | None = None, **options: Any
    ) -> TrainerLoader:
        """A `DataLoader` of this dataset, which knows what its loop was given. One loop at a time.

        num_workers    processes that make the items; 0: they are made in the loop
        collate_fn     called with each item, where it is made; None: `torch.utils.data.default_convert`
        options        of the `DataLoader`: `pin_memory`, `multiprocessing_context`, … `batch_size` is None, and
                       `prefetch_factor` the dataset's

        Raises TypeError for one of these two, ValueError for workers under on_excess="pace", and what the `DataLoader`
        does.
        """
        if num_workers and self._is_paced:
            raise ValueError(f"num_workers is {num_workers}: {NO_WORKERS}")
        return TrainerLoader(
            self, self._prefetch, self._following, num_workers=num_workers, collate_fn=collate_fn, **options
        )

    def __iter__(self) -> Iterator[Any]:
        if get_worker_info() is not None:
            return self._counted()
        if self._stream is not None and self._is_alone:
            return iter(self._stream)
        return self._followed()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_stream": None}

    def tagged(self) -> Iterator[Tagged]:
        """The items of a worker, for a loop that says what it was given."""
        with Asking(self._address, self._join_timeout) as asking:
            yield from self._made(asking, self._begun_by_worker(asking, is_followed=True), lambda: 0)

    def _followed(self) -> Iterator[Any]:
        """The items, made in the process where the loop is."""
        with Asking(self._address, self._join_timeout) as asking:
            loop = secrets.randbits(63), 0
            making = Making(asking.begin(self._rank, 0, 1, 0, loop, is_followed=True))
            yield from self._told(asking, self._made(asking, making, lambda: 0))

    def _following(self, items: Iterator[Tagged]) -> Iterator[Any]:
        """The items that workers have made."""
        with Asking(self._address, self._join_timeout) as asking:
            asking.follow(self._rank)
            yield from self._told(asking, items)

    def _told(self, asking: Asking, items: Iterator[Tagged]) -> Iterator[Any]:
        """The items, of which the stream is told when the loop is given one, and when it asks for the next."""
        for item, share, is_last in items:
            try:
                self._handed = asking.take_up(share, is_last=is_last)
            except BaseException:  # also a signal's: torch raises where it hears that a worker is gone
                asking.give_back(share)
                raise
            yield item
            if is_last:
                asking.move_on(share)

    def _counted(self) -> Iterator[Any]:
        """The items of a worker, for a loop that says nothing.

        A DataLoader lets no more than `prefetch` requests of a worker wait: each time the loop takes an item of the
        worker's, it adds a request. So when item k is asked for, the loop has taken item k - prefetch, and has moved
        on from the one before that.
        """
        ends: deque[int] = deque()  # how many items there had been at the end of each request that is not done with
        yielded = done = 0

        def count_done() -> int:
            nonlocal done
            while ends and ends[0] <= yielded - self._prefetch:
                ends.popleft()
                done += 1
            return done

        with Asking(self._address, self._join_timeout) as asking:
            for item, _, is_last in self._made(asking, self._begun_by_worker(asking, is_followed=False), count_done):
                yielded += 1
                if is_last:
                    ends.append(yielded)
                yield item

    def _begun_by_worker(self, asking: Asking, *, is_followed: bool) -> Making:
        worker = get_worker_info()
        assert worker is not None
        self._loops += 1
        loop = (worker.seed - worker.id) % (1 << 64), self._loops  # the same for all workers of a loop
        numbers = self._rank, worker.id, worker.num_workers, self._prefetch
        return Making(asking.begin(*numbers, loop, is_followed=is_followed))

    def _made(self, asking: Asking, making: Making, count_done: Callable[[], int]) -> Iterator[Tagged]:
        """The items, one request after the other."""
        while (given := asking.next_given(count_done(), making.count_masked())) is not None:
            yield from making.made_of(given)


def unix_address(address: str) -> UnixAddress:
    """The address. Raises WireError where it is none, ValueError for one of another kind."""
    parsed = parse_address(address)
    if not isinstance(parsed, UnixAddress):
        raise ValueError(f"address is {address!r}, expected 'unix:/path': ranks are on the same machine")
    return parsed
