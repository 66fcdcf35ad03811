"""Environments that step in worker processes: for those that are costly, or not to be trusted with this process."""

from rollflow.nodes.env.environments import AgentEnvironments, Environments
from rollflow.nodes.env.workers.env_link import AgentLink, EnvLink, LaneBlocks
from rollflow.nodes.env.workers.frames import lane_block
from rollflow.nodes.env.workers.worker_node import WorkerNode
from rollflow.stream.fragments.lane import LaneMemory


class ProcessEnvironments(WorkerNode, Environments):
    """`Environments` whose lanes step in worker processes, while others are worked on: see `WorkerNode`.

    Their rows lie in shared memory. Callables are handed over by cloudpickle. Infos must be numbers, strings, arrays,
    or lists and dicts of those.
    """

    program, link_of = "rollflow.nodes.env.workers.lane_server", EnvLink

    def _release_lanes(self) -> None:
        for lane in self.lanes:
            if isinstance(lane.memory, LaneBlocks):
                lane.memory.pool.close()
        super()._release_lanes()

    def _memory(self, index: int) -> LaneMemory | None:
        spaces = self.observation_space, self.action_space
        slots = self.envs[index].num_envs
        block = lane_block(*spaces, slots, self.fragment_length, self.lookback)
        return LaneBlocks(block, has_actions=self.chosen_space == self.action_space)


class AgentProcesses(WorkerNode, AgentEnvironments):
    """`AgentEnvironments` whose lanes step in worker processes, while others are worked on: see `WorkerNode`.

    Callables are handed over by cloudpickle. Agents' ids must be numbers, strings or tuples of those; infos numbers,
    strings, arrays, or lists and dicts of those. An agent that has acted and waits when its environment is lost has
    made no step: it is one of `lost_steps`.
    """

    program, link_of = "rollflow.nodes.env.workers.lane_server", AgentLink
