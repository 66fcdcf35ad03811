"""Modules beside those that are trained and those that act, for whoever runs them in another thread."""

from typing import Any
from weakref import WeakKeyDictionary

from rollflow.nodes.connectors.learner.values import device_of
from rollflow.nodes.given import acting_copy
from rollflow.nodes.multi_agent.acting_module import ActingModule


class PublishedModules:
    """Copies of a rollout's modules with the weights that have been published last.

    For one thread at a time; modules may be added, removed, trained and published in others meanwhile. A copy goes with
    the one that acts, once this serves nobody.
    """

    def __init__(self) -> None:
        self._copies: WeakKeyDictionary[ActingModule, tuple[int, Any]] = WeakKeyDictionary()  # of which version

    def get(self, acting: ActingModule, trained: Any) -> Any:
        """The copy of a module, where that which is trained is; it keeps its weights until it is asked for again.

        It is a copy of the one that acts: training may leave in the other what can't be copied.
        """
        version, module = self._copies.get(acting) or (-1, _copy_of(acting.module, device_of(trained)))
        if version != acting.weights.version:
            version, weights = acting.weights.newest(acting.module)
            module.load_state_dict(weights)
        self._copies[acting] = version, module
        return module


def _copy_of(module: Any, device: Any) -> Any:
    return acting_copy(module, None if device == device_of(module) else device)
