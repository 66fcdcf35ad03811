"""Environments that step in threads of their own, one for each lane: for those that wait, or let the interpreter go."""

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from threading import get_ident
from typing import Any

from rollflow.nodes.closing import closing_on_error
from rollflow.nodes.env.environments import Environments
from rollflow.nodes.env.multi_agent.agent_environments import AgentEnvironments
from rollflow.nodes.env.workers.lane_threads import LaneThreads
from rollflow.nodes.env.workers.watch import Activity, ActivityFlag, ProgressMark, ProgressWatch, call_under_way
from rollflow.stream.data.errors import EnvError
from rollflow.stream.graph.meter import clock
from rollflow.stream.graph.wakeup import Wakeup
from rollflow.stream.net import backoff
from rollflow.stream.observe.stacks import stack_of_thread
from rollflow.stream.observe.waits import Wait

logger = logging.getLogger(__name__)

Job = Callable[[Any], None]  # what is to be done with a lane


class ThreadEnvironments:
    """Node that steps each lane of environments in a thread of its own, while others are worked on.

    environments                   steps the lanes, whether they have one agent each or several; whatever it has beside
                                   its steps is to be asked for here
    step_timeout, reset_timeout    seconds after which the run ends with an EnvError that names the lane; None: never.
                                   Every reset has a time of its own: see `ProgressWatch`

    A thread can't be made to stop: one that still hangs when the node is closed is left behind, which is logged.
    """

    def __init__(
        self,
        environments: Environments | AgentEnvironments,
        *,
        step_timeout: float | None = 60.0,
        reset_timeout: float | None = 120.0,
    ) -> None:
        self._environments, self.call_times = environments, environments.call_times
        self.in_flight = 0
        with closing_on_error(environments.close):
            lanes = range(environments.num_lanes)
            self._phases = [ActivityFlag() for _ in lanes]
            are_told = environments.tell_resets([phase.turn for phase in self._phases])
            for phase, is_told in zip(self._phases, are_told, strict=True):
                phase.set_blended(not is_told)
            self._is_reset = [False for _ in lanes]
            progress = partial(_progress_of, self._phases, self._is_reset)
            self._watch = ProgressWatch(step_timeout, reset_timeout, progress)
            # of every lane: when its thread began what it is at, in ns, and the thread
            self._begun: list[tuple[int, int] | None] = [None for _ in lanes]
            self._done: deque[tuple[Any, BaseException | None]] = deque()
            self._threads = LaneThreads(len(lanes))
            self._bell = Wakeup()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__} has no attribute '{name}'")
        return getattr(self._environments, name)

    def start(self) -> Iterator[Any]:
        """Have every environment reset, all at a time; the lanes come by `completed`. Raises RunError a second time."""
        for lane in self._environments.begin_lanes():
            self._hand_over(lane, self._environments.reset_lane)
        return iter(())

    def __call__(self, actions: Any) -> Any:
        """Have the lane's thread step its environments with the actions that it brings."""
        self._is_reset[actions.index] = True
        self._hand_over(actions, self._environments.step_lane)

    def fileno(self) -> int:
        """Can be read once a lane is completed."""
        return self._bell.fileno()

    @property
    def patience(self) -> float | None:
        """Seconds until the first lane is late."""
        return self._watch.left

    def completed(self) -> Iterator[Any]:
        """The lanes that have been stepped. Raises what an environment raised; EnvError when one is late."""
        self._bell.silence()
        while self._done:
            lane, error = self._done.popleft()
            self.in_flight -= 1
            self._watch.end(lane.index)
            if error is not None:
                self._environments.unrecorded_steps += lane.steps_under_way if self._is_reset[lane.index] else 0
                try:
                    raise error
                finally:
                    del error  # whose traceback refers to this frame
            yield lane
        for index, reason in self._watch.overdue().items():
            raise EnvError(f"lane {index}, vector step {self._environments.lanes[index].vector_steps}: {reason}")

    def at_work(self, name: str) -> Iterator[Wait]:
        """What every lane's thread is at right now."""
        for index, begun in enumerate(list(self._begun)):
            if begun is not None:
                progress = _progress_of(self._phases, self._is_reset, index)
                yield call_under_way(
                    self._environments.lanes[index],
                    progress,
                    party=name,
                    mark=(begun, progress[0]),
                    age_s=(clock() - begun[0]) / 1e9,
                    where=f"lane {index}, in its thread",
                    remedy="have it return; Timeouts(step=…) ends the run, and where='processes' the worker alone",
                    stack=partial(stack_of_thread, begun[1]),
                )

    def describe(self) -> str:
        """Lanes and slots, for `explain()`."""
        return f"{self._environments.describe()}, a thread each"

    def close(self) -> None:
        """End the threads, once they have done the step that they are at, and close the environments."""
        if self._environments.is_closed:
            return
        self._threads.end()
        hung: list[int] = []
        for index in range(len(self._phases)):
            if not self._threads.has_ended(index, backoff.times.close_s if not hung else 0.0):
                hung.append(index)
        if hung:
            logger.warning("the environments of lanes %s hang: their threads are left behind", hung)
            self._environments.is_closed = True
            return
        self._bell.close()
        self._environments.close()

    def _hand_over(self, lane: Any, job: Job) -> None:
        self.in_flight += 1
        self._watch.begin(lane.index)
        self._threads.put(lane.index, partial(self._do, lane, job))

    def _do(self, lane: Any, job: Job) -> None:
        error: BaseException | None = None
        does = "step" if self._is_reset[lane.index] else "reset"
        self._begun[lane.index] = begun = clock(), get_ident()
        try:
            job(lane)
        except BaseException as raised:  # also a SystemExit: to be raised where the rollout is read
            error = raised
        self._begun[lane.index] = None
        self.call_times.add(clock() - begun[0])
        trace = self._environments.trace
        if trace is not None:
            trace.stepped(lane.index, begun[0], does)
        self._done.append((lane, error))
        del error  # whose traceback refers to this frame
        self._bell.ring()


def _progress_of(phases: Sequence[ActivityFlag], is_reset: Sequence[bool], index: int) -> ProgressMark:
    return phases[index].turns, phases[index].doing if is_reset[index] else Activity.RESET
