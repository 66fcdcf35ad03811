"""Environments of one lane that step elsewhere, each on its own: the lane goes on with those that are ready."""

import abc
import contextlib
import os
import time
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from queue import Empty, SimpleQueue
from threading import get_ident, get_native_id
from time import perf_counter
from typing import Any

import numpy as np
from gymnasium.vector.utils import iterate

from rollflow.nodes.env.env_source import side_by_side
from rollflow.nodes.env.observation_check import CHECKED_STEPS, ObservationCheck
from rollflow.nodes.env.stepping import Beginning, OneSlot, joiner_of_slots
from rollflow.nodes.env.workers.job_thread import JobThread
from rollflow.nodes.env.workers.lane_status import LanePhase, LaneStatus
from rollflow.nodes.env.workers.lanes_elsewhere import LanesElsewhere
from rollflow.nodes.env.workers.thread_node import hang
from rollflow.nodes.env.workers.watch import Activity, ActivityFlag, ProgressMark, call_under_way
from rollflow.stream.data.errors import EnvError
from rollflow.stream.data.tree import Tree, map_tree
from rollflow.stream.fragments.ready_lane import ReadyLane, SlotAnswers
from rollflow.stream.graph.meter import clock
from rollflow.stream.graph.wakeup import Wakeup
from rollflow.stream.observe.stacks import stack_of_thread
from rollflow.stream.observe.waits import Wait

_LEAST_SHARED, _MOST_SHARED = 0.2, 0.4  # of a core, for threads to come together on one, and to leave it
_WAIT_S = 0.05  # for answers, in the graph's thread; what takes longer is waited for in the background


