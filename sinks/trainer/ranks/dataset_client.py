"""Clients of a stream's dataset: workers that ask for items and make batches, and loops that report progress."""

import pickle
import socket
from collections.abc import Iterator, Mapping
from contextlib import suppress
from time import monotonic, sleep
from typing import Any, NamedTuple, Self

from rollflow.nodes.metrics.metrics_logger import MetricsLogger
from rollflow.nodes.modules.weights_codec import from_arrays
from rollflow.sinks.trainer.messages.by_module import parted_weights
from rollflow.sinks.trainer.messages.item_message import AnyFragment, tensors_of
from rollflow.sinks.trainer.ranks import dataset_server, pickle_channel
from rollflow.sinks.trainer.trainer_side.item_maker import ItemMaker
from rollflow.sinks.trainer.trainer_side.rollout_peer import ArrivedItem, RolloutPeer
from rollflow.sinks.trainer.trainer_side.staleness import StalenessBound
from rollflow.sinks.trainer.trainer_side.state import BatchItem
from rollflow.stream.data.errors import RunError
from rollflow.stream.net.backoff import pause_s
from rollflow.stream.net.dial import problem_of, reach
from rollflow.stream.wire import TrainerSession, UnixAddress

_LONGEST_PAUSE_S = 1.0
_LONGEST_ANSWER_S = 10.0
_MOST_READ = 1 << 16


class DatasetClient:
    """Connection to a stream's dataset, closed when the block is left.

    join_timeout    seconds that the stream is waited for; None: for ever

    Raises RunError where the stream is not there.
    """

    def __init__(self, address: UnixAddress, join_timeout: float | None) -> None:
        self._sock = _connect(address, join_timeout)
        self._is_over = False  # True once the stream has been left, and nothing more is for this rank

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        self._sock.close()

    def begin(
        self, rank: int, worker: int, workers: int, prefetch: int, loop: tuple[int, int], *, is_followed: bool
    ) -> dataset_server.StreamSetup:
        """Register as a worker of a loop; returns how its items are made.

        rank           of the trainer's processes, the one whose loop it is
        worker         which of the loop's `workers` this is
        prefetch       how many items it makes before they are asked for
        loop           (process id, number) of the loop: what tells it from the rank's loops before
        is_followed    True where the loop itself reports which items it is given
        """
        self._sock.sendall(dataset_server.HELLO.pack(rank, worker, workers, prefetch, is_followed, *loop))
        setup: dataset_server.StreamSetup = pickle.loads(self._answer())
        return setup

    def follow(self, rank: int) -> None:
        """Register as the loop of a rank."""
        self._sock.sendall(dataset_server.HELLO.pack(rank, 0, 0, 0, True, 0, 0))

    def next_share(self, done: int, masked: int) -> dataset_server.DatasetAnswer | None:
        """Wait for the worker's next share; None at the end of the stream.

        done      number of earlier shares that are done with, where the loop is not followed
        masked    steps of theirs that were masked since the last call

        Raises what the stream's loop would, and RunError where the stream has been left.
        """
        share: dataset_server.DatasetAnswer | None = self._request(dataset_server.NEXT, done, masked)
        return share

    def take_up(self, share: int, *, is_last: bool) -> list[BatchItem]:
        """Report that the loop is given an item of a share; returns the share's records. Raises as `next_share`."""
        batch_items: list[BatchItem] | None = self._request(dataset_server.TAKE_UP, share, is_last)
        self._is_over = self._is_over or batch_items is None
        return batch_items or []

    def move_on(self, share: int) -> None:
        """Report that the loop has moved on from a share, unless the stream has been left."""
        with suppress(OSError):
            self._sock.sendall(dataset_server.REQUEST.pack(dataset_server.MOVE_ON, share, 0))

    def give_back(self, share: int) -> None:
        """Report that the loop was not given what it took up last, and wait until the server has read that."""
        with suppress(OSError):
            self._sock.settimeout(_LONGEST_ANSWER_S)
            self._sock.sendall(dataset_server.REQUEST.pack(dataset_server.GIVE_BACK, share, 0))
            self._sock.shutdown(socket.SHUT_WR)
            while self._sock.recv(_MOST_READ):
                pass

    def _request(self, kind: int, first: int, second: int) -> Any:
        if self._is_over:
            return None
        with suppress(OSError):  # the server's last answer may still be read
            self._sock.sendall(dataset_server.REQUEST.pack(kind, first, second))
        return self._answer()

    def _answer(self) -> Any:
        """Receive an answer. Raises an answer that is an error, and RunError where the stream is gone."""
        try:
            answer = pickle_channel.receive(self._sock)
        except (EOFError, OSError) as error:
            raise RunError("the stream was left before its dataset's loop") from error
        if isinstance(answer, Exception):
            raise answer
        return answer


def _connect(address: UnixAddress, join_timeout: float | None) -> socket.socket:
    began, failures = monotonic(), 0
    while True:
        try:
            sock = reach(address, failures)
        except OSError as error:
            if join_timeout is not None and monotonic() - began >= join_timeout:
                raise RunError(f"the stream's dataset is not at {address}: {problem_of(error)}") from error
            failures += 1
            sleep(pause_s(failures, _LONGEST_PAUSE_S))
            continue
        sock.setblocking(True)
        try:
            pickle_channel.check_same_user(sock, str(address))
        except RunError:
            sock.close()
            raise
        return sock


class TaggedItem(NamedTuple):
    """Item for a loop.

    item       a train batch, a fragment or an episode; None: nothing is made of the share
    share      number of the share that it was made of
    is_last    True if nothing more is made of that share
    """

    item: Any
    share: int
    is_last: bool


class BatchWorker:
    """Makes items of the shares that a stream's dataset gives."""

    def __init__(self, setup: dataset_server.StreamSetup) -> None:
        self._item_maker = ItemMaker(setup.yields, setup.learner_connector, setup.module, MetricsLogger())
        self._module = setup.module
        self._yields, self._staleness = setup.yields, StalenessBound(setup.max_lag, setup.on_excess)
        self._sources: dict[bytes, RolloutPeer] = {}

    def items_of(self, answer: dataset_server.DatasetAnswer) -> Iterator[TaggedItem]:
        """Make the items of a share, one by one, after loading the weights that came with it."""
        if answer.weights is not None:
            weights = from_arrays(answer.weights)
            by_module = isinstance(self._module, Mapping)
            self._module.load_state_dict(parted_weights(weights, self._module) if by_module else weights)
        for token, introduction in answer.introductions.items():
            self._sources[token] = RolloutPeer(TrainerSession(token), **introduction)
        arrived = []
        for token, number, columns, version in answer.items:
            item = columns if isinstance(columns, AnyFragment) else tensors_of(columns)
            arrived.append(ArrivedItem(self._sources[token], number, item, version))
        has_made = False
        for made in self._item_maker.items_of(arrived):
            has_made = True
            if self._yields == "batches":
                self._staleness.mask(made.item, made.of, answer.version)
            yield TaggedItem(made.item, answer.share, made.is_last)
        if not has_made:
            yield TaggedItem(None, answer.share, True)

    def count_masked(self) -> int:
        """Take the number of steps that were masked since the last call."""
        return self._staleness.lost.pop("masked", 0)
