"""Modules by their ids: the interface of RLlib's `MultiRLModule`."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from rollflow.stream.errors import ModuleError


class MultiRLModule(Mapping[Any, Any]):
    """Modules by id, each with its own weights.

        modules    id -> an `RLModule`, or whatever else has `forward_exploration` and `forward_inference`

    Raises ModuleError where there are none, and for an id that is taken or unknown.
    """

    framework = "torch"

    def __init__(self, modules: Mapping[Any, Any]) -> None:
        if not isinstance(modules, Mapping) or not modules:
            raise ModuleError(f"modules are {modules!r:.200}, expected a dict with at least one: module id -> module")
        self._modules = dict(modules)

    def __getitem__(self, module_id: Any) -> Any:
        try:
            return self._modules[module_id]
        except KeyError:
            raise ModuleError(f"there is no module '{module_id}', expected one of {list(self._modules)}") from None

    def __contains__(self, module_id: object) -> bool:
        return module_id in self._modules

    def __iter__(self) -> Iterator[Any]:
        return iter(list(self._modules))

    def __len__(self) -> int:
        return len(self._modules)

    def add_module(self, module_id: Any, module: Any) -> None:
        """Add a module."""
        self.check_new(module_id)
        self._modules[module_id] = module

    def check_new(self, module_id: Any) -> None:
        """Raise ModuleError where there is a module of this id."""
        if module_id in self._modules:
            raise ModuleError(f"there is a module '{module_id}' already, expected another id, or remove_module first")

    def remove_module(self, module_id: Any) -> Any:
        """Take a module out, and return it."""
        module = self[module_id]
        del self._modules[module_id]
        return module

    def foreach_module(self, function: Callable[[Any, Any], Any]) -> list[Any]:
        """What `function(module id, module)` gives for each."""
        return [function(module_id, module) for module_id, module in self._modules.items()]

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """The parameters of all modules that are networks, for an optimizer."""
        for module in self._modules.values():
            if isinstance(module, torch.nn.Module):
                yield from module.parameters()

    def state_dict(self) -> dict[Any, dict[str, Any]]:
        """Module id -> its `state_dict()`."""
        return {module_id: module.state_dict() for module_id, module in self._modules.items()}

    def load_state_dict(self, state: Mapping[Any, Mapping[str, Any]]) -> None:
        """Take over what `state_dict` gave, for the modules that it names."""
        for module_id, weights in state.items():
            self[module_id].load_state_dict(weights)
