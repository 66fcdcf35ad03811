"""Rollout's end of the stream to a trainer in another process or on another host: fragments out, weights in."""

import logging
import ssl
import weakref
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, Literal

import anyio
import anyio.to_thread
import numpy as np
from anyio.abc import TaskGroup

from rollflow.nodes.argument_checks import check_numbers, checking_keywords
from rollflow.nodes.metrics.episode_returns import AgentReturns, EpisodeReturns
from rollflow.nodes.modules.policy_weights import shapes_of
from rollflow.nodes.modules.rl_module import is_stateful
from rollflow.nodes.offloaded.fragment_message import message_of
from rollflow.nodes.policies.part_records import packed, unpacked
from rollflow.nodes.rollout.checkpoint import RUN, set_generators
from rollflow.nodes.rollout.multi_agent_rollout import MultiAgentRollout
from rollflow.nodes.rollout.rollout import Rollout
from rollflow.sinks.learner.learner_pipeline import FragmentGatherer
from rollflow.sinks.trainer import messages
from rollflow.sinks.trainer.lending import FragmentLender
from rollflow.sinks.trainer.messages import AnyFragment, Batch, FinishedEpisodes
from rollflow.sinks.trainer.pace_gate import PaceGate, ResendBuffer
from rollflow.sinks.trainer.uplink import TrainerUplink
from rollflow.stream import wire
from rollflow.stream.data.cached_property import cached_property
from rollflow.stream.data.errors import CheckpointError, GraphError, ModuleError, PolicyError, shown
from rollflow.stream.data.loss_ledger import Origin, origins_of
from rollflow.stream.graph.channel import Inlet
from rollflow.stream.graph.node import ending_quietly, out_of_group
from rollflow.stream.multi_agent.multi_agent_fragment import MultiAgentFragment
from rollflow.stream.net.backoff import WaitReminder
from rollflow.stream.net.endpoint import Secret, endpoint_at
from rollflow.stream.observe.waits import LastError, Wait
from rollflow.stream.wire.codec.handshake import MOST_NUMBER

logger = logging.getLogger(__name__)

_STAND_S = 5e-4  # between looks whether all lanes stand still
_LOOK_S = 1.0  # between looks whether a wait is long enough to be logged


class BatchObserver:
    """Node without outputs that observes every fragment as it leaves its rollout.

    rollout    of the fragments
    """

    def __init__(self, rollout: Rollout | MultiAgentRollout) -> None:
        self._returns: Any = AgentReturns() if isinstance(rollout, MultiAgentRollout) else EpisodeReturns()
        self._told: Counter[str | None] = Counter()  # episodes taken so far, by module; of all of them with None

    def __call__(self, fragments: Any) -> None:
        """Observe one fragment."""
        self._returns(fragments)

    def describe(self) -> str:
        """Text for `explain()`."""
        return "returns for the trainer"

    def take_episodes(self) -> list[FinishedEpisodes]:
        """Take the episodes that have finished since the last call, of all, and of the agents of each module."""
        by_module = getattr(self._returns, "by_module", {})
        of_modules = [(each, own) for each, own in by_module.items() if isinstance(each, str)]
        taken = []
        for module_id, own in [(None, self._returns), *of_modules]:
            if count := own.count - self._told[module_id]:
                self._told[module_id] = own.count
                kept = slice(-min(count, len(own.returns)), None)
                taken.append((module_id, count, np.array(own.returns)[kept], np.array(own.lengths)[kept]))
        return taken


AnyRollout = Rollout | MultiAgentRollout


