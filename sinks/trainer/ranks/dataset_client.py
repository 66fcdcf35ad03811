"""Clients of a stream's dataset: workers that ask for items and make batches, and loops that report progress."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from math import inf
from time import monotonic
from typing import Any, NamedTuple, Self

import cloudpickle

from rollflow.nodes.env.remote.software import software
from rollflow.nodes.metrics.metrics_logger import MetricsLogger
from rollflow.nodes.modules.weights_codec import from_arrays
from rollflow.sinks.trainer.messages.by_module import parted_weights
from rollflow.sinks.trainer.ranks.dataset_protocol import (
    BatchParts,
    DatasetPlace,
    Share,
    ShareReader,
    StreamSetup,
    error_in,
)
from rollflow.sinks.trainer.trainer_side.item_maker import ItemMaker
from rollflow.sinks.trainer.trainer_side.staleness import StalenessBound
from rollflow.sinks.trainer.trainer_side.state import BatchItem
from rollflow.stream import wire
from rollflow.stream.data.errors import RollflowError, RunError
from rollflow.stream.net.request_link import LinkTarget, RequestLink

_LONGEST_ANSWER_S = 10.0


class _IsOver(Exception):
    """Raised once the stream has been left, and nothing more is for this rank."""


class DatasetClient:
    """Connection to a stream's dataset, closed when the block is left; one that breaks is dialled again.

    rank            of the trainer's processes, the one whose loop it is for
    join_timeout    seconds that the stream is waited for at first; None: for ever
    lost_timeout    seconds that it is waited for when the connection is lost; None: for ever
    is_gone         tells whether a stream that is away has ended with its process

    Its methods raise RunError where the stream is not there, or has been left; WireError where it refuses this end.
    """

    def __init__(
        self,
        place: DatasetPlace,
        rank: int,
        join_timeout: float | None,
        lost_timeout: float | None,
        is_gone: Callable[[], bool] = lambda: False,
    ) -> None:
        timeout, lost_timeout = (inf if each is None else each for each in (join_timeout, lost_timeout))
        target = LinkTarget(
            *place,
            timeout,
            software(),
            f"rank {rank}",
            wire.RankConnection,
            unanswered=RunError,
            closed=RunError,
            parted=_parting,
            lost_timeout=lost_timeout,
            is_gone=is_gone,
        )
        self._rank, self._reader = rank, ShareReader()
        self._link = RequestLink(target)
        self._is_over = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        self._link.close()

    def begin(
        self, worker: int, workers: int, prefetch: int, loop: str, parts: BatchParts, *, is_followed: bool
    ) -> StreamSetup:
        """Register as a worker of a loop; returns how its items are made.

        worker         which of the loop's `workers` this is
        prefetch       how many items it makes before they are asked for
        loop           what tells the loop from the rank's loops before
        parts          of this process, which its batches are made with
        is_followed    True where the loop itself reports which items it is given
        """
        has = {f"has_{name}": part is not None for name, part in parts._asdict().items()}
        has |= {"is_followed": is_followed}
        numbers = {"rank": self._rank, "worker": worker, "workers": workers, "prefetch": prefetch}
        result = self._request("begin", loop=loop, **numbers, **has)
        if result is None:
            raise RunError("the stream was left before its dataset's loop")
        values = result.values
        return StreamSetup(values["yields"], values["max_lag"], values["on_excess"], parts)

    def follow(self) -> None:
        """Register as the loop of the rank."""
        self._request("begin", rank=self._rank, workers=0)

    def next_share(self, done: int, masked: int) -> Share | None:
        """Wait for the worker's next share; None at the end of the stream.

        done      number of earlier shares that are done with, where the loop is not followed
        masked    steps of theirs that were masked since the last call

        Raises what the stream's loop would.
        """
        parts: list[wire.Result] = []
        left: int | None = None
        while left != 0:
            part = self._request("next", done=done, masked=masked)
            if part is None or part.values["share"] is None:
                return None
            parts.append(part)
            masked, left = 0, part.values["left"]
        return self._reader.read(parts)

    def take_up(self, share: int, *, is_last: bool) -> list[BatchItem]:
        """Report that the loop is given an item of a share; returns the share's records. Raises as `next_share`."""
        result = self._request("take_up", share=share, is_last=is_last)
        return [] if result is None else [BatchItem(*fields) for fields in result.values["items"]]

    def move_on(self, share: int) -> None:
        """Report that the loop has moved on from a share, unless the stream has been left."""
        with suppress(RollflowError):  # the next request raises it
            self._request("move_on", share=share)

    def give_back(self, share: int) -> None:
        """Report that the loop was not given what it took up last, and wait until the server has read that."""
        with suppress(RollflowError):
            self._request("give_back", monotonic() + _LONGEST_ANSWER_S, share=share)

    def _request(self, name: wire.QueryName, until: float = inf, **values: Any) -> wire.Result | None:
        """The answer to a call; None once the stream has been left, and nothing more is for this rank."""
        if self._is_over:
            return None
        try:
            result = self._link.ask(lambda number, done: wire.Query(number, done, name, values, {}), until)
        except _IsOver:
            self._is_over = True
            return None
        assert isinstance(result, wire.Result)
        if result.problem is not None:
            raise error_in(result)
        return result


def _parting(goodbye: wire.Goodbye) -> Exception:
    """The error of a stream that is left, for what is asked of it then."""
    return _IsOver() if goodbye.drained else RunError("the stream was left before its dataset's loop")


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
    """Makes items of the shares that a stream's dataset gives, with copies of the module and the learner's pieces."""

    def __init__(self, setup: StreamSetup) -> None:
        parts: BatchParts = cloudpickle.loads(cloudpickle.dumps(setup.parts))  # the loop trains the module itself
        self._item_maker = ItemMaker(setup.yields, *parts, MetricsLogger())
        self._module = parts.module
        self._yields, self._staleness = setup.yields, StalenessBound(setup.max_lag, setup.on_excess)

    def items_of(self, share: Share) -> Iterator[TaggedItem]:
        """Make the items of a share, one by one, after loading the weights that came with it."""
        if share.weights is not None:
            weights = from_arrays(share.weights)
            by_module = isinstance(self._module, Mapping)
            self._module.load_state_dict(parted_weights(weights, self._module) if by_module else weights)
        has_made = False
        for made in self._item_maker.items_of(share.items):
            has_made = True
            if self._yields == "batches":
                self._staleness.mask(made.item, made.of, share.version)
            yield TaggedItem(made.item, share.number, made.is_last)
        if not has_made:
            yield TaggedItem(None, share.number, True)

    def count_masked(self) -> int:
        """Take the number of steps that were masked since the last call."""
        return self._staleness.lost.pop("masked", 0)
