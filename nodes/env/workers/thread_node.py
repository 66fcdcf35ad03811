"""Environments that step in threads of their own, one for each lane: for those that wait, or let the interpreter go."""

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from threading import get_ident
from typing import Any

from rollflow.nodes.env.workers.job_thread import JobThread
from rollflow.nodes.env.workers.lane_status import LanePhase, LaneStatus
from rollflow.nodes.env.workers.lanes_elsewhere import LanesElsewhere
from rollflow.nodes.env.workers.watch import Activity, ActivityFlag, ProgressMark, call_under_way
from rollflow.stream.data.errors import EnvError
from rollflow.stream.graph.meter import clock
from rollflow.stream.graph.wakeup import Wakeup
from rollflow.stream.net import backoff
from rollflow.stream.observe.stacks import stack_of_thread
from rollflow.stream.observe.waits import Wait

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False, kw_only=True)
class ThreadLane(LaneStatus):
    """A lane that a thread steps.

    begun    when its thread began what it is at, in ns, and the thread; None: it is at nothing
    """

    thread: JobThread
    activity: ActivityFlag = field(default_factory=ActivityFlag)
    begun: tuple[int, int] | None = None


class ThreadEnvironments(LanesElsewhere):
    """A node that steps each lane of environments in a thread of its own, while others are worked on.

    step_timeout, reset_timeout    seconds after which the run ends with an EnvError that names the lane; None: never.
                                   Every reset has a time of its own: see `ProgressWatch`

    No lane is lost: what its environments raise ends the run. A thread can't be made to stop: one that still hangs when
    the node is closed is left behind, which is logged.
    """

    remotes: list[ThreadLane]

    def __init__(self, env: Any, **options: Any) -> None:
        self._done: deque[tuple[ThreadLane, BaseException | None]] = deque()
        self._bell = Wakeup()
        super().__init__(env, **options)

    def _made(self, env: Any, num_envs: int | None, lanes: int | None) -> Sequence[Any]:
        made = super()._made(env, num_envs, lanes)
        for index, envs in enumerate(self._here):
            remote = ThreadLane(index, LanePhase.RESETTING, thread=JobThread(f"rollflow lane {index}"))
            remote.activity.set_blended(not envs.tell_resets(remote.activity.turn))
            self.remotes.append(remote)
        return made

    def fileno(self) -> int:
        """Can be read once a lane is completed."""
        return self._bell.fileno()

    def _counted(self) -> Iterator[Any]:
        return self._completed()  # threads count their calls

    def describe(self) -> str:
        """Lanes and slots, for `explain()`."""
        return f"{super().describe()}, a thread each"

    def close(self) -> None:
        """End the threads, once they have done the step that they are at, and close the environments."""
        if not self.is_closed and not hang("lanes", [remote.thread for remote in self.remotes]):
            super().close()
        self.is_closed = True

    # For `LanesElsewhere`

    def progress(self, lane: int) -> ProgressMark:
        remote = self.remotes[lane]
        is_reset = remote.phase is not LanePhase.RESETTING
        return remote.activity.turns, remote.activity.doing if is_reset else Activity.RESET

    def ask(self, remote: ThreadLane) -> None:
        self._put(remote, LanePhase.STEPPING, self.step_lane)

    def _go_on(self, remote: ThreadLane) -> None:
        self._put(remote, LanePhase.RESETTING, self.reset_lane)

    def _heard(self) -> Iterator[Any]:
        self._bell.silence()
        while self._done:
            remote, error = self._done.popleft()
            lane = self.come_back(remote)
            if error is not None:
                self.unrecorded_steps += lane.steps_under_way if remote.phase is LanePhase.STEPPING else 0
                try:
                    raise error
                finally:
                    del error  # whose traceback refers to this frame
            remote.phase = LanePhase.READY
            yield lane

    def _late(self, remote: ThreadLane, text: str) -> Iterator[Any]:
        raise EnvError(f"lane {remote.index}, vector step {remote.lane.vector_steps}: {text}")

    def _waits_for(self, remote: ThreadLane, name: str, began: float | None, age_s: float) -> Iterator[Wait]:
        index, begun = remote.index, remote.begun
        if begun is not None:
            progress = self.progress(index)
            yield call_under_way(
                remote.lane,
                progress,
                party=name,
                mark=(begun, progress[0]),
                age_s=(clock() - begun[0]) / 1e9,
                where=f"lane {index}, in its thread",
                remedy="have it return; Timeouts(step=…) ends the run, and where='processes' the worker alone",
                stack=partial(stack_of_thread, begun[1]),
            )

    def _end(self) -> None:
        self._bell.close()

    # Inside

    def _put(self, remote: ThreadLane, phase: LanePhase, job: Callable[[Any], None]) -> None:
        self.begin(remote, phase)
        remote.thread.put(partial(self._do, remote, job, "reset" if phase is LanePhase.RESETTING else "step"))

    def _do(self, remote: ThreadLane, job: Callable[[Any], None], does: str) -> None:
        error: BaseException | None = None
        remote.begun = begun = clock(), get_ident()
        try:
            job(remote.lane)
        except BaseException as raised:  # also a SystemExit: to be raised where the rollout is read
            error = raised
        remote.begun = None
        self.call_times.add(clock() - begun[0])
        trace = self.trace
        if trace is not None:
            trace.stepped(remote.index, begun[0], does)
        self._done.append((remote, error))
        del error  # whose traceback refers to this frame
        self._bell.ring()


def hang(noun: str, threads: Sequence[JobThread]) -> bool:
    """End the threads of lanes or slots: True if one hangs, and is left behind, which is logged."""
    for thread in threads:
        thread.end()
    hung: list[int] = []
    for index, thread in enumerate(threads):
        if not thread.has_ended(backoff.times.close_s if not hung else 0.0):
            hung.append(index)
    if hung:
        logger.warning("the environments of %s %s hang: their threads are left behind", noun, hung)
    return bool(hung)