class ReadySlots(LanesElsewhere):
    """A node with one lane, whose slots step elsewhere, each on its own: the lane goes on with those that are ready.

    max_wait    seconds for which the lane waits for more slots, once one is ready

    waits_in_call    True while a call waits for slots, as at the end of a fragment
    """

    _has_given_up = waits_in_call = False

    def __init__(self, env: Any, *, max_wait: float = 0.0, **options: Any) -> None:
        self._max_wait = max_wait
        self._rings = False  # whether slots that have answered are to say so by the descriptor
        self._resets: list[Any] | None = []  # what has been answered to the first resets; None: all have come
        self._to_end: dict[int, str] = {}  # slots that were lost, until they begin anew, and why
        self.not_gone_on = ""  # why a slot of a lane that is restored does not go on; "": all do, so far
        super().__init__(env, **options)
        self._check = ObservationCheck(self.observation_space, self.deviations, f"lane {self._first_lane}, ")

    @property
    def lanes_at_work(self) -> set[int]:
        return {lane.index for lane in self.lanes}

    def start(self) -> Iterator[Any]:
        """Have every environment reset, all at a time; the lane comes by `completed`. Raises RunError a second time."""
        (lane,) = self.begin_lanes()
        self.in_flight, self._rings = 1, True
        for remote in self.remotes:
            remote.lane, remote.is_waited = lane, True
            self.watch(remote)
            self._go_on(remote)
        return iter(())

    def hand_over(self, lane: Any) -> Any:
        """Have the turn's slots stepped: the lane with those that are ready next, unless it comes by `completed`."""
        self.in_flight = 1
        if self.trace is not None:
            self.trace.begins(lane.index)
        self._send(*lane.actions)
        came = self._come(_WAIT_S) if self.may_wait and not lane.held else None
        if not (came or lane.held):
            self._rings = True  # from now on, and what came before is looked for
            came = self._come(0.0)
        return self._taken(lane, came or []) if came or lane.held else None

    def completed(self) -> Iterator[Any]:
        """The lane, once slots are ready. Raises what an environment raised; EnvError when one is late."""
        came = self._come(0.0)
        if came and (lane := self._taken(self.lanes[0], came)) is not None:
            yield lane

    def get_state(self) -> list[Any]:
        """The states of the lane's environments, once all slots have answered: the lane holds that."""
        self.lanes[0].hold_answers()
        states = list(chain.from_iterable(super().get_state()))
        anew = [state for state in states if "restart" in state]
        return [anew[:1] * self.num_envs or states]  # one of a lane whose slots all begin anew, if one does

    def finish(self) -> Iterator[Any]:
        """The lane, with the steps that are under way: no more are asked for."""
        for lane in self.lanes:
            if self.is_started and lane.take_rest():
                yield lane

    def close(self) -> None:
        """End what steps the slots; steps under way are counted as made."""
        self._stop_lanes()
        super().close()

    # Inside

    def _stop_lanes(self) -> None:
        for lane in self.lanes if self._resets is None and not self.is_closed else ():
            lane.stop(is_sent=bool(self.in_flight))

    def _lane(self, index: int, envs: Any, first_slot: int) -> Any:
        layout = self.kind.layout(self, index, envs, self.seed)  # type: ignore[union-attr]
        return ReadyLane(index, layout, self.observation_space, self._receive, is_shared=self.is_shared)

    def _receive(self) -> SlotAnswers | None:
        """Wait for the next answers; None: some slots have been given up instead."""
        self._has_given_up, self.waits_in_call = False, True
        came: list[Any] = []
        while not came and not self._has_given_up:
            came = self._come(_WAIT_S)
        answers = self._joined(came) if came else None
        self.waits_in_call = False  # stays True if a slot has raised, or is late
        return answers

    def _come(self, wait_s: float) -> list[Any]:
        """What has been answered, for which so many seconds are waited; empty: nothing."""
        came = self._heard_within(wait_s)
        if self.deadlines.is_due:
            self._look_at_load()
            for index, text in self.deadlines.overdue().items():
                for _ in self._late(self.remotes[index], text):
                    pass
        return came

    def _taken(self, lane: Any, came: list[Any]) -> Any:
        """The lane with answers; None while first resets are missing."""
        if self._resets is None:
            until = perf_counter() + self._max_wait if self._max_wait and not self.is_draining else 0.0
            # What a slot answers once it has begun anew does not go with what it answered before.
            while (
                until
                and not (self._to_end or lane.held)
                and len(came) < lane.num_left
                and (left := until - perf_counter()) > 0
            ):
                came += self._heard_within(left)
            answers, step = lane.held.popleft() if lane.held else self._joined(came), lane.vector_steps
            if step in CHECKED_STEPS:
                self._check.slots(answers.observations, step, answers.slots, dtypes=False)
                self._look_at_load()
            try:
                lane.record_step(*answers)
            except Exception as error:
                if not self.waits_in_call:  # else another slot has raised, or is late
                    error.add_note(f"{lane.named(answers.slots.tolist())}, lane {lane.index}, vector step {step}")
                raise
        else:
            self._resets += came
            if len(self._resets) < self.num_envs:
                return None
            if lane.is_restored and self.not_gone_on:
                self.begin_anew(lane, self.not_gone_on)
                self._resets = []
                for remote in self.remotes:
                    self._go_on(remote)
                return None
            if not lane.is_restored:
                first = self._joined(self._resets)
                self._check.slots(first.observations, dtypes=False)
                lane.reset(first.observations, first.infos)
            self._resets = None
        self.in_flight, self._rings = 0, False
        return lane

    def _look_at_load(self) -> None:
        """Look at what the slots need of the processor."""

    # What the place where slots step says

    @abc.abstractmethod
    def _send(self, slots: Any, actions: Tree) -> None:
        """Have slots, i64[K], stepped with actions, any[K, ...]."""

    @abc.abstractmethod
    def _heard_within(self, wait_s: float) -> list[Any]:
        """What has been answered; if that is nothing, so many seconds are waited for it.

        Raises what an environment raised.
        """

    @abc.abstractmethod
    def _joined(self, came: list[Any]) -> SlotAnswers:
        """The answers, in the slots' order."""


@dataclass(slots=True, eq=False, kw_only=True)
class SlotThread(LaneStatus):
    """A slot that a thread steps.

    one      its environment
    asks     what it is asked for: a `Beginning`, then actions; None: to end
    begun    when its thread began what it is at, in ns; 0: it is at nothing
    ident, native_id    of its thread
    """

    one: OneSlot
    thread: JobThread
    activity: ActivityFlag
    asks: SimpleQueue[Any] = field(default_factory=SimpleQueue)
    begun: int = 0
    ident: int = 0
    native_id: int = 0

    @property
    def is_in_reset(self) -> bool:
        """True while a step resets its environment."""
        return self.activity.doing is Activity.RESET


