"""Modules of a multi-agent rollout as they act, and copies of them for use in another thread."""

from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from rollflow.nodes.connectors.learner.advantages import device_of
from rollflow.nodes.modules.policy_weights import PolicyWeights
from rollflow.nodes.stages.connector_builders import acting_copy
from rollflow.nodes.stages.module_forward import ModuleForward
from rollflow.stream.multi_agent.multi_agent_lane import MultiAgentLane


@dataclass(slots=True, weakref_slot=True, eq=False)
class ActingModule:
    """One module as it acts; another that is added later under its id is another.

    module_id     its id
    module        the copy that acts
    weights       what is published for it
    forward       a pass
    explore       whether actions are sampled
    seed_name     seeds its sampling, beside the rollout's seed
    is_removed    True if it takes no new agents, and keeps those that it serves
    is_checked    True if its actions were checked against its agents' space
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


class PublishedModules:
    """Copies of a rollout's modules with the weights that have been published last.

    For one thread at a time; modules may be added, removed, trained and published in others meanwhile. A copy goes when
    the module that acts does.
    """

    def __init__(self) -> None:
        self._copies: WeakKeyDictionary[ActingModule, tuple[int, Any]] = WeakKeyDictionary()  # of which version

    def get(self, acting: ActingModule, trained: Any) -> Any:
        """A copy of the acting module, on the device of the trained one; it keeps its weights until the next call.

        Not of the trained one: training may leave in it what can't be copied.
        """
        version, module = self._copies.get(acting) or (-1, _copy_of(acting.module, device_of(trained)))
        if version != acting.weights.version:
            version, weights = acting.weights.newest(acting.module)
            module.load_state_dict(weights)
        self._copies[acting] = version, module
        return module


def _copy_of(module: Any, device: Any) -> Any:
    return acting_copy(module, None if device == device_of(module) else device)
