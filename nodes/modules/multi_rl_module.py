"""Modules by their ids, with the interface of RLlib's `MultiRLModule`."""

from collections.abc import Iterator, Mapping
from typing import Any, Self

import torch

from rollflow.nodes.modules.rl_module import Batch
from rollflow.stream.data.errors import ModuleError, shown


class MultiRLModule(Mapping[Any, Any]):
    """Modules by id, each with its own weights: a mapping.

        modules    id -> an `RLModule`, or whatever else has `forward_exploration` and `forward_inference`

    Raises ModuleError where there are none, and for an id that is taken or unknown.
    """

    framework = "torch"

    def __init__(self, modules: Mapping[Any, Any]) -> None:
        if not isinstance(modules, Mapping) or not modules:
            raise ModuleError(f"modules are {shown(modules)}, expected a dict with at least one: module id -> module")
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

    def __repr__(self) -> str:
        modules = ", ".join(f"{module_id!r}: {type(module).__name__}" for module_id, module in self._items())
        return f"<{type(self).__name__} {modules}>"

    def get(self, module_id: Any, default: Any = None) -> Any:
        """Return the module of an id, or `default`."""
        return self._modules.get(module_id, default)

    def add_module(self, module_id: Any, module: Any, *, override: bool = False) -> None:
        """Add a module, with `override` in place of one with the same id.

        For a rollout's modules use `rollout.add_module`, which lets the module act.
        """
        if not override:
            self.check_new(module_id)
        self._modules[module_id] = module

    def check_new(self, module_id: Any) -> None:
        """Raise ModuleError where there is a module of this id."""
        if module_id in self._modules:
            raise ModuleError(f"there is a module '{module_id}' already, expected another id, or remove_module first")

    def remove_module(self, module_id: Any, *, raise_err_if_not_found: bool = True) -> Any:
        """Remove a module and return it; None if there is none and that is no error.

        For a rollout's modules use `rollout.remove_module`, which keeps nothing of the module.
        """
        module = self[module_id] if raise_err_if_not_found else self.get(module_id)
        self._modules.pop(module_id, None)
        return module

    # Forward passes take module id -> batch, of some of the modules, and give module id -> output.

    def forward_exploration(self, batch: Mapping[Any, Batch], **kwargs: Any) -> dict[Any, Batch]:
        """Forward passes for actions that are sampled."""
        return {module_id: self[module_id].forward_exploration(own, **kwargs) for module_id, own in batch.items()}

    def forward_inference(self, batch: Mapping[Any, Batch], **kwargs: Any) -> dict[Any, Batch]:
        """Forward passes for the likeliest actions."""
        return {module_id: self[module_id].forward_inference(own, **kwargs) for module_id, own in batch.items()}

    def forward_train(self, batch: Mapping[Any, Batch], **kwargs: Any) -> dict[Any, Batch]:
        """Forward passes for losses."""
        return {module_id: self[module_id].forward_train(own, **kwargs) for module_id, own in batch.items()}

    def __call__(self, batch: Mapping[Any, Batch], **kwargs: Any) -> dict[Any, Batch]:
        """`forward_train`."""
        return self.forward_train(batch, **kwargs)

    # Torch's interface, for the modules that are networks

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """Yield the parameters of all modules, for an optimizer."""
        return (parameter for _, parameter in self.named_parameters())

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Yield all parameters with their names: the module's id, a dot, the name in the module."""
        for module_id, network in self._networks():
            for name, parameter in network.named_parameters():
                yield f"{module_id}.{name}", parameter

    def to(self, device: Any) -> Self:
        """Move all modules to a device."""
        for _, network in self._networks():
            network.to(device)
        return self

    def train(self, mode: bool = True) -> Self:
        """Put all modules into training mode, or out of it."""
        for _, network in self._networks():
            network.train(mode)
        return self

    def eval(self) -> Self:
        """Put all modules into evaluation mode."""
        return self.train(False)

    def state_dict(self) -> dict[Any, dict[str, Any]]:
        """Return module id -> the module's `state_dict()`."""
        return {module_id: module.state_dict() for module_id, module in self._items()}

    def load_state_dict(self, state: Mapping[Any, Mapping[str, Any]]) -> None:
        """Load what `state_dict` gave, into the modules that it names."""
        for module_id, weights in state.items():
            self[module_id].load_state_dict(weights)

    get_state = state_dict
    set_state = load_state_dict

    def _items(self) -> list[tuple[Any, Any]]:
        """Ids and modules as they are now: another thread may add modules meanwhile."""
        return list(self._modules.items())

    def _networks(self) -> Iterator[tuple[Any, torch.nn.Module]]:
        return (item for item in self._items() if isinstance(item[1], torch.nn.Module))
