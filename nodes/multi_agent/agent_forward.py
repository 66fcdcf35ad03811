"""Forward passes of a multi-agent rollout: one for every module, over all agents that it serves."""

from rollflow.nodes.module_forward import told_of_batch
from rollflow.nodes.multi_agent.module_set import ModuleSet
from rollflow.stream.multi_agent.multi_agent_lane import MultiAgentLane


class AgentForward:
    """A node that runs each module over its batch; the output takes the batch's place.

    modules    those that act
    """

    def __init__(self, modules: ModuleSet) -> None:
        self._modules = modules

    def __call__(self, batches: MultiAgentLane) -> MultiAgentLane:
        """One pass for every module that has agents to act for."""
        lane = batches
        for place, batch in lane.batches.items():
            module_id = lane.module_ids[place]
            forward = self._modules.acting[module_id].forward
            try:
                lane.batches[place] = forward.forward(batch)
            except Exception as error:
                told = told_of_batch(batch)
                error.add_note(
                    f"module '{module_id}', lane {lane.index}, vector step {lane.vector_steps}, batch: {told}"
                )
                raise
            lane.policy_versions[place] = forward.policy_version
        return lane
