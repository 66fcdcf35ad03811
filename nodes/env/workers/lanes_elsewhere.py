"""The base of nodes whose lanes step elsewhere: in threads, in worker processes, or on hosts."""

import abc
import logging
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from time import perf_counter_ns
from typing import Any, TypeVar

from rollflow.nodes.env.lane_source import LaneSource
from rollflow.nodes.env.workers.lane_status import MAX_FAILURES, LanePhase, LaneStatus
from rollflow.nodes.env.workers.watch import ProgressMark, ProgressWatch
from rollflow.stream.data.closing import closing_on_error
from rollflow.stream.data.errors import EnvError
from rollflow.stream.net import backoff
from rollflow.stream.net.backoff import pause_s
from rollflow.stream.observe.waits import LastError, Wait

logger = logging.getLogger(__name__)

L = TypeVar("L", bound=Any)  # a lane, or a token of one, as it goes round


class LanesElsewhere(LaneSource):
    """A node whose lanes step elsewhere: it hands them over, takes them back, and begins those anew that are lost.

    Subclasses say where lanes step and how they are asked, heard and lost.

        step_timeout, reset_timeout    seconds until a lane is late; None: never. See `ProgressWatch`

        late_suffix             what a step's time includes, in the texts of late lanes
        steps_while_draining    whether a lane that is ready is stepped also when no more steps are asked for

        remotes            lanes, by number
        deadlines          of the lanes that are waited for
        in_flight          lanes that are waited for, and whatever else is
        lost_steps         transitions that were under way when their lanes were lost
        set_aside_texts    of every lane that was lost too many times in a row: a sentence that says so, and why
        is_draining        True once no more steps are asked for: then no lane begins anew

    Each loss in a row doubles the pause before the lane begins anew; vector steps of a whole fragment forgive them.
    """

    late_suffix = ""
    steps_while_draining = True
    is_closed = False
    in_flight = 0

    def __init__(
        self, env: Any, *, step_timeout: float | None = 60.0, reset_timeout: float | None = 120.0, **options: Any
    ) -> None:
        self.remotes: list[Any] = []
        self.set_aside_texts: list[str] = []
        self.reset_timeout = reset_timeout
        self._lost: dict[int, LaneStatus] = {}  # those that are LOST
        self._came_early: dict[int, Any] = {}  # lanes that have come back before it is their turn
        self._leaving: deque[Any] = deque()  # lanes that were set aside while they were elsewhere in the ring
        itself: Any = weakref.proxy(self)  # which this function is held by
        self.deadlines = ProgressWatch(
            step_timeout, reset_timeout, lambda lane: itself.progress(lane), suffix=self.late_suffix
        )
        with closing_on_error(self._end):
            super().__init__(env, **options)

    def start(self) -> Iterator[Any]:
        """Have every environment reset, all at a time; the lanes come by `completed`. Raises RunError a second time."""
        for remote, lane in zip(self.remotes, self.begin_lanes(), strict=True):
            remote.lane = lane
            self.wait_for(remote)
            self._go_on(remote)
        return iter(())

    def hand_over(self, lane: L) -> L | None:
        """Have a lane's environments stepped with the actions that it brings: it comes back by `completed`."""
        remote = self.remotes[lane.index]
        self.wait_for(remote)
        if remote.phase is LanePhase.READY and (self.steps_while_draining or not self.is_draining):
            self.ask(remote)
            return None
        # It was lost while it was somewhere else: no step is under way.
        self.lost_steps += remote.lose_idle()
        if remote.phase is LanePhase.ASIDE:
            self._leaving.append(remote)
        elif not self.is_draining:
            self._go_on(remote)
        return None

    def hasten(self) -> None:
        """Have those lanes come back that make no step; from now on none begins anew."""
        self.is_draining = True

    def completed(self) -> Iterator[Any]:
        """The lanes that have come back, or begin anew. Raises EnvError when none is left."""
        return self._in_order(self._counted()) if self.keeps_order else self._counted()

    def _in_order(self, lanes: Iterator[Any]) -> Iterator[Any]:
        """Lanes in the order of their numbers, vector step by vector step; those that are set aside when they come."""
        self.order = self.order or deque(lane.index for lane in self.lanes)
        for lane in lanes:
            if lane.is_set_aside and lane.index in self.order:
                self.order.remove(lane.index)
            if lane.index not in self.order:  # it may have given its last fragment in an earlier run
                yield lane
            else:
                self.in_flight += 1  # still
                self._came_early[lane.index] = lane
        while self.order and (lane := self._came_early.pop(self.order[0], None)) is not None:
            self.order.rotate(-1)
            self.in_flight -= 1
            yield lane

    def _counted(self) -> Iterator[Any]:
        began_at, calls = self.deadlines.began, self.call_times
        for lane in self._completed():
            began = began_at.get(lane.index)
            if began is not None and not lane.is_set_aside:
                spent = int((backoff.times.clock() - began) * 1e9)
                calls.add(spent)
                if self.trace is not None:
                    does = "reset" if lane.vector_steps == 0 else self.does
                    self.trace.stepped(lane.index, perf_counter_ns() - spent, does)
            yield lane

    def _completed(self) -> Iterator[Any]:
        """The same, uncounted."""
        while self._leaving:
            yield from self._leave(self._leaving.popleft())
        yield from self._heard()
        for index, text in self.deadlines.overdue().items():
            yield from self._late(self.remotes[index], text)
        for remote in self.due():
            yield from self._set_out(remote)
        if self.is_draining:
            yield from self._given_up()

    @property
    def lanes_at_work(self) -> set[int]:
        """Numbers of the lanes that make steps, or should. From any thread."""
        return {remote.index for remote in list(self.remotes) if remote.is_at_work}

    def at_work(self, name: str) -> Iterator[Wait]:
        """What every lane that is waited for is at right now, as far as it is known here. From any thread."""
        for remote in list(self.remotes):
            if remote.is_waited:
                began = self.deadlines.began.get(remote.index)  # None: it was not asked yet
                age_s = 0.0 if began is None else max(0.0, backoff.times.clock() - began)
                yield from self._waits_for(remote, name, began, age_s)

    def close(self) -> None:
        """End what steps the lanes, release the memory, and close what was made here."""
        self.is_closed = True
        try:
            self._end()
        finally:
            super().close()

    @property
    def report_notes(self) -> Sequence[str]:
        """Sentences about lanes that were set aside, and why. From any thread."""
        return tuple(self.set_aside_texts)

    @property
    def last_error(self) -> LastError | None:
        """Why a lane was lost, or late, last; None: none ever was. From any thread."""
        lane = max(self.remotes[:], key=lambda each: each.noted_at, default=None)
        if lane is None or not lane.reason:
            return None
        return LastError(f"{lane.name}: {lane.reason}", backoff.times.clock() - lane.noted_at)

    # Lanes that come and go

    def wait_for(self, status: LaneStatus) -> None:
        """Put a lane in flight: it has been handed over."""
        assert not status.is_waited
        self.in_flight += 1
        status.is_waited = True

    def begin(self, status: LaneStatus, phase: LanePhase) -> None:
        """Have a lane's environments be at something new, and have its time begin."""
        if status.phase is LanePhase.LOST:
            del self._lost[status.index]
        status.phase = phase
        self.watch(status)

    def watch(self, status: LaneStatus) -> None:
        """Have a lane's time begin, or begin again, if the lane is waited for and not lost."""
        if status.is_waited and status.phase is not LanePhase.LOST:
            self.deadlines.begin(status.index)

    def come_back(self, status: LaneStatus) -> Any:
        """Take a lane out of flight: what goes on in the ring."""
        assert status.is_waited
        self.in_flight -= 1
        status.is_waited = False
        self.deadlines.end(status.index)
        return status.lane

    def give_back(self, status: LaneStatus) -> None:
        """Take a lane out of flight for good: it goes on in the ring once more, and never begins anew."""
        self.set_aside(status)
        if status.is_waited:
            self.come_back(status)

    # Counted losses

    def fail(self, status: LaneStatus) -> None:
        """Count a loss: the lane is to begin anew after a pause, or, after too many in a row, never."""
        status.failures += 1
        status.whole_steps = 0
        self.deadlines.end(status.index)
        if status.failures > MAX_FAILURES:
            self.set_aside(status)
            text = f"{status.name} is set aside, lost {status.failures} times in a row: {status.reason}"
            self.set_aside_texts.append(text)
            return
        status.phase = LanePhase.LOST
        status.due = backoff.times.clock() + pause_s(status.failures, backoff.times.worker_pause_s)
        self._lost[status.index] = status

    def set_aside(self, status: LaneStatus) -> None:
        """Have a lane never begin anew."""
        self._lost.pop(status.index, None)
        self.deadlines.end(status.index)
        status.phase = LanePhase.ASIDE

    # Time

    @property
    def patience(self) -> float | None:
        """Seconds until a lane is to be looked at or begins anew; None if there is none."""
        left = self.deadlines.left
        if self._lost and not self.is_draining:
            begins = max(0.0, min(status.due for status in self._lost.values()) - backoff.times.clock())
            left = begins if left is None else min(left, begins)
        return left

    def due(self) -> Iterator[LaneStatus]:
        """Lost lanes whose pause is over; none while the rollout is drained. To begin one may begin others with it."""
        if not self._lost or self.is_draining:
            return
        now = backoff.times.clock()
        for status in list(self._lost.values()):
            if status.phase is LanePhase.LOST and status.due <= now:
                yield status

    # Errors that end the run

    def check_first_errors(self) -> None:
        """Raise EnvError if the environments of every lane have raised before they made a step: no accident.

        Lanes that were set aside without a loss of their own, as those of hosts that left, don't count.
        """
        lanes = [each for each in self.remotes if each.failures or each.raised or each.phase is not LanePhase.ASIDE]
        raised = [(each.name, each.raised) for each in lanes if each.raised is not None and not each.has_made_steps]
        if self.is_draining or len(raised) < len(lanes) or any(each.has_made_steps for each in self.remotes):
            return
        reasons = "; ".join(f"{name}: {first.type}: {first.text}" for name, first in raised)
        error = EnvError(f"the environments of every lane raised before they had made a step: {reasons}")
        raised[0][1].add_notes_to(error, raised[0][0])
        raise error

    def check_any_left(self) -> None:
        """Raise EnvError if every lane has been set aside."""
        if self.is_draining or not all(each.phase is LanePhase.ASIDE for each in self.remotes):
            return
        reasons = "; ".join(f"{each.name}: {each.reason}" for each in self.remotes)
        times = MAX_FAILURES + 1
        raise EnvError(f"every lane was lost {times} times in a row, the last time by: {reasons}").see("worker")

    # Losses

    def give_up(self, remote: Any, reason: str) -> None:
        """End a lane's open episodes."""
        self.deadlines.end(remote.index)
        remote.note(reason)
        self.lost_steps += remote.lose(reason)

    def begin_anew_or_leave(self, remote: Any, traceback: str = "") -> Iterator[Any]:
        """Have a lane that was given up begin anew after a while, longer each time; after too many times it leaves."""
        self.fail(remote)
        self.listener.lane_lost(remote.index)
        if self.is_draining:
            logger.warning("%s is lost while the rollout is drained: %s%s", remote.name, remote.reason, traceback)
        elif remote.phase is LanePhase.ASIDE:
            logger.error("%s", self.set_aside_texts[-1])
        else:
            again = max(0.0, remote.due - backoff.times.clock())
            told = "%s is lost and made again in %.1f s: %s%s"
            logger.warning(told, remote.name, again, remote.reason, traceback)
        if remote.phase is LanePhase.ASIDE and remote.is_waited:
            yield from self._leave(remote)

    def _leave(self, remote: Any) -> Iterator[Any]:
        """Let a lane go round for the last time."""
        self.give_back(remote)
        remote.lane.is_set_aside = True
        yield remote.lane

    def _given_up(self) -> Iterator[Any]:
        """The lanes that are waited for and make no step, as no more are asked for."""
        for remote in self.remotes:
            if remote.is_waited and remote.has_no_step:
                if remote.phase is not LanePhase.READY:
                    self._end_waiting(remote)
                yield from LanesElsewhere._leave(self, remote)

    def _end_waiting(self, remote: Any) -> None:
        """Count what is lost with a lane that is not waited for any more."""
        self.lost_steps += remote.lose(f"the rollout ended: {remote.reason or 'it made no step'}")

    # What the place where lanes step says

    @abc.abstractmethod
    def progress(self, lane: int) -> ProgressMark:
        """Count by which a lane shows that it gets on, and its activity."""

    @abc.abstractmethod
    def ask(self, remote: Any) -> None:
        """Have a lane that is ready do what it was handed over for."""

    def _go_on(self, remote: Any) -> None:
        """Have a lane that is waited for begin, or begin anew, as soon as it can."""

    def _set_out(self, remote: Any) -> Iterator[Any]:
        """Have a lost lane begin anew: the lane, if it comes back at once."""
        raise NotImplementedError

    @abc.abstractmethod
    def _heard(self) -> Iterator[Any]:
        """The lanes that have come back."""

    @abc.abstractmethod
    def _late(self, remote: Any, text: str) -> Iterator[Any]:
        """Deal with a lane that has not come back in time: lanes that leave."""

    @abc.abstractmethod
    def _waits_for(self, remote: Any, name: str, began: float | None, age_s: float) -> Iterator[Wait]:
        """What a lane is at, for so many seconds. From any thread."""

    @abc.abstractmethod
    def _end(self) -> None:
        """End what steps the lanes."""
