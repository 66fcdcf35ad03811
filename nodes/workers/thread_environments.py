"""Environments that step in threads of their own, one for each lane: for those that wait, or let the interpreter go."""

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Any

from rollflow.nodes.env_source import EnvSource
from rollflow.nodes.environments import Environments, actions_of
from rollflow.nodes.stepping import Step, blends_resets, reset_first, step_of
from rollflow.nodes.workers.phase import Doing, Phase
from rollflow.nodes.workers.watch import At, Watch
from rollflow.nodes.workers.worker_process import CLOSE_TIMEOUT_S
from rollflow.stream.bell import Bell
from rollflow.stream.errors import EnvError
from rollflow.stream.lane import Lane

logger = logging.getLogger(__name__)


class ThreadEnvironments(Environments):
    """`Environments` each of whose lanes steps in a thread of its own, while others are worked on.

    step_timeout, reset_timeout    seconds after which the run ends with an EnvError that names the lane; None: never.
                                   Every reset has a time of its own: see `Watch`

    A thread can't be made to stop: one that still hangs when the node is closed is left behind, which is logged.
    """

    def __init__(
        self,
        env: EnvSource,
        *,
        step_timeout: float | None = 60.0,
        reset_timeout: float | None = 120.0,
        **options: Any,
    ) -> None:
        self._phases: list[Phase] = []
        super().__init__(env, **options)
        self.in_flight = 0
        self._watch = Watch(step_timeout, reset_timeout, self._at)
        self._is_reset = [False] * len(self.envs)
        self._done: deque[tuple[Lane, BaseException | None]] = deque()
        self._bell = Bell()
        self._jobs: list[SimpleQueue[Callable[[], None] | None]] = [SimpleQueue() for _ in self.envs]
        self._threads = [
            threading.Thread(target=self._work, args=(index,), name=f"rollflow lane {index}", daemon=True)
            for index in range(len(self.envs))
        ]

    def start(self) -> Iterator[Lane]:
        """Have every environment reset, all at a time; the lanes come by `completed`."""
        self._begin()
        for lane, env, first_slot in zip(self.lanes, self.envs, self.first_slots(), strict=True):
            self._threads[lane.index].start()

            def reset(lane: Lane = lane, env: Any = env, first_slot: int = first_slot) -> None:
                lane.reset(*reset_first(env, self.seed, first_slot))

            self._hand_over(lane, reset)
        return iter(())

    def __call__(self, actions: Lane) -> Lane | None:
        """Have the lane's thread step its environments with the actions that it brings."""
        lane = actions
        self._is_reset[lane.index] = True
        self._hand_over(lane, lambda: lane.record_step(*self._steps[lane.index](actions_of(lane))))
        return None

    def fileno(self) -> int:
        """Can be read once a lane is completed."""
        return self._bell.fileno()

    @property
    def patience(self) -> float | None:
        """Seconds until the first lane is late."""
        return self._watch.left

    def completed(self) -> Iterator[Lane]:
        """The lanes that have been stepped. Raises what an environment raised; EnvError when one is late."""
        self._bell.silence()
        while self._done:
            lane, error = self._done.popleft()
            self.in_flight -= 1
            self._watch.end(lane.index)
            if error is not None:
                error.add_note(f"lane {lane.index}, vector step {lane.vector_steps}")
                raise error
            yield lane
        for index, told in self._watch.overdue().items():
            raise EnvError(f"lane {index}, vector step {self.lanes[index].vector_steps}: {told}")

    def describe(self) -> str:
        """Lanes and slots, for `explain()`."""
        return f"{super().describe()}, a thread each"

    def close(self) -> None:
        """End the threads, once they have done the step that they are at, and close the environments."""
        if self.is_closed:
            return
        for thread, jobs in zip(self._threads, self._jobs, strict=True):
            if thread.ident is not None:
                jobs.put(None)
        hung: list[int] = []
        for index, thread in enumerate(self._threads):
            if thread.ident is not None:
                thread.join(CLOSE_TIMEOUT_S if not hung else 0.0)
            if thread.is_alive():
                hung.append(index)
        if hung:
            logger.warning("the environments of lanes %s hang: their threads are left behind", hung)
            self.is_closed = True
            return
        self._bell.close()
        super().close()

    def _step(self, env: Any) -> Step:
        phase = Phase()
        phase.set_blended(blends_resets(env, is_ours=self._is_ours))
        self._phases.append(phase)
        return step_of(env, is_ours=self._is_ours, turn=phase.turn)

    def _at(self, index: int) -> At:
        phase = self._phases[index]
        return phase.turns, phase.doing if self._is_reset[index] else Doing.RESET

    def _hand_over(self, lane: Lane, job: Callable[[], None]) -> None:
        self.in_flight += 1
        self._watch.begin(lane.index)
        self._jobs[lane.index].put(job)

    def _work(self, index: int) -> None:
        lane, jobs = self.lanes[index], self._jobs[index]
        while (job := jobs.get()) is not None:
            error: BaseException | None = None
            try:
                job()
            except BaseException as raised:  # also a SystemExit: to be raised where the rollout is read
                error = raised
            self._done.append((lane, error))
            self._bell.ring()
