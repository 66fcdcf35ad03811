"""A trainer's end of the stream: what rollouts in other processes and on other hosts send, for an ordinary loop."""

import select
import ssl
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from types import TracebackType
from typing import Any, Literal, Self

import anyio

from rollflow.nodes.given import check_numbers
from rollflow.nodes.metrics_logger import MetricsLogger
from rollflow.nodes.remote.remote_envs import Secret, address_of, close_sockets, listen_on, secret_bytes
from rollflow.nodes.remote.transport import check_server_tls
from rollflow.sinks.trainer.age import AgeBound, OnExcess
from rollflow.sinks.trainer.async_block import AsyncBlock
from rollflow.sinks.trainer.by_module import is_by_module, joined_weights, own_shapes
from rollflow.sinks.trainer.choices import check_choices, check_module
from rollflow.sinks.trainer.compression import check_available
from rollflow.sinks.trainer.dataset import TrainerDataset, unix_address
from rollflow.sinks.trainer.dataset_server import DatasetServer, Setup
from rollflow.sinks.trainer.door import Door
from rollflow.sinks.trainer.forked import Sockets, keep_from_forked
from rollflow.sinks.trainer.handing_over import HandedOver, HandingOver, LearnerConnector, Yields
from rollflow.sinks.trainer.intake import Intake
from rollflow.sinks.trainer.newest_weights import Published
from rollflow.sinks.trainer.own_folder import OwnFolder
from rollflow.sinks.trainer.patience import Patience
from rollflow.sinks.trainer.shared.descriptor_transport import check_shared
from rollflow.sinks.trainer.source import Arrived
from rollflow.sinks.trainer.state import known_of, state_of
from rollflow.sinks.trainer.stream_returns import StreamReturns
from rollflow.sinks.trainer.supply import FirstCome, Rounds
from rollflow.sinks.trainer.told import HAS_ENDED, Handed, InUse, handed, in_use, told_failure
from rollflow.sinks.trainer.windows import Windows
from rollflow.stream.errors import EnvError, RunError
from rollflow.stream.wire import (
    Address,
    Limits,
    SharedAddress,
    UnixAddress,
    check_secret,
    parse_trainer_address,
)

_NOT_YET = object()


