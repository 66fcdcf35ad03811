"""The newest published weights and the number of their version."""

import threading
from collections.abc import Mapping
from typing import Any

import torch

from rollflow.stream.errors import ModuleError

Weights = Mapping[str, torch.Tensor]


class PolicyWeights:
    """A one-slot mailbox for weights: publishing replaces what nobody has taken yet, and never waits.

    Version 0 are the weights that the module had when the rollout was made. May be used from any thread.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._shapes = {name: tuple(tensor.shape) for name, tensor in _tensors(module.state_dict()).items()}
        self._owner = type(module).__name__
        self._lock = threading.Lock()
        self._version = 0
        self._unused: tuple[int, dict[str, Any]] | None = None

    @property
    def version(self) -> int:
        """The version published last."""
        return self._version

    def publish(self, weights: Weights) -> int:
        """Copy `weights`, a module's `state_dict()`, and return the version that they now have.

        Raises ModuleError when names or shapes are not those of the acting module.
        """
        self._check(weights)
        copied = {name: value.detach().clone() for name, value in weights.items() if torch.is_tensor(value)}
        with self._lock:
            self._version += 1
            self._unused = self._version, {**weights, **copied}
            return self._version

    def take(self) -> tuple[int, dict[str, Any]] | None:
        """The newest weights and their version, once; None when there is nothing new."""
        if self._unused is None:
            return None
        with self._lock:
            unused, self._unused = self._unused, None
        return unused

    def _check(self, weights: Weights) -> None:
        if not isinstance(weights, Mapping):
            raise ModuleError(f"weights are {type(weights).__name__}, expected a state_dict(): name -> tensor")
        given = {name: tuple(tensor.shape) for name, tensor in _tensors(weights).items()}
        if given == self._shapes:
            return
        missing, unknown = (
            sorted(self._shapes.keys() - given.keys()),
            sorted(given.keys() - self._shapes.keys()),
        )
        differ = [
            f"'{name}' is {list(given[name])}, expected {list(self._shapes[name])}"
            for name in given
            if name in self._shapes and given[name] != self._shapes[name]
        ]
        raise ModuleError(
            f"weights do not fit module '{self._owner}': missing {missing}, unknown {unknown}, shapes: {differ}"
        )


def _tensors(weights: Weights) -> dict[str, torch.Tensor]:
    return {name: value for name, value in weights.items() if torch.is_tensor(value)}
