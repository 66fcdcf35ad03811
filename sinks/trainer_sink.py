"""Fragments out, weights in: a rollout's end of the stream to a trainer in another process or on another host."""

import logging
import secrets
import socket
import ssl
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import anyio

from rollflow.nodes.given import check_numbers
from rollflow.nodes.remote.remote_envs import Secret, check_tls, secret_bytes
from rollflow.sinks.trainer.any_rollout import AnyRollout, newest_version
from rollflow.sinks.trainer.by_module import batches_in, num_steps
from rollflow.sinks.trainer.introduction import introduction
from rollflow.sinks.trainer.item_message import Batch, message_of_batch, message_of_fragment, nbytes_of
from rollflow.sinks.trainer.kept import Kept
from rollflow.sinks.trainer.rollout_end import RolloutEnd, rollout_among
from rollflow.sinks.trainer.shared.descriptor_transport import check_shared
from rollflow.sinks.trainer.shared.lender import Lender
from rollflow.sinks.trainer.source_link import SourceLink
from rollflow.sinks.trainer.spill import Spill
from rollflow.sinks.trainer.told import HAS_ENDED
from rollflow.stream.channel import Inlet
from rollflow.stream.errors import GraphError
from rollflow.stream.fragment import Fragment
from rollflow.stream.wire import (
    SESSION_BYTES,
    Address,
    Hello,
    Limits,
    SharedAddress,
    SourceSession,
    check_secret,
    parse_trainer_address,
)

logger = logging.getLogger(__name__)

_PATIENCE_S = 10.0  # after which it says what is waited for