class TrainerStream(AsyncBlock):
    """What rollouts with a `TrainerSink` send, for a loop of somebody's own: `with TrainerStream(...) as stream`.

        address                where to listen: 'tcp://host:port' or 'unix:/path'; port 0 is any that is free. With
                               'shm:/path', for rollouts on this host, fragments stay in memory that both share
        secret, tls            as for `RemoteEnvs.listen`
        yields                 "batches": train batches of the learner pipeline, which runs here, as `Rollout.batches`
                               gives them, or those that a `LearnerPipeline` has made where the rollout is, of several
                               modules as module id -> train batch; "fragments" or "episodes": one by one
        fragments_per_batch    in the order in which they come. None: as many as there are lanes in all the rollouts
                               that are there or may come back; under "pace", one of each of these
        learner_connector      `lambda obs_space, act_space: piece or list of pieces`, before the default ones
        module                 what the pieces see as `rl_module`
        sources                how many rollouts are waited for before the first batch; others may come at any time
        join_timeout           seconds that they are waited for, and, when all are lost, for others, once the time that
                               they had to come back, `grace_s` of `limits`, is over; None: for ever
        prefetch               batches that rollouts may send ahead
        max_lag                how many policy versions old a fragment may be when it is handed over; None: any age
        on_excess              what is done with an older one. "drop": it is left out and counted. "raise": LagError.
                               "mask": its older steps get False in the batch's `loss_mask`. "pace": the rollouts wait,
                               so that none gets older, as long as weights are published at most once per batch, before
                               the next is asked for; a batch is then one fragment of every lane, or one train batch of
                               every rollout. With max_lag=0 all is exactly on-policy. Of several agents, some may have
                               acted before and wait for their next observation: those steps are masked. What weights of
                               an earlier trainer made is left out and counted
        ack                    "auto": a rollout may forget a fragment as soon as the trainer has moved on from it, and
                               asks for the next. "manual": when `ack` is called, as a rule after a checkpoint
        compression            "zstd": observations come compressed, for slow networks; takes `rollflow[compression]` at
                               both ends. None: they do not
        metrics                what pieces log into; None: a `MetricsLogger`, to be read as `stream.metrics`
        limits                 of frames, times and bytes under way

        address    listened on, with the port that it has, once it is entered: for `feed`, or as text, `str(address)`
        handed     what is in the batch that was handed over last

    A batch is done with when the next one is asked for. The loop ends when no rollout is left, and as many as `sources`
    have said that no more comes. Leaving the block without an error says goodbye to the rollouts; with one, they wait
    for a trainer to come back.

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
        sources: int = 1,
        join_timeout: float | None = 120.0,
        prefetch: int = 1,
        max_lag: int | None = None,
        on_excess: OnExcess = "drop",
        ack: Literal["auto", "manual"] = "auto",
        compression: Literal["zstd"] | None = None,
        metrics: Any = None,
        limits: Limits | None = None,
    ) -> None:
        check_numbers(
            fragments_per_batch=(fragments_per_batch, 1),
            sources=(sources, 1),
            join_timeout=(join_timeout, 0),
            prefetch=(prefetch, 0),
            max_lag=(max_lag, 0),
        )
        check_available(compression)
        check_choices(yields, on_excess, ack, count=fragments_per_batch, max_lag=max_lag, taught=learner_connector)
        check_module(module)
        self.address: Address = parse_trainer_address(address)
        check_secret(self.address, secret_bytes(secret))
        check_shared(self.address, tls)
        check_server_tls(tls)
        self.yields = yields
        self.handed: list[Handed] = []
        self.metrics = MetricsLogger() if metrics is None else metrics
        self._handing_over = HandingOver(yields, learner_connector, module, self.metrics)
        self._setup = Setup(yields, learner_connector, module, max_lag, on_excess)
        self._age = AgeBound(max_lag, on_excess)
        self._join_timeout = join_timeout
        self._current: list[Arrived] = []
        self._left_out: list[Arrived] = []  # of what is handed over next, with which it is done
        self._made: Iterator[HandedOver] = iter(())
        self._server: DatasetServer | None = None
        self._closing = ExitStack()
        self._door = Door(
            secret=secret_bytes(secret),
            tls=tls,
            limits=limits or Limits(),
            ahead=self._age.ahead,
            compression=compression,
            windows=Windows(self._age, yields, prefetch=prefetch, count=fragments_per_batch),
            shares=isinstance(self.address, SharedAddress),
            own=own_shapes(module),
        )
        self._intake = Intake(
            self._door,
            FirstCome(fragments_per_batch if yields == "batches" else 1) if self._age.ahead is None else Rounds(),
            self._age,
            is_gathered=yields == "batches",
            sources=sources,
            acks=ack == "auto",
            where=lambda: str(self.address),
        )
        self._state = "new"

    def __enter__(self) -> Self:
        if self._state != "new":
            raise RunError(f"the stream is {self._state}: it runs once, make another one")
        try:
            self._sockets = listen_on(self.address)
        except EnvError as error:
            raise RunError(str(error)) from error
        self._listening = Sockets(self._sockets)
        keep_from_forked(self._listening)
        if not isinstance(self.address, SharedAddress):
            self.address = address_of(self._sockets[0])
        self._state = "running"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._state = "closed"
        if error is None:
            self._move_on()
        self._closing.close()
        self._door.close(HAS_ENDED if error is None else None, told_failure(error))
        close_sockets(self._sockets)

    def __iter__(self) -> Iterator[Any]:
        while self._begin_next():
            patience = Patience(self._join_timeout)
            while (item := self._try_next(patience)) is _NOT_YET:
                self._wait(patience.left)
            if item is None:
                return
            yield item

    async def __aiter__(self) -> AsyncIterator[Any]:
        while self._begin_next():
            patience = Patience(self._join_timeout)
            while (item := self._try_next(patience)) is _NOT_YET:
                with anyio.move_on_after(patience.left):
                    await anyio.wait_readable(self._door.bell.fileno())
            if item is None:
                return
            yield item

    def publish(self, weights: Mapping[str, Any]) -> int:
        """Have every rollout act with these weights, a `state_dict()`, which is copied; the policy version they get.

        Where rollouts have several modules: module id -> its `state_dict()`, of all that are trained.
        They are sent meanwhile, by another thread; a rollout that is slow to take them gets the newest alone. Where one
        comes that has a newer version, of an earlier trainer, they get a version above that. Weights that are published
        first after `load_state_dict`, and are those that were published last before `state_dict`, keep their version.

        Raises ModuleError where they can't be sent, are not those of a rollout's module, or more than it takes as one
        message, RunError once the stream is closed. A rollout that comes later is refused for the same reasons.
        """
        self._check_open()
        weights = joined_weights(weights) if is_by_module(weights) else weights
        return self._door.publish(Published.of(weights))

    def dataset(self, *, prefetch_factor: int = 2, world_size: int = 1, address: str | None = None) -> TrainerDataset:
        """The stream as a dataset, instead of `for batch in stream`: see `TrainerDataset`, and its `loader`.

        prefetch_factor    items that each of a loader's workers makes ahead
        world_size         processes of the trainer, of which this is rank 0, which publishes: under "pace" once in a
                           round at most. Each batch goes to one of them, in turn; less than a round is `lost`. The
                           stream is to be left when all loops have come to their end
        address            'unix:/path' for the other ranks' `TrainerDataset.connect`; None: there are none

        `handed` is of rank 0's batches. `max_lag` is looked at when a worker takes an item, which the loop may see
        (prefetch_factor + 1) × num_workers items later; "pace" is for num_workers=0. Rollouts keep as many batches
        more, also where that is more than their `max_bytes`.

        Raises RunError outside of the block, for a second one, or where the stream has begun and is to be paced.
        """
        check_numbers(world_size=(world_size, 1))
        self._check_running()
        if world_size > 1 and address is None:
            raise ValueError(f"world_size is {world_size}, expected an address for the other ranks")
        if self._server is not None:
            raise RunError("the stream has a dataset already, expected one")
        self._age.world_size = world_size
        if self._door.is_open and self._age.ahead != self._door.ahead:
            raise RunError("the stream has begun, expected its dataset before the first batch is asked for")
        self._door.ahead = self._age.ahead
        where = self._meeting_place(address)
        self._server = DatasetServer(
            where,
            world_size,
            self._intake,
            self._setup,
            begin=self._open,
            returns=self.returns,
            tell=partial(setattr, self, "handed"),
            join_timeout=self._join_timeout,
        )
        self._closing.callback(self._server.close)
        alone, paced = world_size == 1, self._age.ahead is not None
        return TrainerDataset(
            where, 0, prefetch_factor=prefetch_factor, join_timeout=0, stream=self, is_alone=alone, is_paced=paced
        )

    def expect_no_more(self) -> None:
        """Have the loop end when those rollouts have that are there, whatever else was waited for. From any thread."""
        self._intake.expect_no_more()

    def ack(self) -> None:
        """Never want again what has been handed over so far, the last batch among it: for ack="manual".

        Raises RunError once the stream is closed.
        """
        self._check_open()
        self._move_on()
        self._intake.keep()

    def weights_in_use(self) -> list[InUse]:
        """What every forward node of every rollout was last seen to use.

        Those in worker processes and on hosts of whole rollouts say with a fragment what their modules have loaded; of
        weights above a megabyte, maybe with the fragment behind it. A host with older software does not say it.
        """
        with self._door.lock:
            return in_use(self._door.connected, self._door.weights.digests)

    def state_dict(self) -> dict[str, Any]:
        """What has been handed over so far, the last batch among it, and the policy version: plain data, for JSON.

        To be taken when the trainer has learnt from the last batch, and saved with its weights before these are
        published: under "pace" nothing is left out then, whenever the trainer is killed. Where a dataset has several
        ranks, when all are at the same point, after a barrier: what each was given is counted, and nothing that
        any is given later. A `DataLoader` of one's own with workers is behind: see `TrainerDataset`.
        """
        newest, taken = self._door.weights.told(), self._server.taken() if self._server is not None else []
        with self._door.lock:
            return state_of(self._door.sources, [*self._current, *taken], *newest, self._age.lost)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a trainer was: what it had been handed is not handed over again.

        Raises RunError once a batch has been asked for, ValueError for what is no such state.
        """
        if self._door.is_open:
            raise RunError("the stream has begun, expected load_state_dict before the first batch is asked for")
        known = known_of(state)
        self._door.sources.update(known.sources)
        self._door.weights.resume(known.version, known.digest)
        self._age.lost = Counter(known.lost)

    @property
    def version(self) -> int:
        """Policy version of the newest weights; before any were published here, that of the rollouts."""
        return self._door.weights.version

    @property
    def returns(self) -> StreamReturns:
        """Returns of the episodes that have ended in what was handed over, of several agents also `by_module`."""
        return self._handing_over.returns

    @property
    def lost(self) -> dict[str, int]:
        """Transitions that came and were not handed over, by cause: `max_lag`, `masked`, `uneven`."""
        return dict(self._age.lost)

    @property
    def missed(self) -> int:
        """Fragments, or train batches, that earlier trainers were done with after the state that the next loaded."""
        with self._door.lock:
            return sum(source.session.missed for source in self._door.sources.values())

    @property
    def sources(self) -> list[str]:
        """Names of the rollouts that are there."""
        with self._door.lock:
            return [source.name for source in self._door.connected]

    # Inside

    def _check_open(self) -> None:
        if self._state == "closed":
            raise RunError("the stream is closed, expected this before its block is left")

    def _meeting_place(self, address: str | None) -> UnixAddress:
        """Where processes ask for items: at the address, or in a folder of our own. Raises ValueError for another."""
        if address is None:
            folder = OwnFolder()
            self._closing.callback(folder.close)
            address = f"unix:{folder.path}/dataset"
        return unix_address(address)

    def _begin_next(self) -> bool:
        self._open()
        self._move_on()
        return True

    def _open(self) -> None:
        """Let rollouts in."""
        self._check_running()
        if not self._door.is_open:
            self._door.open(self._sockets)

    def _check_running(self) -> None:
        if self._state != "running":
            raise RunError(f"the stream is {self._state}; this loop expects: with TrainerStream(...) as stream:")

    def _move_on(self) -> None:
        self._intake.be_done_with(self._current)
        self._current = []
        if self._server is not None:
            self._server.move_on()

    def _wait(self, seconds: float) -> None:
        if not self._door.serve(seconds):
            poll = select.poll()
            poll.register(self._door.bell.fileno(), select.POLLIN)
            poll.poll(seconds * 1e3)

    def _try_next(self, patience: Patience) -> Any:
        """The next item; `_NOT_YET` where it has to be waited for, None where none comes any more.

        Raises RunError where nobody comes.
        """
        while (given := next(self._made, None)) is None:
            items = self._intake.try_take(patience)
            if not items:
                return None if items is None else _NOT_YET
            # Where it can't be made the items are still there, and the next try says so again.
            self._made = self._handing_over.made_of(items)
            given = next(self._made, None)
            self._left_out += self._intake.forget(items)
            if given is not None:
                break
        return self._hand_over(given)

    def _hand_over(self, given: HandedOver) -> Any:
        if self.yields == "batches":
            self._age.mask(given.item, given.of, self.version)
        version = self.version
        self.handed = [handed(arrived, version) for arrived in given.of]
        self._current = []
        if given.is_last:
            self._current, self._left_out = [*given.of, *self._left_out], []
        return given.item
