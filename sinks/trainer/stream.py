"""Trainer's end of the stream: an ordinary loop over what rollouts in other processes and on other hosts send."""

import logging
import ssl
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.connection import wait
from os import PathLike
from pathlib import Path
from typing import Any, Literal, Self

import anyio.to_thread

from rollflow.nodes.argument_checks import check_numbers, checking_constructor, checking_keywords, places_in
from rollflow.nodes.logs.destinations import Log, LogOptions
from rollflow.nodes.rollout.checkpoint import TOGETHER, RunCheckpoints, State, generators, read, set_generators
from rollflow.nodes.rollout.options import Watch, checked_record, metrics_of
from rollflow.sinks.trainer.item_maker import Batches, ItemMaker, StreamReturns, Yields, check_module, checked_batches
from rollflow.sinks.trainer.listener import TrainerListener
from rollflow.sinks.trainer.messages import HAS_ENDED, is_by_module, joined_weights
from rollflow.sinks.trainer.newest_weights import checked_id, copied_weights
from rollflow.sinks.trainer.rollout_peer import ArrivedItem, BatchItem, PeerLife, RolloutPeer, number_in
from rollflow.sinks.trainer.rounds import OnExcess, Present, Rounds
from rollflow.sinks.trainer.stream_log import StreamLog
from rollflow.stream.data.closing import closing_on_error
from rollflow.stream.data.errors import CheckpointError, EnvError, RunError, shown
from rollflow.stream.net.backoff import WaitReminder
from rollflow.stream.net.endpoint import Secret, address_of, close_sockets, endpoint_at, listen_on
from rollflow.stream.observe.stacks import answering_dumps
from rollflow.stream.wire import Address, Limits

logger = logging.getLogger(__name__)

_NOT_YET = object()
_TICK_S = 0.25
_WATCH = Watch()


@checking_constructor()
@dataclass(frozen=True, slots=True)
class Sources:
    """Rollouts that a `TrainerStream` waits for: `TrainerStream(address, sources=Sources(2, join_timeout=60))`.

    count           that are waited for first; others may come any time. None: 0, and no end
    join_timeout    seconds that they are waited for; when all are lost, seconds that others are waited for after the
                    time that they had to come back, `grace_s` of `Limits`. None: for ever

    Raises ValueError for a number that is not whole, or below 1, and for what is no number of seconds.
    """

    count: int | None = 1
    join_timeout: float | None = 120.0

    def __post_init__(self) -> None:
        check_numbers(sources=(self.count, 1), join_timeout=(self.join_timeout, 0))


# Keyword that a stream has not -> its place in the records that it takes.
PLACES = places_in(watch=Watch, sources=Sources, yields=Batches)
PLACES["fragments_per_batch"] = PLACES["fragments"]