def check_rollout(rollout: object) -> None:
    """Raise ValueError for anything but a rollout."""
    if not isinstance(rollout, AnyRollout):
        raise ValueError(f"rollout is {shown(rollout)}, expected a Rollout or a MultiAgentRollout")


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
    that leads to it. The rollout begins once the trainer has been there, and acts with its newest weights.

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
        self._session = ResendBuffer(max_bytes)
        self._born = self._session.token
        endpoint = endpoint_at(address, secret, tls, limits, may_share=True)
        self.lost: dict[str, int] = {}
        self.linger, self._sends = linger, sends
        self._lender = FragmentLender(max_bytes) if endpoint.shares else None
        self._changed, self._watch = anyio.Event(), watch
        self._has_ended = self._is_draining = self._is_over = self._trainer_has_ended = False
        self._cut: int | None = None  # number of the checkpoint that the trainer has asked for last
        self._failure: str | None = None
        self._trainer_name = f"the trainer at {endpoint.address}"
        self._drawn: AnyRollout | None = None  # once the graph has been drawn, as all that `_take_rollout` sets
        self._ids: tuple[str, ...] | None = None  # of modules whose weights the trainer publishes; None: of one module
        self._gate: PaceGate  # holds the rollout back, and knows its lanes as a trainer is to know them
        self._seen: BatchObserver  # sees its fragments where train batches are sent
        self._sends_all = True  # no edge before it drops
        self._makers: list[Any] = []  # methods of nodes before the sink: the origins of a batch
        sink = weakref.proxy(self)  # it holds its uplink
        self._uplink = TrainerUplink(
            endpoint,
            name,
            lambda: sink._hello(sink._uplink.newest),
            self._session,
            lambda version, weights: sink._publish(version, weights),
            self._lender,
            retry_s,
            lambda given: sink._go_on_with(given["state"].tobytes(), anew=given["anew"]),
        )
        self.name = self._uplink.name

    def take_sources(self, sources: Sequence[Any], *, drops: bool, is_all: bool) -> Sequence[Any]:
        """Find the rollout among the nodes that lead to the sink, and return it if it is new."""
        changed = self._take_rollout(sources, is_all=is_all)
        if is_all:
            self._take_makers(sources)
            self._sends_all = not drops
        return changed

    async def run(self, fragments: Inlet[AnyFragment | Batch]) -> None:
        """Send what comes, until no more does and the trainer is done with it."""
        self._uplink.start()
        try:
            with out_of_group():
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(ending_quietly, partial(self._follow_uplink, tasks))
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
        left, kept = self._session.given - self._session.done, self._session.later_than(self._session.done)
        if left:
            self.lost["undelivered"] = lost = sum(steps for _, _, steps, _ in kept)
            for origin in chain.from_iterable(origins for *_, origins in kept):
                origin.lose("undelivered")
            logger.log(
                logging.WARNING if self.goodbye is None else logging.INFO,  # it has left of its own will
                "%d %s with %d transitions not delivered: %s",
                left,
                self._sends if left > 1 else {"fragments": "fragment", "batches": "batch"}[self._sends],
                lost,
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
    def goodbye(self) -> str | None:
        """Reason that the trainer gave when it left; None: it has not, or there is another one."""
        return self._uplink.goodbye or (messages.HAS_ENDED if self._trainer_has_ended else None)

    async def wait_goodbye(self) -> str | None:
        """Wait until a trainer has left, and return its reason; None if the sink has ended before."""
        while self.goodbye is None and not self._is_over:
            await self._changed.wait()
        return self.goodbye

    def at_work(self, name: str) -> Iterator[Wait]:
        """The trainer, for the stall doctor: one that is there is waited for as long as it takes."""
        wait = self._gate.waits_for()
        if wait is not None:
            yield wait

    def describe(self) -> str:
        """Text for `explain()`."""
        return f"to {self._trainer_name}"

    # Inside

    @property
    def _rollout(self) -> AnyRollout:
        """The rollout, once the graph has been drawn."""
        assert self._drawn is not None
        return self._drawn

    def _take_rollout(self, sources: Sequence[Any], *, is_all: bool) -> Sequence[Any]:
        """Hold back the rollout among the sources, and see its fragments; it is returned if it is new.

        Raises GraphError if it is in its graph already, and ModuleError for module ids that are no strings.
        """
        where = f"the TrainerSink to {self._uplink.address}"
        rollout = rollout_among(sources, where, is_all=is_all)
        if rollout is None or rollout is self._drawn:
            return ()
        if self._drawn is not None:
            raise GraphError(f"{where} has another rollout by now, expected a sink for each")
        rollout.be_drawn_anew()
        self._ids = _claimed_ids(rollout) if isinstance(rollout, MultiAgentRollout) else None
        sink, environments = weakref.proxy(self), rollout.environments  # it holds the gate
        lanes = None if environments.has_fixed_lanes else range(environments.num_lanes)
        self._gate = PaceGate(self._session, self._trainer_name, lanes, lambda: sink._uplink.bell.ring())
        self._seen = BatchObserver(rollout)
        rollout.hold_back(self._gate)
        if self._sends == "batches":
            rollout.watch(self._seen)
        elif self._lender is not None:
            environments.share()
        self._drawn = rollout
        self._gate.takes_state = self._sends_fixed_lanes
        return [rollout]

    def _take_makers(self, sources: Sequence[Any]) -> None:
        """Know which fragments go into which train batch. Raises GraphError if there can't be what is to be sent."""
        makers = [node for node in sources if node is not self._rollout]
        self._makers = [node.origins_of for node in makers if hasattr(node, "origins_of")]
        if self._sends == "batches" and not makers:
            raise GraphError(
                "fragments come to a sink with sends='batches', expected a LearnerPipeline between it and the rollout, "
                "or sends='fragments'"
            )
        if self._sends == "fragments" and any(isinstance(node, FragmentGatherer) for node in makers):
            raise GraphError("train batches come to a sink with sends='fragments', expected sends='batches'")

    def _hello(self, newest: tuple[int, bytes] | None) -> dict[str, Any]:
        """What the first message of a connection to the trainer says of the rollout as it is now.

        newest    version and id of the newest weights that came from a trainer; None: none have
        """
        lanes = self._gate.lanes  # before the others: one that comes meanwhile has its slots among them
        rollout, environments = self._rollout, self._rollout.environments
        slots = tuple(env.num_envs for env in environments.envs) or (1,)
        if lanes is not None:
            slots = tuple(slots[lane] for lane in lanes) or slots[:1]
        ids = self._ids or ()
        if isinstance(rollout, MultiAgentRollout):
            weights = messages.joined_weights({module_id: rollout.module[module_id].state_dict() for module_id in ids})
            to_train = rollout.learner.to_train
        else:
            weights, to_train = rollout.module.state_dict(), None
        description = messages.RolloutDescription(
            sends=self._sends,
            parts=messages.parts_of(rollout),
            weights=shapes_of(weights),
            has_fixed_lanes=lanes is None,
            is_stateful=isinstance(rollout, Rollout) and is_stateful(rollout.module),
            module=type(rollout.module).__name__,
            version=self._version,
            weights_id=newest[1] if newest is not None and newest[0] == self._version else None,
            seed=rollout.seed if rollout.seed < MOST_NUMBER else None,
            aside=[*self._gate.aside.items()],
            shares_memory=self._lender is not None,
            is_by_module=isinstance(rollout, MultiAgentRollout),
            to_train=to_train,
            published=ids,
            sends_all=self._sends_all,
            takes_state=not self._gate.is_ready,
            born=self._born,
        )
        return {"slots": slots, "metadata": description.plain()}

    @property
    def _version(self) -> int:
        """Policy version that the rollout acts with; of several modules that of the trainer's weights."""
        rollout = self._rollout
        return rollout.version_elsewhere if isinstance(rollout, MultiAgentRollout) else rollout.policy_version

    def _publish(self, version: int, weights: Mapping[str, Any]) -> bool:
        """Have the rollout act with weights of this version; False: they are not newer than its own. From any thread.

        Raises ModuleError if they are not those of its module, or of modules `_ids` if it has several.
        """
        if isinstance(self._rollout, MultiAgentRollout):
            weights = messages.parted_weights(weights, self._ids or ())
        return self._rollout.publish_as(version, weights)

    @cached_property
    def _spaces(self) -> Sequence[Any]:
        """Spaces that observations may be in; once the rollout runs, its pipelines stay as they are."""
        parts = messages.parts_of(self._rollout)
        return parts if isinstance(self._rollout, MultiAgentRollout) else parts[0].seen

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
            await self._wait_until(lambda: self._is_done_with_all() or self.goodbye is not None)

    def _is_done_with_all(self) -> bool:
        """True if the trainer is done with all fragments, and has acknowledged them if it has a rollout stay."""
        order, session = self._session.order, self._session
        return session.given == (session.kept if order is not None and order["stays"] else session.done)

    async def _follow_uplink(self, tasks: TaskGroup) -> None:
        """Let the rollout and waiting tasks see each change of the uplink; raise the error if that has failed."""
        bell, gate = self._uplink.bell, self._gate
        while True:
            await anyio.wait_readable(bell.fileno())
            bell.silence()
            if self._uplink.error is not None:
                raise self._uplink.error
            cut = None if self._session.order is None else self._session.order["cut"]
            if cut != self._cut and cut is not None:
                tasks.start_soon(ending_quietly, partial(self._answer, cut))
            elif cut != self._cut:
                self._uplink.answer(None)
            self._cut = cut
            gate.version, gate.problem = self._version, self._uplink.problem
            self._send_lane_news()
            gate.look_again()
            self._notify()

    async def _answer(self, cut: int) -> None:
        """Have the rollout stand still, and send the trainer its state with what it has not acknowledged."""
        answer: dict[str, Any] = {"cut": cut}
        try:
            rollout: Any = self._rollout
            self._check_has_state()
            while self._gate.is_shut:  # for a trainer that asked before, and may be gone
                await anyio.sleep(_STAND_S)
                self._check_has_state()
            with self._gate.shut():
                self._notify()  # fragments come, also if they are more than the trainer takes
                while not rollout.stands_still(self._gate.stopped, self._gate.given):
                    await anyio.sleep(_STAND_S)
                    self._check_has_state()
                state, _ = rollout.capture(lambda look: look(()))
                newest = self._uplink.newest
                weights = None if newest is None else [newest[0], newest[1].hex()]
                session = self._session.get_state()
            of_all = {"rollout": state, "session": session, "weights": weights}
            data = await anyio.to_thread.run_sync(packed, of_all)
            answer["state"] = np.frombuffer(data, np.uint8)
            kinds = [{kind: each.get("restart") for each in lane for kind in each} for lane in state["environments"]]
            answer["environments"] = kinds
        except (CheckpointError, PolicyError) as error:
            answer["refused"] = str(error)
        if self._cut == cut:
            self._uplink.answer(answer)

    def _check_has_state(self) -> None:
        """Raise CheckpointError for a rollout whose state this has not, or that has come to its end."""
        if not self._sends_fixed_lanes:
            raise CheckpointError("expected a rollout with fixed lanes that sends='fragments'")
        if self._has_ended or self._gate.aside:
            raise CheckpointError("a lane is gone, or all have ended, and the trainer was not handed all of them")

    @property
    def _sends_fixed_lanes(self) -> bool:
        return self._sends == "fragments" and self._gate.lanes is None

    def _go_on_with(self, data: bytes, *, anew: bool) -> None:
        """Have the rollout go on from the state of another, before it begins.

        anew    with environments that begin anew, and none of the other's fragments
        """
        state, rollout = unpacked(RUN, data, "the state that the trainer has given"), self._rollout
        if rollout.go_on_with(state["rollout"], anew=anew):
            self._session.go_on_from(state["session"], partial(Origin, rollout.ledger))
            self._gate.given.update({lane.index: lane.sequence for lane in rollout.environments.lanes})
            if (newest := state["weights"]) is not None:
                self._uplink.newest = newest[0], bytes.fromhex(newest[1])
        set_generators(state["rollout"]["generators"])
        self._gate.takes_state = False

    def _send_lane_news(self) -> None:
        for news in self._gate.take_news(self._session.given):
            self._uplink.tell(news)

    def _notify(self) -> None:
        """Wake the tasks that wait for a change."""
        changed, self._changed = self._changed, anyio.Event()
        changed.set()

    async def _run_watch(self, watch: Callable[[], Awaitable[object]]) -> None:
        """Raise what `watch` raises; if it returns, wait for the trainer's last messages."""
        await watch()
        while self.has_trainer and self.goodbye is None:
            await self._changed.wait()
        self._trainer_has_ended = True
        self._uplink.bell.ring()

    async def _wait_until(self, is_met: Callable[[], bool]) -> None:
        """Wait for the trainer until a condition is met; while it is there, log at growing intervals why it is not."""
        reminder = WaitReminder()
        while not is_met():
            changed = self._changed
            with anyio.move_on_after(_LOOK_S):
                await changed.wait()
            if reminder.is_long and self.has_trainer:
                reason = self._session.held_back(self._sends)
                logger.warning("waiting for %.0f s for %s: %s", reminder.waited_s, self._trainer_name, reason)

    def _may_take(self) -> bool:
        """True if an item may be taken; a drained run logs once why it may not."""
        order, under_way = self._session.order, self._session.given - self._session.done
        is_wanted = under_way < (1 if order is None else order["window"])
        if self._gate.is_shut or (is_wanted and self._session.has_room(self._sends)):
            return True
        if self._is_draining:
            self._is_draining = False
            reason = self._uplink.problem or self._session.held_back(self._sends)
            text = "the run is drained, and what it has made waits for %s, as long as it takes: %s; leave the run, or "
            logger.warning(text + "press Ctrl-C again, to give it up", self._trainer_name, reason)
        return False

    def _send(self, item: AnyFragment | Batch) -> None:
        number, is_fragment = self._session.given + 1, isinstance(item, AnyFragment)
        if is_fragment != (self._sends == "fragments"):
            raise TypeError(f"a {type(item).__name__} came to a sink that sends {self._sends}, expected these")
        if isinstance(item, AnyFragment):
            message, steps = self._message_of(number, item.host), item.num_steps
            self._gate.give(item.lane, item.sequence)
        else:
            message = messages.message_of_batch(number, item, modules=self._ids, episodes=self._seen.take_episodes())
            steps = int(message.rest["steps"])
        if self._lender is not None:
            self._lender.look_at(message)
        self._session.add(message, messages.nbytes_of(message), steps, [*origins_of(item, self._makers)])
        self._uplink.wake()
        self._gate.look_again()  # since the trainer may be what lanes wait for now

    def _message_of(self, number: int, fragment: AnyFragment) -> wire.Fragment:
        """A fragment as a message of this number; one of several agents tells of episodes that have ended in it."""
        if isinstance(fragment, MultiAgentFragment):
            self._seen(fragment)
            return message_of(number, fragment, self._spaces, {"episodes": self._seen.take_episodes()})
        return messages.message_of_fragment(number, fragment, self._spaces)


def _claimed_ids(rollout: MultiAgentRollout) -> tuple[str, ...]:
    """Ids of the modules whose weights the trainer publishes.

    Raises ModuleError for ids that are no strings.
    """
    trained = [module_id for module_id in rollout.module if rollout.learner.trains(module_id)]
    if not all(isinstance(module_id, str) for module_id in trained):
        raise ModuleError(f"module ids are {trained}, expected strings where a trainer elsewhere gets their batches")
    ids = tuple(module_id for module_id in trained if shapes_of(rollout.module[module_id].state_dict()))
    rollout.be_published_elsewhere(ids)
    return ids


def rollout_among(sources: Sequence[Any], where: str, *, is_all: bool) -> AnyRollout | None:
    """The rollout among the nodes that lead to a sink; None: it has not been connected yet.

    where     the sink, for messages
    is_all    whether there are no others to come

    Raises GraphError if there are several, or none is to come.
    """
    found = [node for node in sources if isinstance(node, AnyRollout)]
    if len(found) > 1:
        raise GraphError(
            f"{len(found)} rollouts lead to {where}, expected one: give each a sink of its own to the same trainer"
        )
    if not found and is_all:
        names = ", ".join(type(node).__name__ for node in sources) or "nothing"
        raise GraphError(
            f"no rollout leads to {where}, but {names}; expected a Rollout or a MultiAgentRollout upstream of it, as "
            "in graph.connect(rollout.fragments, TrainerSink(...))"
        )
    return found[0] if found else None
