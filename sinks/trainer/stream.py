"""Trainer's end of the stream: an ordinary loop over what rollouts in other processes and on other hosts send."""

import ssl
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from multiprocessing.connection import wait
from os import PathLike
from typing import Any, Literal, Self

import anyio.to_thread

from rollflow.nodes.argument_checks import check_numbers
from rollflow.nodes.closing import closing_on_error
from rollflow.nodes.env.remote.remote_envs import Secret, address_of, close_sockets, listen_on, secret_bytes
from rollflow.nodes.logs.destinations import Log, LogOptions
from rollflow.nodes.logs.figures import Axis
from rollflow.nodes.metrics.metrics_logger import MetricsLogger
from rollflow.sinks.trainer.messages.by_module import is_by_module, joined_weights, own_shapes
from rollflow.sinks.trainer.own_folder import OwnFolder
from rollflow.sinks.trainer.ranks.dataset import TrainerDataset
from rollflow.sinks.trainer.ranks.dataset_protocol import BatchParts, StreamSetup, places_of
from rollflow.sinks.trainer.ranks.dataset_server import DatasetServer
from rollflow.sinks.trainer.trainer_side.batch_assembly import ArrivalOrder, LaneRounds
from rollflow.sinks.trainer.trainer_side.compatibility import checked_address
from rollflow.sinks.trainer.trainer_side.intake import Intake
from rollflow.sinks.trainer.trainer_side.item_maker import (
    ItemMaker,
    LearnerConnector,
    LoopItem,
    StreamReturns,
    Yields,
    check_choices,
    check_module,
)
from rollflow.sinks.trainer.trainer_side.listener import TrainerListener
from rollflow.sinks.trainer.trainer_side.newest_weights import PublishedWeights
from rollflow.sinks.trainer.trainer_side.rollout_peer import ArrivedItem
from rollflow.sinks.trainer.trainer_side.staleness import FlowWindows, OnExcess, StalenessBound
from rollflow.sinks.trainer.trainer_side.state import (
    HAS_ENDED,
    BatchItem,
    WeightsInUse,
    failure_of,
    state_dict_of,
    state_from,
    weights_in_use,
)
from rollflow.sinks.trainer.trainer_side.stream_log import StreamLog
from rollflow.stream.data.errors import EnvError, RunError
from rollflow.stream.data.zstd import check_available
from rollflow.stream.net.backoff import WaitReminder
from rollflow.stream.observe.stacks import answering_dumps
from rollflow.stream.wire import Address, Limits, SharedAddress

_NOT_YET = object()


