"""Forward passes of a multi-agent rollout: one for every module, over all agents that it serves."""

from rollflow.nodes.module_forward import told_of_batch
from rollflow.nodes.multi_agent.acting_module import acting_in
from rollflow.stream.multi_agent.multi_agent_lane import MultiAgentLane


class AgentForward:
    """A node that runs each module over its batch; the output takes the batch's place."""

    def __call__(self, batches: MultiAgentLane) -> MultiAgentLane:
        """One pass for every module that has agents to act for."""
        lane = batches
        for place, batch in lane.batches.items():
            acting = acting_in(lane, place)
            forward = acting.forward
            try:
                lane.batches[place] = forward.forward(batch)
            except Exception as error:
                told = told_of_batch(batch)
                error.add_note(
                    f"module '{acting.module_id}', lane {lane.index}, vector step {lane.vector_steps}, batch: {told}"
                )
                raise
            lane.policy_versions[place] = forward.policy_version
        return lane
