"""A trainer's stream as a dataset: for a `DataLoader`, and for a trainer of several processes."""

import pickle
import secrets
import socket
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from time import monotonic, sleep
from typing import Any, Self

from torch.utils.data import IterableDataset, get_worker_info

from rollflow.nodes.backoff import pause_s
from rollflow.nodes.given import check_numbers
from rollflow.nodes.metrics_logger import MetricsLogger
from rollflow.nodes.remote.dial import problem_of, reach
from rollflow.nodes.weights_codec import from_arrays
from rollflow.sinks.trainer import parcel
from rollflow.sinks.trainer.age import AgeBound
from rollflow.sinks.trainer.by_module import parted_weights
from rollflow.sinks.trainer.dataset_server import ASK, HELLO, Given, Setup
from rollflow.sinks.trainer.handing_over import HandingOver
from rollflow.sinks.trainer.item_message import tensors_of
from rollflow.sinks.trainer.source import Arrived, Source
from rollflow.stream.errors import RunError
from rollflow.stream.fragment import Fragment
from rollflow.stream.wire import TrainerSession, UnixAddress, parse_address

_LONGEST_PAUSE_S = 1.0


class TrainerDataset(IterableDataset[Any]):
    """What a `TrainerStream` hands over, for `DataLoader(dataset, batch_size=None, num_workers=…)`: each item once.

    Made by `TrainerStream.dataset`, and by `connect` in the other processes of a trainer.

    Without workers it is the stream's own iteration. With workers the stream stays in its process; they ask it for
    items, and run the learner pipeline, with a copy of the module that gets the weights that are published, and with
    metrics of their own. Items come in the stream's order. One is done with when a worker's later requests show that
    the loop has moved on from it, and the last ones when the loop has come to its end and the stream is left: until
    then `TrainerStream.state_dict` does not count them. What the workers of a loop that was left early, or failed,
    still had, is given to the next loop: among it up to `prefetch_factor` + 1 items for each worker that the one before
    may have seen.

    For pinned memory say `DataLoader(pin_memory=True)`: train batches are plain tensors.
    """

    def __init__(
        self,
        address: UnixAddress,
        rank: int,
        *,
        prefetch_factor: int = 2,
        join_timeout: float | None = 120.0,
        stream: Iterable[Any] | None = None,
    ) -> None:
        check_numbers(rank=(rank, 0), prefetch_factor=(prefetch_factor, 1), join_timeout=(join_timeout, 0))
        self._address, self._rank, self._prefetch = address, rank, prefetch_factor
        self._join_timeout, self._stream = join_timeout, stream
        self._loops = 0

    @classmethod
    def connect(cls, address: str, *, rank: int, prefetch_factor: int = 2, join_timeout: float | None = 120.0) -> Self:
        """The dataset of another process of the trainer, on the same machine.

        address            that rank 0 gave to `TrainerStream.dataset`
        rank               which process it is
        prefetch_factor    as the `DataLoader` has it
        join_timeout       seconds that rank 0 is waited for; None: for ever

        Raises WireError or ValueError where the address is none for it. RunError, when it is iterated, where rank 0 is
        not there.
        """
        return cls(unix_address(address), rank, prefetch_factor=prefetch_factor, join_timeout=join_timeout)

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        if worker is None and self._stream is not None:
            return iter(self._stream)
        self._loops += 1
        if worker is None:
            return self._asked_for(HELLO.pack(self._rank, 0, 1, 0, secrets.randbits(63), 0), 0)
        loop = (worker.seed - worker.id) % (1 << 64), self._loops  # the same for all workers of a loop
        hello = HELLO.pack(self._rank, worker.id, worker.num_workers, self._prefetch, *loop)
        return self._asked_for(hello, self._prefetch)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_stream": None}

    def _asked_for(self, hello: bytes, prefetch: int) -> Iterator[Any]:
        """The items, one request after the other.

        A DataLoader lets no more than `prefetch` requests of a worker wait: each time the loop takes an item of the
        worker's, it adds a request. So when item k is asked for, the loop has taken item k - prefetch, and has moved
        on from the one before that.
        """
        with closing(self._reached()) as sock:
            parcel.check_same_user(sock, str(self._address))
            sock.sendall(hello)
            making = _Making(_answer(sock))
            ends: deque[int] = deque()  # how many items there had been at the end of each request that is not done with
            yielded = done = 0
            while True:
                while ends and ends[0] <= yielded - prefetch:
                    ends.popleft()
                    done += 1
                sock.sendall(ASK.pack(done, making.count_masked()))
                given = _answer(sock)
                if given is None:
                    return
                for item in making.made_of(given):
                    yielded += 1
                    yield item
                ends.append(yielded)

    def _reached(self) -> socket.socket:
        """A connection to the stream. Raises RunError where there is none."""
        began, failures = monotonic(), 0
        while True:
            try:
                sock = reach(self._address, failures)
            except OSError as error:
                if self._join_timeout is not None and monotonic() - began >= self._join_timeout:
                    told = f"the stream's dataset is not at {self._address}: {problem_of(error)}"
                    raise RunError(told) from error
                failures += 1
                sleep(pause_s(failures, _LONGEST_PAUSE_S))
                continue
            sock.setblocking(True)
            return sock


class _Making:
    """Makes items of what was given."""

    def __init__(self, setup: bytes) -> None:
        told: Setup = pickle.loads(setup)
        self._handing_over = HandingOver(told.yields, told.learner_connector, told.module, MetricsLogger())
        self._module = told.module
        self._yields, self._age = told.yields, AgeBound(told.max_lag, told.on_excess)
        self._sources: dict[bytes, Source] = {}

    def made_of(self, given: Given) -> Iterator[Any]:
        if given.weights is not None:
            weights = from_arrays(given.weights)
            by_module = isinstance(self._module, Mapping)
            self._module.load_state_dict(parted_weights(weights, self._module) if by_module else weights)
        for token, introduction in given.introductions.items():
            source = self._sources[token] = Source(TrainerSession(token))
            source.name, source.spaces, source.action_space, source.is_stateful, source.is_by_module = introduction
        taken = []
        for token, number, columns, version in given.items:
            item = columns if isinstance(columns, Fragment) else tensors_of(columns)
            taken.append(Arrived(self._sources[token], number, item, version))
        for made in self._handing_over.made_of(taken):
            if self._yields == "batches":
                self._age.mask(made.item, made.of, given.version)
            yield made.item

    def count_masked(self) -> int:
        """Steps that were masked since this was asked last."""
        return self._age.lost.pop("masked", 0)


def unix_address(address: str) -> UnixAddress:
    """The address. Raises WireError where it is none, ValueError for one of another kind."""
    parsed = parse_address(address)
    if not isinstance(parsed, UnixAddress):
        raise ValueError(f"address is {address!r}, expected 'unix:/path': ranks are on the same machine")
    return parsed


def _answer(sock: socket.socket) -> Any:
    """What is answered. Raises it where it is an error, and RunError where the stream is gone."""
    try:
        answer = parcel.receive(sock)
    except (EOFError, OSError) as error:
        raise RunError("the stream was left before its dataset's loop") from error
    if isinstance(answer, Exception):
        raise answer
    return answer
