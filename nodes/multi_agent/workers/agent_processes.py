"""Environments with several agents each that step in worker processes."""

from collections.abc import Iterator, Sequence
from typing import Any

from rollflow.nodes.multi_agent.agent_environments import AgentEnvironments, lane_makers
from rollflow.nodes.multi_agent.array_vector import MultiAgentVectorEnv
from rollflow.nodes.multi_agent.workers.agent_codec import AgentsElsewhere
from rollflow.nodes.multi_agent.workers.agent_link import AgentLink
from rollflow.nodes.multi_agent.workers.agent_worker import AgentLaneMaker
from rollflow.nodes.workers.lane_processes import LaneProcesses
from rollflow.stream.errors import EnvError
from rollflow.stream.multi_agent.multi_agent_lane import MultiAgentLane


class AgentProcesses(AgentEnvironments, LaneProcesses):
    """`AgentEnvironments` whose lanes step in worker processes, while others are worked on: see `LaneProcesses`.

    Callables are handed over by cloudpickle. Agents' ids must be numbers, strings or tuples of those; infos numbers,
    strings, arrays, or lists and dicts of those. An agent that has acted and waits when its environment is lost has
    made no step: it is one of `lost_steps`.
    """

    program = "rollflow.nodes.multi_agent.workers.agent_worker"
    link_class = AgentLink

    def __init__(
        self,
        env: Any,
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
            AgentEnvironments.__init__(self, env, **options)
        except BaseException:
            self._ending()
            raise

    def start(self) -> Iterator[MultiAgentLane]:
        """Have every environment reset, all at a time; the lanes come by `completed`. Raises RunError a second time."""
        self._begin()
        self._start_lanes()
        return iter(())

    def __call__(self, actions: MultiAgentLane) -> MultiAgentLane | None:
        """Have the lane's worker step its environments with the actions that it brings."""
        self._hand_over(actions)
        return None

    def describe(self) -> str:
        """Lanes, environments, agents and processes, for `explain()`."""
        return f"{super().describe()}, in {len(self._workers)} worker process{'es' if len(self._workers) > 1 else ''}"

    def close(self) -> None:
        """End the worker processes and give back the shared memory."""
        self._end_processes()
        for link in self._links:
            assert isinstance(link, AgentLink)
            link.close()

    # What others do otherwise

    def _made(self, env: Any, num_envs: int | None, lanes: int | None) -> Sequence[Any]:
        if isinstance(env, MultiAgentVectorEnv):
            raise EnvError(
                "worker processes make the environments themselves: expected a callable, or a list of callables, "
                "instead of a vector environment that has been made already"
            )
        makers, first, given = [], 0, lane_makers(env, num_envs, lanes)
        for of_lane in given:
            makers.append(AgentLaneMaker(of_lane, first))
            first += len(of_lane)
        made = [AgentsElsewhere(told) for told in self._launch(makers)]
        for link, envs in zip(self._links, made, strict=True):
            assert isinstance(link, AgentLink)
            link.lay_out(envs)
        return made

    def _lose(self, lane: MultiAgentLane, reason: str, *, is_under_way: bool) -> int:
        return lane.lose(reason, is_under_way=is_under_way)