class TrainerSink:
    """A node without outputs that sends a rollout's fragments to a `TrainerStream`, and takes its weights.

        address        where the trainer listens: 'tcp://host:port', 'unix:/path', 'shm:/path', or a stream's `address`
        rollout        a `Rollout`, or a `MultiAgentRollout`, whose fragments come; the trainer's weights are published
                       to it. It begins once the trainer has been there, and acts with its newest weights. None: the one
                       that leads to this in the graph, whatever stands between
        secret, tls    as for `EnvHost`
        name           what the trainer calls it, best another for each rollout; None: the name of this computer
        linger         seconds that are waited, once the last fragment has come, for the trainer to be done with all;
                       None: as long as it takes
        max_bytes      of fragments that the trainer may still want again: a rollout stands still while there are more.
                       But as many as the trainer needs for one batch are kept whatever their size, and where that is
                       more than `max_bytes`, this is the bound. With 'shm:', also of those that the trainer may have at
                       a time
        spill          a folder on a disk for those that are more than `max_bytes`, which then hold nobody up, once they
                       were sent, or, with 'shm:', are done with. Nothing is left there, however this ends. None: there
                       is none
        limits         of frames, times and bytes under way
        watch          awaited meanwhile, such as `TrainerProcess.watch`: what it raises ends the graph, and once it has
                       returned there is no trainer any more

        sends          "fragments"; or "batches", the train batches of a `LearnerPipeline` that stands between: of
                       several agents these alone, of a `MultiAgentLearnerPipeline`
        lost           transitions that the trainer was not done with when the sink was closed, `undelivered`, and
                       those that came while it had left and another trainer had not, `left`

    Several sinks may send one rollout to several trainers: each has its own window and its own bound of age, and the
    rollout begins once all have been there. One of them is to publish weights; those of others are passed over. Where
    one says goodbye the others go on without it; where it comes back it gets what is made from then on.

    Where the trainer is lost it is dialled again, and gets what it was not done with: every item once, in their order.
    Until then the rollout stands still, also one that is drained: leave the run to give up what the trainer has not.

    With 'shm:', for a trainer on this host, fragments are not sent: the rollout's lanes have them in memory that the
    trainer sees, in which nothing is written again before the trainer has moved on from a fragment and has no array of
    it any more. What lies elsewhere is copied there once: train batches, fragments that came from other hosts, and in a
    lane's first one what no worker process writes; train batches that are ready together are copied to one place, 1 MiB
    or four batches at most, which is written again once the trainer has let go of all of them. A trainer that keeps
    more than `max_bytes` of what it got is sent copies through the socket, as with 'unix:', until it lets go of some.

    `stream.returns` and `stream.weights_in_use()` know of train batches as well: the sink sees the fragments
    themselves as they leave the rollout, whatever makes batches of them. A batch tells of the episodes that have
    finished since the one before it; of those that finish behind the last batch nobody is told.

    `graph.connect(rollout.fragments, TrainerSink(...))` is all that there is to say. With the rollout as an argument it
    is to be made before that is added to its graph. Modules of a `MultiAgentRollout` whose weights the trainer
    publishes stay from then on: those that come and go are to be left out of its `modules_to_train`.

    Raises WireError for an address that is none, or not without a secret, ModuleError for module ids that are no
    strings; GraphError, where the graph is drawn, when several rollouts lead to this, or none; what the connection
    raised, such as another secret, when the graph runs.
    """

    def __init__(
        self,
        address: str | Address,
        rollout: AnyRollout | None = None,
        *,
        secret: Secret = None,
        tls: ssl.SSLContext | None = None,
        name: str | None = None,
        linger: float | None = 60.0,
        max_bytes: int = 1 << 30,
        spill: str | Path | None = None,
        sends: Literal["fragments", "batches"] = "fragments",
        limits: Limits | None = None,
        watch: Callable[[], Awaitable[object]] | None = None,
    ) -> None:
        if sends not in ("fragments", "batches"):
            raise ValueError(f"sends is {sends!r}, expected 'fragments' or 'batches'")
        check_numbers(max_bytes=(max_bytes, 1), linger=(linger, 0))
        target = parse_trainer_address(address)
        check_secret(target, secret_bytes(secret))
        check_shared(target, tls)
        check_tls(target, tls)
        if spill is not None and not Path(spill).is_dir():
            raise ValueError(f"spill is {str(spill)!r}, expected a folder that is there")
        self.name = socket.gethostname() if name is None else name
        self.lost: dict[str, int] = {}
        self.linger, self._sends = linger, sends
        self._limits = Limits() if limits is None else limits
        self._kept = Kept(max_bytes, None if spill is None else Spill(Path(spill)))
        self._session = SourceSession(secrets.token_bytes(SESSION_BYTES))
        self._lender = Lender(max_bytes) if isinstance(target, SharedAddress) else None
        self._changed, self._watch = anyio.Event(), watch
        self._has_ended = self._has_warned = self._is_over = self._is_without_trainer = False
        self._failure: str | None = None
        self._seen_error: Exception | None = None  # of what was watched
        self._trainer = f"the trainer at {target}"
        self._is_given = rollout is not None
        self._found = None if rollout is None else self._end_of(rollout)
        self._link = SourceLink(
            target,
            self._hello,
            self._session,
            self._kept,
            lambda version, weights: self._end.publish(version, weights),
            secret=secret_bytes(secret),
            tls=tls,
            limits=self._limits,
            lender=self._lender,
        )

    def take_sources(self, sources: Sequence[Any], *, drops: bool, is_all: bool) -> Sequence[Any]:
        """Find the rollout among what leads to this, unless it was given, to be taken apart anew."""
        changed = () if self._is_given else self._take_rollout(sources, is_all=is_all)
        if is_all:
            self._end.take_makers(sources, self._link.bell.ring, drops=drops)
        return changed

    async def run(self, fragments: Inlet[Fragment | Batch]) -> None:
        """Send what comes, until no more does and the trainer is done with it."""
        self._link.start()
        raised: Exception | None = None
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._listen, tasks.cancel_scope)
                if self._watch is not None:
                    tasks.start_soon(self._see, self._watch, tasks.cancel_scope)
                try:
                    await self._send(fragments)
                except Exception as error:
                    raised = error  # as it is, not in a group
                tasks.cancel_scope.cancel()
        finally:
            self._is_over = True
            self._look_up()
        raised = raised or self._link.error or self._seen_error
        if raised is not None:
            raise raised

    def take_failure(self, error: BaseException) -> None:
        """Something has been raised that ends the run: the trainer is told so."""
        if error is not self._link.error:
            self._failure = f"{type(error).__name__}: {error}"

    def close(self) -> None:
        """Say goodbye to the trainer; where the rollout has not come to its end, say why, or just go."""
        self._link.close("the rollout has ended" if self._has_ended else None, self._failure)
        self._link.release()
        left, steps = self._session.given - self._session.done, self._kept.steps(self._session.done)
        if left:
            self.lost["undelivered"] = steps
            logger.log(
                logging.WARNING if self.goodbye is None else logging.INFO,  # it has left of its own will
                "%d %s with %d transitions not delivered: %s",
                left,
                self._sends if left > 1 else {"fragments": "fragment", "batches": "batch"}[self._sends],
                steps,
                self._link.problem or "the trainer had not moved on from them",
            )

    @property
    def has_trainer(self) -> bool:
        """Whether a trainer is there."""
        return not self._link.problem

    @property
    def given(self) -> int:
        """Items that have come."""
        return self._session.given

    @property
    def goodbye(self) -> str | None:
        """The reason that the trainer gave when it left; None: it has not, or there is another one."""
        return self._link.goodbye or (HAS_ENDED if self._is_without_trainer else None)

    async def wait_goodbye(self) -> str | None:
        """Wait until a trainer has left: its reason; None where this has ended before, for whatever reason."""
        while not self._has_left() and not self._is_over:
            await self._changed.wait()
        return self.goodbye

    def describe(self) -> str:
        """For `explain()`."""
        return f"to {self._trainer}"

    # Inside

    @property
    def _end(self) -> RolloutEnd:
        """There is one once the graph has been drawn."""
        assert self._found is not None
        return self._found

    def _take_rollout(self, sources: Sequence[Any], *, is_all: bool) -> Sequence[Any]:
        where = f"the TrainerSink to {self._link.address}"
        rollout = rollout_among(sources, where, is_all=is_all)
        if rollout is None or (self._found is not None and rollout is self._found.rollout):
            return ()
        if self._found is not None:
            raise GraphError(f"{where} has another rollout by now, expected a sink for each")
        rollout.be_drawn_anew()
        self._found = self._end_of(rollout)
        return [rollout]

    def _end_of(self, rollout: AnyRollout) -> RolloutEnd:
        shares = self._lender is not None
        return RolloutEnd(
            rollout,
            self._kept,
            sends=self._sends,
            shares=shares,
            look_up=self._look_up,
            trainer=self._trainer,
            ring=lambda: self._link.bell.ring(),
        )

    def _hello(self) -> Hello:
        return introduction(
            self._end.describe(),
            self._session.token,
            name=self.name,
            sends=self._sends,
            max_frame=self._limits.max_frame,
            digests=self._link.versions,
            shares_memory=self._lender is not None,
        )

    async def _send(self, items: Inlet[Fragment | Batch]) -> None:
        trainer = self._end.subscriber
        async for item in items:
            await self._until(lambda: trainer.is_passed_over or self._has_room())
            if trainer.is_passed_over:
                self._pass_over(item)
            else:
                self._give(item)
            self._tell_of_lanes()
        self._has_ended = True
        self._link.finish()
        with anyio.move_on_after(self.linger):
            await self._until(lambda: self._session.done == self._session.given or self._has_left())

    async def _listen(self, scope: anyio.CancelScope) -> None:
        """Tell whoever waits, and the rollout, that something has changed; where the link has failed, end it all."""
        bell, end = self._link.bell, self._end
        gate = end.gate
        while True:
            await anyio.wait_readable(bell.fileno())
            bell.silence()
            if self._link.error is not None:
                scope.cancel()
            gate.wanted = self._link.wanted or gate.wanted
            gate.done, gate.version = self._session.done, end.version
            self._tell_of_lanes()
            end.subscriber.look_again(has_left=self._has_left())
            gate.look_again()
            self._look_up()

    def _tell_of_lanes(self) -> None:
        lanes = self._end.lanes
        for news in lanes.take(self._session.given):
            self._link.tell(news)
        if not self._end.rollout.environments.has_fixed_lanes:
            lanes.forget(self._session.kept)

    def _look_up(self) -> None:
        """Have whoever waits look at what has changed."""
        changed, self._changed = self._changed, anyio.Event()
        changed.set()

    async def _see(self, watch: Callable[[], Awaitable[object]], scope: anyio.CancelScope) -> None:
        """End all where it raises something; where it does not, hear the trainer's last words."""
        try:
            await watch()
        except Exception as error:
            self._seen_error = error
            scope.cancel()
            return
        while self.has_trainer and not self._has_left():
            await self._changed.wait()
        self._is_without_trainer = True
        self._link.bell.ring()

    async def _until(self, is_so: Callable[[], bool]) -> None:
        """Wait until something holds."""
        while True:
            changed = self._changed
            if is_so():
                return
            with anyio.move_on_after(_PATIENCE_S) as patience:
                await changed.wait()
            if patience.cancelled_caught:
                logger.warning("waiting for the trainer: %s", self._link.problem or self._held_back())

    def _has_room(self) -> bool:
        """Whether another item may be taken."""
        wanted = self._end.gate.wanted
        window = 1 if wanted is None else wanted.window
        if self._session.given - self._session.done >= window:
            return False
        if self._kept.is_over and not self._kept.is_full and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "the trainer needs %d %s at a time, of about %d bytes, more than max_bytes=%d: as many are kept",
                self._kept.needs,
                self._sends,
                self._kept.nbytes_needed,
                self._kept.max_bytes,
            )
        return not self._kept.is_full

    def _held_back(self) -> str:
        """Why the trainer takes no more, though it is there."""
        session = self._session
        if self._kept.is_full:
            until = (
                "acknowledges them, by ack() or by moving on" if session.done > session.kept else "moves on from them"
            )
            return f"{self._kept.nbytes} bytes are kept until it {until}; max_bytes is {self._kept.max_bytes}"
        return f"it has {session.given - session.done} {self._sends} that it has not moved on from"

    def _has_left(self) -> bool:
        """Whether there is no trainer to wait for."""
        return self.goodbye is not None

    def _give(self, item: Fragment | Batch) -> None:
        end, number, is_fragment = self._end, self._session.given + 1, isinstance(item, Fragment)
        if is_fragment != (self._sends == "fragments"):
            raise TypeError(f"a {type(item).__name__} came to a sink that sends {self._sends}, expected these")
        if isinstance(item, Fragment):
            message, steps = message_of_fragment(number, item, end.spaces), item.num_steps
            end.lanes.give(item.lane, item.sequence)
            self._give_receipt(item.lane, newest_version(item, None))
        else:
            message = message_of_batch(number, item, modules=end.ids, episodes=end.seen.take_episodes())
            steps = int(message.rest["steps"])
            for lane, version in end.seen.take_versions().items():
                self._give_receipt(lane, version)
        if self._lender is not None:
            self._lender.look_at(message)
        self._kept.add(message, nbytes_of(message), steps)
        self._session.given = number
        self._link.wake()
        end.gate.look_again()  # from now on it is the trainer that lanes wait for

    def _pass_over(self, item: Fragment | Batch) -> None:
        """An item that nobody wants, for the others' sake."""
        if isinstance(item, Fragment):
            self._end.lanes.give(item.lane, item.sequence)
            steps = item.num_steps
        else:
            steps = num_steps(batches_in(item, is_by_module=self._end.ids is not None))
            self._end.gate.pass_over()
        if "left" not in self.lost:
            logger.warning("trainer %s has left: others of this rollout go on without it", self._link.address)
        self.lost["left"] = self.lost.get("left", 0) + steps

    def _give_receipt(self, lane: int, version: int | None) -> None:
        """Say which weights a lane's forward node has, where that is news; `version` is of its last action."""
        receipt = self._end.receipt_of(lane, version, self._link.versions, self._link.welcomes)
        if receipt is not None:
            self._link.tell(receipt)