class TrainerStream:
    """Stream of what rollouts with a `TrainerSink` send: `with TrainerStream(...) as stream: for batch in stream: ...`.

        address                where to listen: 'tcp://host:port' or 'unix:/path'; port 0 is any that is free. With
                               'shm:/path', for rollouts on this host, fragments stay in memory that both share
        secret, tls            as for `RemoteEnvs.listen`
        yields                 "batches": train batches, column -> tensor `any[B, ...]`, of the learner pipeline, which
                               runs here, or of a `LearnerPipeline` where the rollout is; of several modules as module
                               id -> train batch. `Batches(...)`: the same, with options. "fragments": one by one
        module                 passed to the learner pieces as `rl_module`; of several modules module id -> module
        sources                rollouts that are waited for first; others may come any time. None: 0, and no end.
                               `Sources(2, join_timeout=60)`: the same, with how long they are waited for
        prefetch               batches that rollouts may send ahead
        max_lag                age in policy versions that a fragment may have when it is handed over; None: any age
        on_excess              effect on an older one. "drop": it is left out and counted. "raise": LagError. "mask":
                               its older steps get False in the batch's `loss_mask`. "pace": the rollouts wait, so that
                               none gets older, if weights are published at most once per batch, before the next is
                               asked for; a batch is then one fragment of every lane. Rollouts whose lanes come and go,
                               or that send train batches, are refused. With max_lag=0 all is exactly on-policy. Of
                               several agents, some may have acted before and wait for their next observation: those
                               steps are masked. Fragments by weights of an earlier trainer are left out and counted
        ack                    "auto": a rollout may forget a fragment as soon as the trainer asks for the next batch.
                               "manual": when `ack` is called, as a rule after a checkpoint
        limits                 of frames, times and bytes under way
        log                    as for `Rollout`; `stream.log(name, value)` logs one's own figures
        watch                  `Watch`, as for `Rollout`: how often rows of the log are written, and what the learner
                               pieces log into. There is no stall doctor here, and no trace

        address    listened on, with its port, once the block is entered: for `feed`, or as text, `str(address)`
        handed     records of the items in the batch that was handed over last
        metrics    what the learner pieces log into

    A batch is done with when the next one is asked for. The loop ends when no rollout is left, and as many as `sources`
    have announced that no more comes. Leaving the block, of `with` or `async with`, says goodbye to the rollouts; but
    after an error they wait for a trainer to come back.

    Raises RunError if the address can't be listened on, no rollout comes, or all are lost.
    """

    @checking_keywords("TrainerStream", PLACES)
    def __init__(
        self,
        address: str | Address,
        *,
        secret: Secret = None,
        tls: ssl.SSLContext | None = None,
        yields: Yields = "batches",
        module: Any = None,
        sources: int | Sources | None = 1,
        prefetch: int = 1,
        max_lag: int | None = None,
        on_excess: OnExcess = "drop",
        ack: Literal["auto", "manual"] = "auto",
        limits: Limits | None = None,
        log: Log = None,
        watch: Watch = _WATCH,
    ) -> None:
        check_numbers(max_lag=(max_lag, 0))
        check_module(module)
        batches = checked_batches(yields, on_excess, ack, max_lag)
        awaited = sources if isinstance(sources, Sources) else Sources(sources)
        self._endpoint = endpoint_at(address, secret, tls, limits, listens=True, may_share=True)
        self.address: Address = self._endpoint.address
        self.handed: list[BatchItem] = []
        self.metrics = metrics_of(checked_record("watch", watch, Watch))
        if watch.on_stall != "log":
            raise ValueError(f"on_stall is {watch.on_stall!r}, expected 'log': a trainer's stream has no stall doctor")
        if watch.trace is not None:
            raise ValueError("trace of Watch is of a rollout, expected it there: that has the wait for a trainer, too")
        if watch.record is not None or watch.replay is not None:
            raise ValueError("record and replay of Watch are for a loop over a rollout; expected neither here")
        self._gives_batches = batches is not None
        self._item_maker = ItemMaker(batches, module, self.metrics)
        self._rounds = Rounds(max_lag, on_excess, batches=batches, prefetch=prefetch, stays=awaited.count is None)
        self._join_timeout = awaited.join_timeout
        self._current: list[ArrivedItem] = []  # of the batch that was handed over last, with what was left out before
        self._closing, self._state = ExitStack(), "new"
        self.log = StreamLog(self, LogOptions(log, watch.log_every, watch.log_x))
        self._listener = TrainerListener(self._endpoint, self._rounds)
        self._awaited, self._acks = awaited.count, ack == "auto"
        self._has_begun = self._expects_no_more = False
        self._checkpoints = RunCheckpoints(self._captured, None, TOGETHER)
        self._cut: dict[bytes, tuple[str, Any]] = {}  # states of rollouts that are being saved
        self._generators: Any = None  # states of the shared generators in the run before, until the loop begins

    def __enter__(self) -> Self:
        if self._state != "new":
            raise RunError(f"the stream is {self._state}: it runs once, make another one")
        try:
            self._listener.sockets = listen_on(self.address)
        except EnvError as error:
            raise RunError(str(error)) from error
        if not self._endpoint.shares:
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
        self._listener.close(HAS_ENDED if error is None else None, _failure_of(error))
        close_sockets(self._listener.sockets)
        self.log.end()
        self._checkpoints.end()

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

        weights    a `state_dict()`; if rollouts have several modules, module id -> `state_dict()` of each trained

        A rollout that is slow to take weights gets the newest alone. If a rollout comes with a newer version, of an
        earlier trainer, the weights get a version above that. Weights that are published after `load_state_dict` and
        before the first batch are taken for those that were saved with the state: they have the version that those had,
        or got next.

        Raises RunError once the stream is closed. Raises ModuleError for weights that can't be sent, don't fit a
        rollout's module, or are larger than a message that it takes; a later rollout is refused for these reasons.
        """
        self._check_open()
        weights = joined_weights(weights) if is_by_module(weights) else weights
        return self._listener.publish(copied_weights(weights))

    def expect_no_more(self) -> None:
        """Let the loop end when the rollouts have that are there, and wait for no others. From any thread."""
        self._expects_no_more = True
        self._listener.bell.ring()
        self._listener.wake()  # another thread may be serving there

    def ack(self, state: Mapping[str, Any] | None = None) -> None:
        """Acknowledge all that was handed over, or what an earlier `state_dict()` has. Raises RunError once closed."""
        self._check_open()
        if state is None:
            self._move_on()
        saved = None if state is None else {token: entry["done"] for token, entry in state["sources"].items()}
        with self._listener.lock:
            for token, source in self._listener.sources.items():
                source.keep(None if saved is None else saved.get(token.hex(), 0))
        self._listener.wake()

    def put_back(self) -> None:
        """Before the block is left: be not done with what was handed over last, so that its rollout keeps it."""
        self._current = []

    def refuse(self, reason: str) -> None:
        """Refuse the rollouts of what was handed over last, since that can't be used."""
        with self._listener.lock:
            for arrived in self._current:
                if arrived.source.connection is not None:
                    arrived.source.connection.refuse("fragment", reason)
        self._listener.wake()

    def attach(self, **objects: Any) -> None:
        """Save what these have learnt with `save`: the policy, optimizers, whatever has state_dict and load_state_dict.

        In a stream that goes on by `resume` they load what was saved under their names. Raises ValueError for an object
        that lacks one of the two.
        """
        self._checkpoints.attach(objects)

    def save(self, folder: str | PathLike[str], *, keep: int = 1) -> Path:
        """Save the trainer and all its rollouts as they stand, as one checkpoint; its own folder in `folder`.

        keep    newest checkpoints that are kept there

        In the loop, when the trainer has learnt from the last batch and before it publishes. It has the states of what
        is attached, of the stream, and of the rollouts, which stop for as long as they copy it: with all that they have
        sent and was not handed over. What was handed over is acknowledged. Waits for rollouts that are lost, as a batch
        would. Raises CheckpointError for a rollout that has no state, with the reason, and what the disk refuses.
        """
        path = self._checkpoints.save(folder, keep)
        self._listener.states = self._cut
        if not self._acks:
            self.ack(self.state_dict())
        return path

    def resume(self, folder: str | PathLike[str]) -> None:
        """Go on from the newest checkpoint of `save` in a folder, or from the one that the folder is.

        Before the loop: attach the policy, and publish its weights. Rollouts that are started anew are given their
        states when they come, by their names: they go on as if they had never stopped, if their environments can. Those
        that have lived on go on as they are. Raises CheckpointError for what is no such checkpoint, or is damaged.
        """
        path, state = read(folder, TOGETHER)
        self.load_state_dict(state["stream"])
        self._item_maker.set_state(state["items"])
        rollouts = {bytes.fromhex(token): (name, data) for token, name, data in state["rollouts"]}
        self._listener.states, self._generators = rollouts, state["generators"]
        self._checkpoints.go_on_from(path, state["attached"])
        logger.info("the trainer goes on from %s", path)

    def _captured(self) -> tuple[State, int]:
        """The state of the trainer and its rollouts, and the number of steps that were handed over."""
        self._check_open()
        listener, patience = self._listener, WaitReminder(None)
        asked = listener.ask_for_states()
        while owing := [source.name for source in asked if source.owes_state]:
            if listener.error is not None:
                raise listener.error
            if patience.is_long:
                logger.warning("waiting for %.0f s for the state of %s", patience.waited_s, ", ".join(owing))
            listener.bell.silence()
            if any(source.owes_state for source in asked) and not listener.serve(_TICK_S):
                wait([listener.bell.fileno()], _TICK_S)
        answers = [(source, source.answer) for source in asked if source.answer]
        if refused := [f"rollout {source.name}: {told['refused']}" for source, told in answers if told["refused"]]:
            raise CheckpointError(f"it can't be saved: {'; '.join(refused)}")
        self._cut = {token: each for token, each in listener.states.items() if listener.may_still_come(token)}
        self._cut |= {source.session.token: (source.called, told["state"]) for source, told in answers}
        state = {
            "stream": self.state_dict(),
            "items": self._item_maker.get_state(),
            "rollouts": [[token.hex(), *each] for token, each in self._cut.items()],
            "environments": [[lane] for _, told in answers for lane in told["environments"]],
            "generators": generators(),
            "keywords": {},
        }
        return state, self.log.counted[0]

    def state_dict(self) -> dict[str, Any]:
        """State after the last batch, as plain data for JSON: what has been handed over, and the policy version.

        Take it when the trainer has learnt from the last batch, and save it with the weights before these are
        published: under "pace" nothing is left out then, whenever the trainer is killed.
        """
        weights = self._listener.weights
        version, weights_id = weights.saved()
        state: dict[str, Any] = {"version": weights.version, "weights": [version, weights_id.hex()], "lost": self.lost}
        if any(self.log.counted):
            state["counted"] = list(self.log.counted)
        handed: dict[bytes, list[int]] = {}
        for arrived in self._current:
            handed.setdefault(arrived.source.session.token, []).append(arrived.number)
        with self._listener.lock:
            sources = self._listener.sources.items()
            return {**state, "sources": {token.hex(): each.state(handed.get(token, ())) for token, each in sources}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict` of an earlier trainer: what that was handed is not handed over again.

        Raises RunError once a batch has been asked for, ValueError for anything but such a state.
        """
        if self._listener.is_open:
            raise RunError(
                "the stream has begun, expected resume or load_state_dict before the first batch is asked for"
            )
        try:
            sources = [RolloutPeer.of_state(token, entry) for token, entry in state["sources"].items()]
            lost = {str(cause): number_in(count) for cause, count in state.get("lost", {}).items()}
            steps, items = map(number_in, state.get("counted", (0, 0)))
            version, (saved, weights_id) = number_in(state["version"]), state["weights"]
            identity = number_in(saved), checked_id(weights_id)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"state is {shown(state)}, expected what state_dict() gave: {error!r}") from error
        self._listener.goes_on = True
        self._listener.sources.update({source.session.token: source for source in sources})
        self._listener.weights.resume(version, identity)
        self._rounds.lost = Counter(lost)
        self.log.go_on_from(steps, items)

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
        """Number of transitions that came and were not handed over, by cause: `max_lag`, `masked`."""
        return dict(self._rounds.lost)

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
        if self._state != "running":
            raise RunError(f"the stream is {self._state}; this loop expects: with TrainerStream(...) as stream:")
        self._listener.open()
        self._checkpoints.look()
        if self._generators is not None:
            set_generators(self._generators)
            self._generators = None
        self._move_on()
        return WaitReminder(self._join_timeout)

    def _move_on(self) -> None:
        """Be done with what was handed over last, and what was left out before it, and tell their rollouts."""
        sources = set()
        with self._listener.lock:
            for arrived in self._current:
                sources.add(arrived.source)
                arrived.source.move_on(arrived.number)
                if self._acks:
                    arrived.source.keep()
        self._current = []
        self._listener.tell_done(sources)

    def _be_at(self, arrived: list[ArrivedItem]) -> None:
        """Let these items be the ones that are done with next, with what was left out before."""
        self._current, self._rounds.left_out = [*arrived, *self._rounds.left_out], []

    def _try_next(self, patience: WaitReminder) -> Any:
        """Next item; `_NOT_YET`: it is waited for; None: no more come. Raises RunError if no rollout comes."""
        while True:
            arrived = self._try_take(patience)
            if not arrived:
                return None if arrived is None else _NOT_YET
            # If no item can be made of them, they are taken again, and the next try raises again.
            item = self._item_maker.item_of(arrived)
            del self._rounds.taken[: len(arrived)]
            if item is not None:
                break
            self._be_at(arrived)
            self._move_on()  # agents may wait all the while
        version = self.version
        if self._gives_batches:
            self._rounds.mask(item, arrived, version)
        self._listener.weights.note_batch()
        self.handed = [BatchItem.of(each, version) for each in arrived]
        self.log.take(self.handed)
        self._be_at(arrived)
        return item

    def _try_take(self, patience: WaitReminder) -> list[ArrivedItem] | None:
        """Items that are handed over next, which stay taken; none: they are waited for; None: no more come.

        Raises RunError if no rollout comes.
        """
        while (error := self._listener.error) is None:
            if not self._rounds.taken:
                self._listener.bell.silence()
                with self._listener.lock:
                    present = self._listener.present
                    if not self._has_looked(present, patience):
                        return []
                    if not self._rounds.taken:
                        return self._none_or_not_yet(present, patience)
            if admitted := self._rounds.admitted(self._listener.weights):
                return admitted
            self._be_at([])
            self._move_on()
        raise error

    def _has_looked(self, present: Present, patience: WaitReminder) -> bool:
        """Gather items that have come; False: not as many rollouts have come as are waited for."""
        if self._listener.arrived:
            self._rounds.waiting, self._listener.arrived = self._rounds.joined(self._listener.arrived), []
            patience.restart()
        if self._rounds.begin(present, self._listener.weights.version):
            self._listener.wake()
        if not self._has_begun and not self._is_enough(present, patience):
            return False
        self._rounds.take(present)
        return True

    def _is_enough(self, present: Present, patience: WaitReminder) -> bool:
        """True once as many rollouts have come as are waited for. Raises RunError if they have not in time."""
        self._has_begun = self._expects_no_more or len(self._listener.come) >= (self._awaited or 0)
        if self._has_begun:
            return True
        count = f"{len([*present()])} of {self._awaited} rollouts came"
        if patience.is_over:
            raise RunError(f"{count} within {patience.limit:g} s: {self._waiting_text()}")
        if patience.is_long:
            most = "any time" if patience.limit is None else f"{patience.limit:g} s"
            waited = f"waiting for {patience.waited_s:.0f} s: {count} so far"
            logger.warning("%s, others have %s (join_timeout): %s", waited, most, self._waiting_text())
        return False

    def _none_or_not_yet(self, present: Present, patience: WaitReminder) -> list[ArrivedItem] | None:
        """None if no more items come, else none yet. Raises RunError if all rollouts are lost, for too long."""
        if any(present()):
            if patience.is_long:
                here = [source.whereabouts(self._listener.limits.grace_s) for source in present()]
                places, count = "; ".join(here[:4]), f"{len(here)} rollouts" if len(here) > 1 else "one rollout"
                logger.warning("nothing to hand over for %.0f s, of %s: %s", patience.waited_s, count, places)
            patience.restart()
            return []
        if self._awaited is None and not self._expects_no_more:
            return []
        lost = [source for source in self._listener.sources.values() if source.life is PeerLife.LOST]
        in_their_place = len(self._listener.come) - len(lost)
        if not lost or self._expects_no_more or in_their_place >= (self._awaited or 0):
            logger.info("all rollouts have ended, and all that came of them was handed over: the loop ends")
            return None
        if patience.is_over:
            names = "; ".join(f"{source.name}: {source.reason}" for source in lost)
            raise RunError(
                f"every rollout is lost and none came within {patience.limit:g} s: {names}: {self._waiting_text()}"
            ).see("trainer away")
        return []

    def _waiting_text(self) -> str:
        return "; ".join([f"listening on {self.address}", *self._listener.refusals])


def _failure_of(error: BaseException | None) -> str | None:
    """Reason for rollouts, which then wait for another trainer, of an error that ended a stream; None for no error."""
    if error is None:
        return None
    return f"it has failed: {type(error).__name__}: {error}" if isinstance(error, Exception) else "it was interrupted"
