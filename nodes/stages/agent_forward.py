"""Forward passes of a multi-agent rollout: one for every module, over all agents that it serves."""

from collections.abc import Sequence
from typing import Any

from rollflow.nodes.stages.acting_module import ActingModule, acting_in
from rollflow.nodes.stages.module_forward import joint_pass, note_batch
from rollflow.nodes.stages.module_set import ModuleSet
from rollflow.stream.multi_agent.multi_agent_lane import MultiAgentLane


class AgentForward:
    """A node that runs each module over its batch; the output takes the batch's place.

    modules    those that act, for `explain()`
    """

    def __init__(self, modules: ModuleSet) -> None:
        self._modules = modules

    def __call__(self, batches: MultiAgentLane) -> MultiAgentLane:
        """One pass for every module that has agents to act for."""
        lane = batches
        outputs: dict[int, Any] = {}
        for place, batch in lane.batches.items():
            acting = acting_in(lane, place)
            forward = acting.forward
            try:
                outputs[place] = forward.forward(batch)
            except Exception as error:
                where = f"module '{acting.module_id}', lane {lane.index}, vector step {lane.vector_steps}"
                note_batch(error, where, batch)
                raise
            lane.policy_versions[place] = forward.policy_version
        lane.batches = outputs
        return lane

    def rows(self, lane: MultiAgentLane) -> int:
        """Rows of a lane in its passes, of all modules: the agents that are to act."""
        return sum(len(part.acting) for part in lane.parts)

    def forward_lanes(self, lanes: Sequence[MultiAgentLane]) -> None:
        """One pass for every module, over its agents in all lanes; each lane gets `LaneOutput`s of those."""
        if len(lanes) == 1:
            self(lanes[0])
            return
        served: dict[ActingModule, list[tuple[int, int]]] = {}  # lane, as it is counted here, and place of the module
        for number, lane in enumerate(lanes):
            for place in lane.batches:
                served.setdefault(acting_in(lane, place), []).append((number, place))
        outputs: list[dict[int, Any]] = [{} for _ in lanes]
        for acting, places in served.items():
            parts = _joint_pass(acting, [(lanes[number], place) for number, place in places])
            for (number, place), part in zip(places, parts, strict=True):
                outputs[number][place] = part
                lanes[number].policy_versions[place] = acting.forward.policy_version
        for lane, of_lane in zip(lanes, outputs, strict=True):
            lane.batches = of_lane

    def describe(self) -> str:
        """The way passes are done, for `explain()`, where that is not as the modules have it."""
        ways = {acting.module_id: acting.forward.describe() for acting in list(self._modules.acting.values())}
        if len(set(ways.values())) == 1:
            return next(iter(ways.values()))
        return ", ".join(f"'{module_id}' {way}" for module_id, way in ways.items() if way)


def _joint_pass(acting: ActingModule, places: Sequence[tuple[MultiAgentLane, int]]) -> Sequence[Any]:
    """Do one pass of a module over its agents in several lanes; each lane's part of the output.

    places    the lanes, and the place that the module has in each
    """
    batches = [lane.batches[place] for lane, place in places]
    sizes = [len(lane.shown[place].slots) for lane, place in places]
    shared_data = [lane.shared_data_of(place) for lane, place in places]
    where = f"module '{acting.module_id}', lanes {', '.join(str(lane.index) for lane, _ in places)}"
    return joint_pass(acting.forward.forward, batches, sizes, shared_data, where)