class TrainerStream:
    """Stream of what rollouts with a `TrainerSink` send: `with TrainerStream(...) as stream: for batch in stream: ...`.

        address                where to listen: 'tcp://host:port' or 'unix:/path'; port 0 is any that is free. With
                               'shm:/path', for rollouts on this host, fragments stay in memory that both share
        secret, tls            as for `RemoteEnvs.listen`
        yields                 "batches": train batches, column -> tensor `any[B, ...]`, of the learner pipeline, which
                               runs here, or of a `LearnerPipeline` where the rollout is; of several modules as module
                               id -> train batch. "fragments" or "episodes": one by one
        fragments_per_batch    number of fragments in a batch, in the order in which they come. None: as many as there
                               are lanes in all the rollouts that are there or may come back; under "pace", one of each
        learner_connector      `lambda obs_space, act_space: piece or list of pieces`, before the default ones
        module                 passed to the pieces as `rl_module`
        sources                rollouts that are waited for first; others may come any time. None: 0, and no end
        join_timeout           seconds that they are waited for; when all are lost, seconds that others are waited for
                               after the time that they had to come back, `grace_s` of `limits`. None: for ever
        prefetch               batches that rollouts may send ahead
        max_lag                age in policy versions that a fragment may have when it is handed over; None: any age
        on_excess              effect on an older one. "drop": it is left out and counted. "raise": LagError. "mask":
                               its older steps get False in the batch's `loss_mask`. "pace": the rollouts wait, so that
                               none gets older, if weights are published at most once per batch, before the next is
                               asked for; a batch is then one fragment of every lane, or one train batch of every
                               rollout. With max_lag=0 all is exactly on-policy. Of several agents, some may have acted
                               before and wait for their next observation: those steps are masked. Fragments by weights
                               of an earlier trainer are left out and counted
        ack                    "auto": a rollout may forget a fragment as soon as the trainer asks for the next batch.
                               "manual": when `ack` is called, as a rule after a checkpoint
        compression            "zstd": observations come compressed, and weights go as a difference from those
                               before, for slow networks; needs `rollflow[compression]` at both ends. None: they do not
        metrics                passed to the pieces; None: a `MetricsLogger`, to be read as `stream.metrics`
        limits                 of frames, times and bytes under way
        log, log_every, log_x, trace    as for `Rollout`; `stream.log(name, value)` logs one's own figures

        address    listened on, with its port, once the block is entered: for `feed`, or as text, `str(address)`
        handed     records of the items in the batch that was handed over last

    A batch is done with when the next one is asked for. The loop ends when no rollout is left, and as many as `sources`
    have announced that no more comes. Leaving the block, of `with` or `async with`, says goodbye to the rollouts; but
    after an error they wait for a trainer to come back.

    Raises RunError where the address can't be listened on, no rollout comes, or all are lost.
    """

    def __init__(
        self,
        address: str | Address,
        *,
        secret: Secret = None,
        tls: ssl.SSLContext | None = None,
        yields: Yields = "batches",
        fragments_per_batch: int | None = None,
        learner_connector: LearnerConnector | None = None,
        module: Any = None,
        sources: int | None = 1,
        join_timeout: float | None = 120.0,
        prefetch: int = 1,
        max_lag: int | None = None,
        on_excess: OnExcess = "drop",
        ack: Literal["auto", "manual"] = "auto",
        compression: Literal["zstd"] | None = None,
        metrics: Any = None,
        limits: Limits | None = None,
        log: Log = None,
        log_every: float = 1.0,
        log_x: Axis = "steps",
        trace: str | PathLike[str] | None = None,
    ) -> None:
        check_numbers(fragments_per_batch=(fragments_per_batch, 1), sources=(sources, 1))
        check_numbers(join_timeout=(join_timeout, 0), max_lag=(max_lag, 0))
        check_available(compression)
        check_choices(yields, on_excess, ack, count=fragments_per_batch, max_lag=max_lag, taught=learner_connector)
        check_module(module)
        known, limits = secret_bytes(secret), limits or Limits()
        self.address: Address = checked_address(address, known, tls)
        self.yields = yields
        self.handed: list[BatchItem] = []
        self.metrics = MetricsLogger() if metrics is None else metrics
        self._item_maker = ItemMaker(yields, learner_connector, module, self.metrics)
        self._setup = StreamSetup(yields, max_lag, on_excess, BatchParts(learner_connector, module))
        self._ends: dict[str, Any] = {"secret": known, "tls": tls, "limits": limits}  # of connections
        self._staleness = StalenessBound(max_lag, on_excess)
        self._join_timeout, self._expected = join_timeout, sources or 0
        self._current: list[ArrivedItem] = []  # of the batch that was handed over last
        self._left_out: list[ArrivedItem] = []  # done with together with the batch that is handed over next
        self._items: Iterator[LoopItem] = iter(())
        self._server: DatasetServer | None = None
        self._closing, self._state = ExitStack(), "new"
        self._listener = TrainerListener(
            **self._ends,
            ahead=self._staleness.ahead,
            compression=compression,
            windows=FlowWindows(self._staleness, yields, prefetch, fragments_per_batch, stays=sources is None),
            shares=isinstance(self.address, SharedAddress),
            own=own_shapes(module),
        )
        self.log = StreamLog(self, LogOptions(log, log_every, log_x, None, trace), self._listener.trace)
        count = fragments_per_batch if yields == "batches" else 1
        self._intake = Intake(
            self._listener,
            ArrivalOrder(count) if self._staleness.ahead is None else LaneRounds(),
            self._staleness,
            is_gathered=yields == "batches",
            sources=sources,
            acks=ack == "auto",
            where=lambda: str(self.address),
        )

    def __enter__(self) -> Self:
        if self._state != "new":
            raise RunError(f"the stream is {self._state}: it runs once, make another one")
        try:
            self._listener.sockets = listen_on(self.address, self._expected)
        except EnvError as error:
            raise RunError(str(error)) from error
        if not isinstance(self.address, SharedAddress):
            self.address = address_of(self._listener.sockets[0])
        with closing_on_error(lambda: close_sockets(self._listener.sockets)):
            self.log.begin()
        self._closing.enter_context(answering_dumps())
        self._state = "running"
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if error is None:
            self._move_on()
        self._closing.close()
        self._state = "closed"
        self._listener.close(HAS_ENDED if error is None else None, failure_of(error))
        close_sockets(self._listener.sockets)
        self.log.end()

    async def __aenter__(self) -> Self:
        return self.__enter__()

    async def __aexit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(self.__exit__, kind, error, traceback)

    def __iter__(self) -> Iterator[Any]:
        while True:
            patience = self._begin_next()
            while (item := self._try_next(patience)) is _NOT_YET:
                if not self._listener.serve(seconds := patience.left):
                    wait([self._listener.bell.fileno()], seconds)
            if item is None:
                return
            yield item

    async def __aiter__(self) -> AsyncIterator[Any]:
        while True:
            patience = self._begin_next()
            while (item := self._try_next(patience)) is _NOT_YET:
                with anyio.move_on_after(patience.left):
                    await anyio.wait_readable(self._listener.bell.fileno())
            if item is None:
                return
            yield item

    def publish(self, weights: Mapping[str, Any]) -> int:
        """Copy weights for all rollouts to act with, and return their policy version; another thread sends them.

        weights    a `state_dict()`; where rollouts have several modules, module id -> `state_dict()` of each trained

        A rollout that is slow to take weights gets the newest alone. If a rollout comes with a newer version, of an
        earlier trainer, the weights get a version above that. The first weights after `load_state_dict` keep their
        version if they are those that were published last before `state_dict`.

        Raises RunError once the stream is closed. Raises ModuleError for weights that can't be sent, don't fit a
        rollout's module, or are larger than a message that it takes; a later rollout is refused for these reasons.
        """
        self._check_open()
        weights = joined_weights(weights) if is_by_module(weights) else weights
        return self._listener.publish(PublishedWeights.of(weights))

    def dataset(self, *, prefetch_factor: int = 2, world_size: int = 1, address: str | None = None) -> TrainerDataset:
        """Make a dataset of the stream, instead of `for batch in stream`: see `TrainerDataset`, and its `loader`.

        prefetch_factor    items that each of a loader's workers makes ahead
        world_size         processes of the trainer, of which this is rank 0, which publishes: under "pace" once in a
                           round at most. Each batch goes to one of them, in turn; less than a round is `lost`. The
                           stream is to be left when all loops have come to their end
        address            for the other ranks' `TrainerDataset.connect`: 'tcp://host:port' or 'unix:/path', with the
                           stream's secret and TLS; None: there are none

        `handed` lists rank 0's batches. `max_lag` holds when a worker takes an item, which the loop may see
        (prefetch_factor + 1) × num_workers items later; "pace" is for num_workers=0. Rollouts keep as many batches
        more, even if that exceeds their `max_bytes`.

        Raises RunError outside of the block, for a second one, or where the stream has begun and is to be paced.
        """
        check_numbers(world_size=(world_size, 1))
        self._check_running()
        if world_size > 1 and address is None:
            raise ValueError(f"world_size is {world_size}, expected an address for the other ranks")
        if self._server is not None:
            raise RunError("the stream has a dataset already, expected one")
        self._staleness.world_size = world_size
        if self._listener.is_open and self._staleness.ahead != self._listener.ahead:
            raise RunError("the stream has begun, expected its dataset before the first batch is asked for")
        self._listener.ahead = self._staleness.ahead
        folder = self._closing.enter_context(closing(OwnFolder()))
        places = places_of(f"unix:{folder.path}/dataset", address, **self._ends)
        calls: dict[str, Any] = {"begin": self._open, "returns": self.returns, "handed": self._note_handed}
        self._server = DatasetServer(
            places, world_size, self._intake, self._setup, join_timeout=self._join_timeout, **calls
        )
        self._closing.callback(self._server.close)
        options: dict[str, Any] = {
            "prefetch_factor": prefetch_factor,
            "join_timeout": self._join_timeout,
            "stream": self,
        }
        options |= {"address": self._server.shared, "is_paced": self._staleness.ahead is not None}
        return TrainerDataset(places[0], 0, self._setup.parts, **options)

    def expect_no_more(self) -> None:
        """Let the loop end when the rollouts have that are there, and wait for no others. From any thread."""
        self._intake.expect_no_more()

    def ack(self, state: Mapping[str, Any] | None = None) -> None:
        """Acknowledge all that was handed over, or what an earlier `state_dict()` has. Raises RunError once closed."""
        self._check_open()
        if state is None:
            self._move_on()
        self._intake.keep(state)

    def put_back(self) -> None:
        """Before the block is left: be not done with what was handed over last, so that its rollout keeps it."""
        self._current = []

    def refuse(self, reason: str) -> None:
        """Refuse the rollouts of what was handed over last, since that can't be used."""
        self._intake.refuse(self._current, reason)

    def weights_in_use(self) -> list[WeightsInUse]:
        """Weights that every forward node of every rollout was last seen to use.

        Nodes in worker processes and on hosts of whole rollouts report with a fragment what their modules have loaded;
        weights above a megabyte maybe with the fragment after it. A host with older software does not report it.
        """
        with self._listener.lock:
            return weights_in_use(self._listener.connected, self._listener.weights.digests)

    def state_dict(self) -> dict[str, Any]:
        """State after the last batch, as plain data for JSON: what has been handed over, and the policy version.

        Take it when the trainer has learnt from the last batch, and save it with the weights before these are
        published: under "pace" nothing is left out then, whenever the trainer is killed. With several ranks, take it
        after a barrier. It is behind a `DataLoader` of your own with workers: see `TrainerDataset`.
        """
        newest, taken = self._listener.weights.identity(), self._server.taken() if self._server is not None else []
        with self._listener.lock:
            counted, lost = self.log.counted, self._staleness.lost
            return state_dict_of(self._listener.sources, [*self._current, *taken], *newest, lost, counted)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict` of an earlier trainer: what that was handed is not handed over again.

        Raises RunError once a batch has been asked for, ValueError for anything but such a state.
        """
        if self._listener.is_open:
            raise RunError("the stream has begun, expected load_state_dict before the first batch is asked for")
        found = state_from(state)
        found.resume(self._listener.sources, self._listener.weights, self._staleness)
        self.log.go_on_from(*found.counted)

    @property
    def version(self) -> int:
        """Policy version of the newest weights; before any were published here, that of the rollouts."""
        return self._listener.weights.version

    @property
    def returns(self) -> StreamReturns:
        """Returns of the episodes that have ended in what was handed over, of several agents also `by_module`."""
        return self._item_maker.returns

    @property
    def lost(self) -> dict[str, int]:
        """Number of transitions that came and were not handed over, by cause: `max_lag`, `masked`, `uneven`."""
        return dict(self._staleness.lost)

    @property
    def missed(self) -> int:
        """Number of items that earlier trainers were done with after the state that the next one loaded."""
        with self._listener.lock:
            return sum(source.session.missed for source in self._listener.sources.values())

    @property
    def sources(self) -> list[str]:
        """Names of the rollouts that are there."""
        with self._listener.lock:
            return [source.called for source in self._listener.connected]

    # Inside

    def _check_open(self) -> None:
        if self._state == "closed":
            raise RunError("the stream is closed, expected this before its block is left")

    def _begin_next(self) -> WaitReminder:
        self._open()
        self._listener.trace.asks()
        self._move_on()
        return WaitReminder(self._join_timeout)

    def _open(self) -> None:
        """Let rollouts connect, unless they may already."""
        self._check_running()
        self._listener.open()

    def _check_running(self) -> None:
        if self._state != "running":
            raise RunError(f"the stream is {self._state}; this loop expects: with TrainerStream(...) as stream:")

    def _move_on(self) -> None:
        self._intake.be_done_with(self._current)
        self._current = []
        if self._server is not None:
            self._server.move_on()

    def _try_next(self, patience: WaitReminder) -> Any:
        """Next item; `_NOT_YET`: it is waited for; None: no more come. Raises RunError where no rollout comes."""
        while (made := next(self._items, None)) is None:
            arrived = self._intake.try_take(patience)
            if not arrived:
                return None if arrived is None else _NOT_YET
            # If no item can be made of them, they stay in the intake, and the next try raises again.
            with self._listener.trace.making():
                self._items = self._item_maker.items_of(arrived)
                made = next(self._items, None)
            self._left_out += self._intake.forget(arrived)
            if made is not None:
                break
            self._intake.be_done_with([*arrived, *self._left_out])  # agents may wait all the while
            self._left_out = []
        version = self.version
        if self.yields == "batches":
            self._staleness.mask(made.item, made.of, version)
        self._note_handed([BatchItem.of(arrived, version) for arrived in made.of], made.of)
        self._current, self._left_out = ([*made.of, *self._left_out], []) if made.is_last else ([], self._left_out)
        return made.item

    def _note_handed(self, items: list[BatchItem], of: Sequence[ArrivedItem] = ()) -> None:
        self.handed = items
        self._listener.trace.gets(of)
        self.log.take(items)