class ReadyThreads(ReadySlots):
    """A node with one lane, each of whose slots steps in a thread of its own: see `ReadySlots`.

    step_timeout, reset_timeout    seconds after which the run ends with an EnvError that names the slot; None: never

    may_share_core                 whether they may share a core with the graph's thread, if that does nothing else

    The threads do nothing but step: each waits for the interpreter while another one is at work. While they need less
    than a fifth of a core in all, as environments that wait, they share one with the graph's thread: the interpreter
    then goes from one to the other without another core that has to wake up, which takes a quarter of the time.
    """

    remotes: list[SlotThread]

    def __init__(self, env: Any, *, may_share_core: bool = False, **options: Any) -> None:
        self._may_share_core = may_share_core and hasattr(os, "sched_setaffinity")
        self._cores: set[int] = set()  # that the graph's thread may use; empty: none was ever shared
        self._core: set[int] = set()  # that is shared
        self._shares_core, self._load = False, (0, 0)  # ns when they were looked at, and of the processor
        self._answered: SimpleQueue[tuple[int, Any]] = SimpleQueue()  # slots and answers; None: it has raised
        self._raised: list[BaseException] = []
        self._bell = Wakeup()
        super().__init__(side_by_side(env), **options)
        self._join = joiner_of_slots(self.observation_space)

    def _made(self, env: Any, num_envs: int | None, lanes: int | None) -> Sequence[Any]:
        made = super()._made(env, num_envs, lanes)
        itself: Any = weakref.proxy(self)  # which holds the environments
        turns = [partial(ReadyThreads._turn_of, itself, slot) for slot in range(made[0].num_envs)]
        for one in self._here[0].slots(turns):
            thread, activity = JobThread(f"rollflow slot {one.slot}"), ActivityFlag()
            self.remotes.append(SlotThread(one.slot, LanePhase.RESETTING, one=one, thread=thread, activity=activity))
        return made

    def fileno(self) -> int:
        """Can be read once a slot has answered while the lane is in flight."""
        return self._bell.fileno()

    def describe(self) -> str:
        """Slots, for `explain()`."""
        return f"{super().describe()}, a thread each"

    def close(self) -> None:
        """End the threads, once they have done the step that they are at, and close the environments.

        If a thread hangs, they stay open, and so does what the thread tells by.
        """
        for remote in self.remotes:
            remote.asks.put(None)
        if self.is_closed:
            return
        if hang("slots", [remote.thread for remote in self.remotes]):
            self._stop_lanes()
            self._release()
        else:
            super().close()
        self.is_closed = True

    def start(self) -> Iterator[Any]:
        for remote in self.remotes:
            remote.thread.put(partial(self._serve, remote))
        return super().start()

    # For `ReadySlots`

    def progress(self, lane: int) -> ProgressMark:
        remote = self.remotes[lane]
        doing = remote.activity.doing if self._resets is None else Activity.RESET
        return (remote.begun or clock()) + remote.activity.turns, doing  # another one at each look while it waits

    def ask(self, remote: Any) -> None:
        raise NotImplementedError  # slots are asked together

    def _go_on(self, remote: SlotThread) -> None:
        lane, slot = remote.lane, remote.index
        seed = self.seeds_of_lane(0, lane.vector_steps if self.states_before else 0)[slot]
        state = self.states_before[0][slot] if lane.is_restored else None
        remote.asks.put(Beginning(seed, state, lane.dead[slot]))

    def _send(self, slots: Any, actions: Tree) -> None:
        remotes = self.remotes
        each: Any = actions  # numbers, or else copies: environments may keep them, while the module writes anew
        if not isinstance(actions, np.ndarray) or actions.ndim > 1:
            each = iterate(self.envs[0].action_space, map_tree(np.copy, actions))
        for slot, action in zip(slots.tolist(), each, strict=True):
            remotes[slot].asks.put(action)

    def _heard_within(self, wait_s: float) -> list[Any]:
        answered = self._answered
        if self._rings:
            self._bell.silence()
        try:
            came = [answered.get(wait_s > 0, wait_s)]
        except Empty:
            return []
        if self._raised:
            raise self._raised.pop()  # not held by this frame, to which its traceback refers
        return came + [answered.get_nowait() for _ in range(answered.qsize())]

    def _joined(self, came: list[Any]) -> SlotAnswers:
        came.sort()
        slots, answers = zip(*came, strict=True)
        stepped = self._join(slots, answers)
        return SlotAnswers(*stepped[:5], np.array(slots), stepped.final)

    def _heard(self) -> Iterator[Any]:
        return iter(())

    def _late(self, remote: SlotThread, text: str) -> Iterator[Any]:
        raise EnvError(f"lane {self.lanes[0].index}, slot {remote.index}: {text}")

    def _look_at_load(self) -> None:
        if not (self._may_share_core and self.has_own_thread and all(each.native_id for each in self.remotes)):
            return
        of_each = (time.clock_gettime_ns(time.pthread_getcpuclockid(each.ident)) for each in self.remotes)
        (since, used), self._load = self._load, (clock(), sum(of_each))
        share = (self._load[1] - used) / (self._load[0] - since)
        if since and (share < (_MOST_SHARED if self._shares_core else _LEAST_SHARED)) != self._shares_core:
            self._shares_core = not self._shares_core
            if self._shares_core:
                self._cores = os.sched_getaffinity(0)
            self._core = {sorted(self._cores)[get_native_id() % len(self._cores)]}
            for native_id in (0, *(each.native_id for each in self.remotes if not each.is_in_reset)):
                self._run_on(native_id)

    def _run_on(self, native_id: int, *, is_free: bool = False) -> None:
        """Have a thread, 0: this one, run if it may: on the shared core, if there is one and it is not free."""
        with contextlib.suppress(OSError):  # where a sandbox forbids it, or cores have been taken away meanwhile
            os.sched_setaffinity(native_id, self._core if self._shares_core and not is_free else self._cores)

    def _turn_of(self, slot: int) -> None:
        """A reset within a step begins, or has ended: what it starts, as simulators, is not to share the core."""
        remote = self.remotes[slot]
        remote.activity.turn()
        if self._shares_core:
            self._run_on(0, is_free=remote.is_in_reset)

    def _waits_for(self, remote: SlotThread, name: str, began: float | None, age_s: float) -> Iterator[Wait]:
        if begun := remote.begun:
            turns, (_, doing) = remote.activity.turns, self.progress(remote.index)
            yield call_under_way(
                remote.lane,
                (turns, doing),
                party=name,
                mark=(begun, turns),
                age_s=(clock() - begun) / 1e9,
                where=f"slot {remote.index}, in its thread",
                remedy="have it return; Timeouts(step=…) ends the run, and where='processes' the worker alone",
                stack=partial(stack_of_thread, remote.ident),
            )

    def _end(self) -> None:
        self._bell.close()

    # In a slot's thread

    def _serve(self, remote: SlotThread) -> None:
        """Reset and step an environment, until there is no more to be done."""
        one, slot, get, put, times = remote.one, remote.index, remote.asks.get, self._answered.put, self.call_times
        remote.ident, number = get_ident(), 0
        remote.native_id = get_native_id()  # once both are known
        while (asked := get()) is not None:
            remote.begun = began = clock()
            begins, answer = type(asked) is Beginning, None
            try:
                answer = one.begin(asked) if begins else one.step(asked)
            except BaseException as error:  # also a SystemExit: to be raised where the rollout is read
                error.add_note(f"slot {slot}, the first reset" if begins else f"slot {slot}, step {number}")
                self._raised.append(error)
            if type(answer) is str:
                self.not_gone_on = answer
            remote.begun = 0
            times.add(clock() - began)
            put((slot, answer))
            if self._rings:
                self._bell.ring()
            number += not begins
            del answer, asked  # which this frame would hold while it waits
