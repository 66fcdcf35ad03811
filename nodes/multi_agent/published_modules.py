"""Modules beside those that are trained and those that act, for whoever runs them in another thread."""

from typing import Any

from rollflow.nodes.given import acting_copy
from rollflow.nodes.multi_agent.acting_module import ActingModule
from rollflow.nodes.multi_agent.module_set import ModuleSet


class PublishedModules:
    """Copies of a rollout's modules with the weights that have been published last.

    modules    those of the rollout

    For one thread at a time; modules may be added, removed, trained and published in others meanwhile.
    """

    def __init__(self, modules: ModuleSet) -> None:
        self._modules = modules
        self._copies: dict[Any, tuple[ActingModule, int, Any]] = {}  # of which, and of which version

    def get(self, module_id: Any) -> Any:
        """The copy of a module, which keeps its weights until it is asked for again; None where there is none."""
        acting, trained = self._modules.acting.get(module_id), self._modules.modules.get(module_id)
        if acting is None or trained is None:
            self._copies.pop(module_id, None)
            return None
        known = self._copies.get(module_id)
        _, version, module = known if known and known[0] is acting else (acting, -1, acting_copy(trained))
        if version != acting.weights.version:
            version, weights = acting.weights.newest(acting.module)
            module.load_state_dict(weights)
        self._copies[module_id] = acting, version, module
        return module

    def forget(self, module_id: Any) -> None:
        """Keep no copy of a module that has been removed."""
        self._copies.pop(module_id, None)
