"""One module of a multi-agent rollout as it acts."""

from dataclasses import dataclass
from typing import Any

from rollflow.nodes.module_forward import ModuleForward
from rollflow.nodes.policy_weights import PolicyWeights
from rollflow.stream.multi_agent.multi_agent_lane import MultiAgentLane


@dataclass(slots=True, weakref_slot=True, eq=False)
class ActingModule:
    """One module as it acts; another that is added later under its id is another.

    module_id     its id
    module        the copy that acts
    weights       what is published for it
    forward       a pass
    explore       whether actions are sampled
    seed_name     what its sampling is seeded by, beside the rollout's seed
    is_removed    whether it serves those agents alone that it serves already
    is_checked    whether its actions are known to be those of its agents
    """

    module_id: Any
    module: Any
    weights: PolicyWeights
    forward: ModuleForward
    explore: bool
    seed_name: str
    is_removed: bool = False
    is_checked: bool = False


def acting_in(lane: MultiAgentLane, place: int) -> ActingModule:
    """The module at a place of a lane."""
    acting: Any = lane.modules[place]
    return acting  # type: ignore[no-any-return]
