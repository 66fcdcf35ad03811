"""Rollout's end of the stream to a trainer in another process or on another host: fragments out, weights in."""

import logging
import ssl
import weakref
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from typing import Any, Literal

import anyio

from rollflow.nodes.argument_checks import check_numbers, checking_keywords
from rollflow.nodes.env.remote.remote_envs import Secret
from rollflow.sinks.trainer.messages import HAS_ENDED, AnyFragment, Batch, message_of_batch, nbytes_of
from rollflow.sinks.trainer.pace_gate import ResendBuffer
from rollflow.sinks.trainer.rollout_end import RolloutEnd, rollout_among
from rollflow.sinks.trainer.uplink import TrainerUplink, link_to
from rollflow.stream import wire
from rollflow.stream.data.errors import GraphError
from rollflow.stream.graph.channel import Inlet
from rollflow.stream.graph.node import ending_quietly, out_of_group
from rollflow.stream.net.backoff import Reminder
from rollflow.stream.observe.waits import LastError, Wait

logger = logging.getLogger(__name__)

_LOOK_S = 1.0  # between looks whether a wait is long enough to be logged


class TrainerSink:
    """Sink that sends a rollout's fragments to a `TrainerStream`, and publishes the trainer's weights to the rollout.

        address        where the trainer listens: 'tcp://host:port', 'unix:/path', 'shm:/path', or a stream's `address`
        secret, tls    as for `EnvHost`
        name           name of the rollout at the trainer, best unique; None: the name of this computer
        linger         seconds, once the last fragment has come, that the trainer has to be done with all; None: for
                       ever
        retry_s        seconds that a trainer may be away, at first or after it was lost, before the graph ends with a
                       WireError; not after its goodbye. None: it is dialled for ever
        max_bytes      bound on fragments that are kept since the trainer may want them again; the rollout stands still
                       while there are more. As many as the trainer needs for one batch are kept in any case. With
                       'shm:', also a bound on those that the trainer may have at a time
        limits         of frames, times and bytes under way
        watch          awaited meanwhile, such as `TrainerProcess.watch`: an error that it raises ends the graph, and
                       once it has returned there is no trainer any more

        sends          "fragments"; or "batches", the train batches of a `LearnerPipeline`, or of several agents of a
                       `MultiAgentLearnerPipeline`, between the rollout and the sink
        lost           number of transitions by cause. `undelivered`: the trainer was not done with them when the sink
                       was closed. They are a part of `rollout.lost["undelivered"]`, which has those of all sinks, each
                       transition once

    `graph.connect(rollout.fragments, TrainerSink(...))` is enough: the sink finds the `Rollout` or `MultiAgentRollout`
    that leads to it. The rollout begins once the trainer has been there, and acts with its newest weights. Modules of
    a `MultiAgentRollout` whose weights the trainer publishes have to stay: leave those that come and go out of its
    `modules_to_train`.

    A trainer that is lost is dialled again, and gets what it was not done with: every item once, in order. Until then
    the rollout stands still, also one that is drained, which logs what it waits for: leave the run to give up those
    items.

    Several sinks may send one rollout to several trainers. Each has its own window and bound of age, and holds the
    rollout back, also while it is away or after its goodbye. One of them is to publish weights.

    With 'shm:', for a trainer on this host, fragments are not sent: they lie in memory that the trainer sees. Nothing
    is written there again before the trainer has moved on from a fragment and has no array of it any more. Other items
    are copied there once: train batches, fragments from other hosts, and in a lane's first fragment what no worker
    process writes. A trainer that keeps more than `max_bytes` gets copies through the socket, as with 'unix:', until it
    lets go of some.

    `stream.returns` works for train batches too, since the sink observes the fragments as they leave the rollout. A
    batch lists the episodes that have finished since the batch before it; those that finish after the last batch are
    not reported.

    Raises WireError for an invalid address, or one that needs a secret; ModuleError for module ids that are no strings;
    GraphError, when the graph is drawn, unless one rollout leads to the sink; when the graph runs, the connection's
    error, such as for another secret.
    """

    @checking_keywords("TrainerSink")
    def __init__(
        self,
        address: str | wire.Address,
        *,
        secret: Secret = None,
        tls: ssl.SSLContext | None = None,
        name: str | None = None,
        linger: float | None = 60.0,
        retry_s: float | None = None,
        max_bytes: int = 1 << 30,
        sends: Literal["fragments", "batches"] = "fragments",
        limits: wire.Limits | None = None,
        watch: Callable[[], Awaitable[object]] | None = None,
    ) -> None:
        if sends not in ("fragments", "batches"):
            raise ValueError(f"sends is {sends!r}, expected 'fragments' or 'batches'")
        check_numbers(linger=(linger, 0), retry_s=(retry_s, 0))
        self._buffer = ResendBuffer(max_bytes)
        link = link_to(address, name, secret, tls, limits, retry_s=retry_s, lends=max_bytes)
        self.name = link.name
        self.lost: dict[str, int] = {}
        self.linger, self._sends = linger, sends
        self._lender = link.lender
        self._changed, self._watch = anyio.Event(), watch
        self._has_ended = self._is_draining = self._is_over = self._trainer_has_ended = False
        self._failure: str | None = None
        self._trainer_name = f"the trainer at {link.address}"
        self._connected_end: RolloutEnd | None = None
        sink = weakref.proxy(self)  # it holds its uplink
        self._uplink = TrainerUplink(
            link,
            lambda: sink._rollout_end.hello(sink._uplink.newest),
            self._buffer,
            lambda version, weights: sink._rollout_end.publish(version, weights),
        )
        self._session = self._uplink.session

    def take_sources(self, sources: Sequence[Any], *, drops: bool, is_all: bool) -> Sequence[Any]:
        """Find the rollout among the nodes that lead to the sink, and return it if it is new."""
        changed = self._take_rollout(sources, is_all=is_all)
        if is_all:
            self._rollout_end.take_makers(sources, self._uplink.bell.ring, drops=drops)
        return changed

    async def run(self, fragments: Inlet[AnyFragment | Batch]) -> None:
        """Send what comes, until no more does and the trainer is done with it."""
        self._uplink.start()
        try:
            with out_of_group():
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(ending_quietly, self._follow_uplink)
                    if self._watch is not None:
                        tasks.start_soon(ending_quietly, partial(self._run_watch, self._watch))
                    await self._send_all(fragments)
                    tasks.cancel_scope.cancel()
        finally:
            self._is_over = True
            self._notify()

    def take_drain(self) -> None:
        """The run is being drained: whatever comes now is among the last."""
        self._is_draining = True
        self._notify()

    def take_failure(self, error: BaseException) -> None:
        """Note an error that ends the run, as the reason to leave for the trainer."""
        if error is not self._uplink.error:
            self._failure = f"{type(error).__name__}: {error}"

    def close(self) -> None:
        """Say goodbye to the trainer if the rollout has come to its end; else send the failure, if there is one."""
        self._uplink.close("the rollout has ended" if self._has_ended else None, self._failure)
        self._uplink.release()
        left, steps = self._session.given - self._session.done, self._buffer.steps(self._session.done)
        if left:
            self.lost["undelivered"] = steps
            for origin in self._buffer.origins(self._session.done):
                origin.lose("undelivered")
            logger.log(
                logging.WARNING if self.goodbye is None else logging.INFO,  # it has left of its own will
                "%d %s with %d transitions not delivered: %s",
                left,
                self._sends if left > 1 else {"fragments": "fragment", "batches": "batch"}[self._sends],
                steps,
                self._uplink.problem or "the trainer had not moved on from them",
            )

    @property
    def has_trainer(self) -> bool:
        """True while a trainer is connected."""
        return not self._uplink.problem

    @property
    def last_error(self) -> LastError | None:
        """Why there is no trainer; None: there is one."""
        problem = self._uplink.problem  # of another thread
        return LastError(problem, None) if problem else None

    @property
    def given(self) -> int:
        """Number of items that have come."""
        return self._session.given

    @property
    def goodbye(self) -> str | None:
        """Reason that the trainer gave when it left; None: it has not, or there is another one."""
        return self._uplink.goodbye or (HAS_ENDED if self._trainer_has_ended else None)

    async def wait_goodbye(self) -> str | None:
        """Wait until a trainer has left, and return its reason; None if the sink has ended before."""
        while not self._has_left() and not self._is_over:
            await self._changed.wait()
        return self.goodbye

    def at_work(self, name: str) -> Iterator[Wait]:
        """The trainer, for the stall doctor: one that is there is waited for as long as it takes."""
        wait = self._rollout_end.gate.waits_for()
        if wait is not None:
            yield wait

    def describe(self) -> str:
        """Text for `explain()`."""
        return f"to {self._trainer_name}"

    # Inside

    @property
    def _rollout_end(self) -> RolloutEnd:
        """End of the rollout, which there is once the graph has been drawn."""
        assert self._connected_end is not None
        return self._connected_end

    def _take_rollout(self, sources: Sequence[Any], *, is_all: bool) -> Sequence[Any]:
        where = f"the TrainerSink to {self._uplink.address}"
        rollout, end = rollout_among(sources, where, is_all=is_all), self._connected_end
        if rollout is None or (end is not None and rollout is end.rollout):
            return ()
        if end is not None:
            raise GraphError(f"{where} has another rollout by now, expected a sink for each")
        rollout.be_drawn_anew()
        sink = weakref.proxy(self)  # it holds this end of the rollout
        self._connected_end = RolloutEnd(
            rollout,
            self._buffer,
            sends=self._sends,
            shares=self._lender is not None,
            trainer=self._trainer_name,
            ring=lambda: sink._uplink.bell.ring(),
        )
        return [rollout]

    async def _send_all(self, items: Inlet[AnyFragment | Batch]) -> None:
        async for item in items:
            if not self._may_take():
                with items.blocked_by(self._trainer_name):
                    await self._wait_until(self._may_take)
            self._send(item)
            self._send_lane_news()
        self._has_ended = True
        self._uplink.finish()
        with anyio.move_on_after(self.linger), items.blocked_by(self._trainer_name):
            await self._wait_until(lambda: self._is_done_with_all() or self._has_left())

    def _is_done_with_all(self) -> bool:
        """True if the trainer is done with all fragments, and has acknowledged them where it has a rollout stay."""
        order, session = self._rollout_end.gate.order, self._session
        return session.given == (session.kept if order is not None and order.stays else session.done)

    async def _follow_uplink(self) -> None:
        """Let the rollout and waiting tasks see each change of the uplink; raise the error if that has failed."""
        bell, end = self._uplink.bell, self._rollout_end
        gate = end.gate
        while True:
            await anyio.wait_readable(bell.fileno())
            bell.silence()
            if self._uplink.error is not None:
                raise self._uplink.error
            gate.order = self._uplink.wanted or gate.order
            gate.done, gate.version, gate.problem = self._session.done, end.version, self._uplink.problem
            self._send_lane_news()
            gate.look_again()
            self._notify()

    def _send_lane_news(self) -> None:
        gate = self._rollout_end.gate
        for news in gate.take_news(self._session.given):
            self._uplink.tell(news)
        if not self._rollout_end.rollout.environments.has_fixed_lanes:
            gate.forget_lanes(self._session.kept)

    def _notify(self) -> None:
        """Wake the tasks that wait for a change."""
        changed, self._changed = self._changed, anyio.Event()
        changed.set()

    async def _run_watch(self, watch: Callable[[], Awaitable[object]]) -> None:
        """Raise what `watch` raises; if it returns, wait for the trainer's last messages."""
        await watch()
        while self.has_trainer and not self._has_left():
            await self._changed.wait()
        self._trainer_has_ended = True
        self._uplink.bell.ring()

    async def _wait_until(self, is_met: Callable[[], bool]) -> None:
        """Wait for the trainer until a condition is met; while it is there, log at growing intervals why it is not."""
        reminder = Reminder(anyio.current_time())
        while not is_met():
            changed = self._changed
            with anyio.move_on_after(_LOOK_S):
                await changed.wait()
            if reminder.is_due(now := anyio.current_time()) and self.has_trainer:
                reason = self._buffer.held_back(self._session, self._sends)
                logger.warning("waiting for %.0f s for %s: %s", now - reminder.since, self._trainer_name, reason)

    def _may_take(self) -> bool:
        """True if an item may be taken; a drained run logs once why it may not."""
        order, under_way = self._rollout_end.gate.order, self._session.given - self._session.done
        if under_way < (1 if order is None else order.window) and self._buffer.has_room(self._sends):
            return True
        if self._is_draining:
            self._is_draining = False
            reason = self._uplink.problem or self._buffer.held_back(self._session, self._sends)
            text = "the run is drained, and what it has made waits for %s, as long as it takes: %s; leave the run, or "
            logger.warning(text + "press Ctrl-C again, to give it up", self._trainer_name, reason)
        return False

    def _has_left(self) -> bool:
        """True if there is no trainer to wait for."""
        return self.goodbye is not None

    def _send(self, item: AnyFragment | Batch) -> None:
        end, number, is_fragment = self._rollout_end, self._session.given + 1, isinstance(item, AnyFragment)
        if is_fragment != (self._sends == "fragments"):
            raise TypeError(f"a {type(item).__name__} came to a sink that sends {self._sends}, expected these")
        if isinstance(item, AnyFragment):
            message, steps = end.message_of(number, item), item.num_steps
            end.gate.give(item.lane, item.sequence)
        else:
            message = message_of_batch(number, item, modules=end.ids, episodes=end.seen.take_episodes())
            steps = int(message.rest["steps"])
        if self._lender is not None:
            self._lender.look_at(message)
        self._buffer.add(message, nbytes_of(message), steps, end.origins_of(item))
        self._session.given = number
        self._uplink.wake()
        end.gate.look_again()  # since the trainer may be what lanes wait for now
