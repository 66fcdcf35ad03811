"""The newest published weights and the number of their version."""

import threading
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from rollflow.stream.errors import ModuleError

Weights = Mapping[str, torch.Tensor]
Shapes = Mapping[str, tuple[int, ...]]


class PolicyWeights:
    """A one-slot mailbox for weights: publishing replaces what nobody has taken yet, and never waits.

        module     whose they are
        version    of the weights that it has when it begins to act

    May be used from any thread.
    """

    def __init__(self, module: torch.nn.Module, version: int = 0) -> None:
        self._shapes = shapes_of(module.state_dict())
        self._owner = type(module).__name__
        self._lock = threading.Lock()
        self._loading = threading.Lock()  # held while weights are loaded, which reading them waits for
        self._version = self._loaded = self.first_version = version
        self._unused: tuple[int, dict[str, Any]] | None = None

    @property
    def version(self) -> int:
        """The version published last."""
        return self._version

    def publish(self, weights: Weights) -> int:
        """Copy `weights`, a module's `state_dict()`, and return the version that they now have.

        Raises ModuleError when names or shapes are not those of the acting module.
        """
        copied = self._copied(weights)  # without the lock: a forward pass may want it
        with self._lock:
            self._version += 1
            self._unused = self._version, copied
            return self._version

    def publish_as(self, version: int, weights: Weights) -> bool:
        """The same for weights that somebody else has counted; False: they are not newer, and are passed over."""
        if version <= self._version:
            return False
        copied = self._copied(weights)
        with self._lock:
            if version <= self._version:
                return False
            self._version, self._unused = version, (version, copied)
            return True

    def take(self) -> tuple[int, dict[str, Any]] | None:
        """The newest weights and their version, once; None when there is nothing new."""
        if self._unused is None:
            return None
        with self._lock:
            unused, self._unused = self._unused, None
        return unused

    def load_into(self, module: Any) -> int:
        """Have the acting module use the newest weights; the version that it then has."""
        if self._unused is not None:
            with self._loading:
                fresh = self.take()
                if fresh is not None:
                    module.load_state_dict(fresh[1])
                    self._loaded = fresh[0]
        return self._loaded

    def newest(self, module: Any) -> tuple[int, dict[str, Any]]:
        """The newest weights and their version, copied: those published last, or else what the acting module has."""
        with self._loading, self._lock:
            version, weights = self._unused or (self._loaded, module.state_dict())
            return version, copied_weights(weights)

    def _copied(self, weights: Weights) -> dict[str, Any]:
        self.check(weights)
        return copied_weights(weights)

    def check(self, weights: Weights) -> None:
        """Raise ModuleError when names or shapes are not those of the acting module."""
        check_shapes(shapes_of(weights), self._shapes, self._owner)


def copied_weights(weights: Weights) -> dict[str, Any]:
    """The same with every tensor copied."""
    copied = {name: value.detach().clone() for name, value in weights.items() if torch.is_tensor(value)}
    return {**weights, **copied}


def shapes_of(weights: Weights) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor in a `state_dict()`. Raises ModuleError where it is none."""
    if not isinstance(weights, Mapping):
        raise ModuleError(f"weights are {type(weights).__name__}, expected a state_dict(): name -> tensor")
    if weights and all(isinstance(value, np.ndarray) for value in weights.values()):
        raise ModuleError(f"weights {list(weights)[:4]} are numpy arrays, expected tensors, as a state_dict() has them")
    return {name: tuple(tensor.shape) for name, tensor in weights.items() if torch.is_tensor(tensor)}


def check_shapes(given: Shapes, expected: Shapes, owner: str) -> None:
    """Raise ModuleError where weights of these shapes are not those of a module, which is called `owner`."""
    if given == expected:
        return
    missing, unknown = sorted(expected.keys() - given.keys()), sorted(given.keys() - expected.keys())
    differ = [
        f"'{name}' is {list(shape)}, expected {list(expected[name])}"
        for name, shape in given.items()
        if name in expected and shape != expected[name]
    ]
    raise ModuleError(f"weights do not fit module '{owner}': missing {missing}, unknown {unknown}, shapes: {differ}")
