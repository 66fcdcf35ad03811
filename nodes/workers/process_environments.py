"""Environments that step in worker processes, their rows in shared memory: for those that are costly, or not to be
trusted with this process."""

from collections.abc import Iterator, Sequence
from typing import Any

from rollflow.nodes.env_source import EnvSource, lane_makers
from rollflow.nodes.environments import Environments
from rollflow.nodes.workers.frames import lane_block
from rollflow.nodes.workers.lane_link import Elsewhere, LaneBlocks
from rollflow.nodes.workers.lane_processes import LaneProcesses
from rollflow.stream.errors import EnvError
from rollflow.stream.lane import Lane
from rollflow.stream.lane_columns import LaneMemory


class ProcessEnvironments(Environments, LaneProcesses):
    """`Environments` whose lanes step in worker processes, while others are worked on: see `LaneProcesses`.

    Callables are handed over by cloudpickle. Infos must be numbers, strings, arrays, or lists and dicts of those.
    """

    program = "rollflow.nodes.workers.env_worker"

    def __init__(
        self,
        env: EnvSource,
        *,
        workers: int | None = None,
        step_timeout: float | None = 60.0,
        reset_timeout: float | None = 120.0,
        max_failures: int = 5,
        **options: Any,
    ) -> None:
        LaneProcesses.__init__(
            self,
            workers=workers,
            step_timeout=step_timeout,
            reset_timeout=reset_timeout,
            max_failures=max_failures,
        )
        try:
            Environments.__init__(self, env, **options)
        except BaseException:
            self._ending()
            raise

    def start(self) -> Iterator[Lane]:
        """Have every environment reset, all at a time; the lanes come by `completed`."""
        self._begin()
        self._start_lanes()
        return iter(())

    def __call__(self, actions: Lane) -> Lane | None:
        """Have the lane's worker step its environments with the actions that it brings."""
        self._hand_over(actions)
        return None

    def describe(self) -> str:
        """Lanes, slots and processes, for `explain()`."""
        return f"{super().describe()}, in {len(self._workers)} worker process{'es' if len(self._workers) > 1 else ''}"

    def close(self) -> None:
        """End the worker processes and give back the shared memory."""
        self._end_processes()
        for lane in self.lanes:
            if isinstance(lane.memory, LaneBlocks):
                lane.memory.pool.close()

    # What Environments does otherwise

    def _made(self, env: Any, num_envs: int | None, lanes: int | None) -> Sequence[Any]:
        makers = lane_makers(env, num_envs, lanes)
        if not all(maker.can_travel for maker in makers):
            raise EnvError(
                "worker processes make the environments themselves: expected an id, a callable, or a list of callables "
                "instead of a vector environment that has been made already"
            )
        return [Elsewhere(told) for told in self._launch(makers)]

    def _memory(self, index: int) -> LaneMemory | None:
        spaces = self.observation_space, self.action_space
        slots = self.envs[index].num_envs
        return LaneBlocks(lane_block(*spaces, slots, self.fragment_length, self.lookback))
