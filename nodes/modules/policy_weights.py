"""Newest published weights of an acting module with the number of their version, and weights as named arrays."""

import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from rollflow.stream.data.errors import ModuleError, RunError, shown
from rollflow.stream.data.packing import pack, unpack

Weights = Mapping[str, torch.Tensor]
Shapes = Mapping[str, tuple[int, ...]]


class ActingWeights(NamedTuple):
    """The weights that a module acts with."""

    version: int  # the policy version
    weights: dict[str, Any]  # a `state_dict()`, copied


class PolicyWeights:
    """One-slot mailbox for weights: publishing replaces weights that were not taken yet, and never waits.

        module     the weights are for

    loads    told of the version and the weights that a module loads; None: nobody is

    May be used from any thread.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._shapes = shapes_of(module.state_dict())
        self._owner = type(module).__name__
        self._lock = threading.Lock()
        self._loading = threading.Lock()  # held while weights are loaded, so that no reader gets half of them
        self._version = self._loaded = self.first_version = 0
        self._unused: tuple[int, dict[str, Any]] | None = None
        self._waiting: deque[tuple[int, dict[str, Any]]] | None = None  # until `let_in`; None: the newest is taken
        self._marked = 0  # version that is not replaced while it waits
        self._keeps_each = False
        self.loads: Callable[[int, Weights], None] | None = None

    def keep_all(self, *, each: bool = False) -> None:
        """Have marked weights wait for `let_in`, instead of being taken as they come. Before any is published.

        each    have all weights wait, marked or not
        """
        self._waiting, self._keeps_each = deque(), each

    def mark_newest(self) -> int:
        """Keep the weights published last until they are let in; others go when newer ones come. Their version."""
        with self._lock:
            self._marked = self._version
            return self._version

    def let_in(self, version: int) -> tuple[int, dict[str, Any]] | None:
        """Have the next pass take the newest weights up to this version, which it gives, and forget those before."""
        with self._lock:
            while self._waiting and self._waiting[0][0] <= version:
                self._unused = self._waiting.popleft()
            return self._unused

    def get_state(self, module: Any) -> dict[str, Any]:
        """The weights of an acting module that wait, and its own, with their versions: none is copied."""
        with self._loading, self._lock:
            loaded = self._unused or (self._loaded, module.state_dict())
            return {"version": self._version, "loaded": list(loaded), "waiting": [*map(list, self._waiting or ())]}

    def set_state(self, module: Any, state: Mapping[str, Any]) -> None:
        """Go on from what `get_state` gave. Before any is published."""
        version, weights = state["loaded"]
        module.load_state_dict(weights)
        self.go_on_from(version)
        if state["waiting"] and self._waiting is None:  # they are taken as they come
            self._unused = tuple(state["waiting"][-1])
        elif self._waiting is not None:
            self._waiting += map(tuple, state["waiting"])
        self._version = self._marked = state["version"]

    @property
    def version(self) -> int:
        """Policy version that was published last."""
        return self._version

    def publish(self, weights: Weights) -> int:
        """Copy `weights`, a module's `state_dict()`, and return their new version.

        Raises ModuleError when names or shapes are not those of the acting module.
        """
        self.check(weights)
        copied = copied_weights(weights)  # without the lock: a forward pass may want it
        with self._lock:
            self._version += 1
            self._put(copied)
            return self._version

    def _put(self, weights: dict[str, Any]) -> None:
        if self._waiting is None:
            self._unused = self._version, weights
        else:
            if self._waiting and not self._keeps_each and self._waiting[-1][0] > self._marked:
                self._waiting.pop()
            self._waiting.append((self._version, weights))

    def publish_as(self, version: int, weights: Weights, *, copies: bool = True) -> bool:
        """Copy `weights` under a version that a trainer gave them; False: they are not newer, and are passed over.

        copies    False: nobody writes to them, and they are taken as they are

        Raises ModuleError as `publish` does.
        """
        if version <= self._version:
            return False
        self.check(weights)
        copied = copied_weights(weights) if copies else dict(weights)
        with self._lock:
            if version <= self._version:
                return False
            self._version = version
            self._put(copied)
            return True

    def go_on_from(self, version: int) -> None:
        """Give the weights that the module begins with the version of an earlier run.

        Raises RunError once others have been published.
        """
        with self._lock:
            if self._version != self.first_version:
                raise RunError("weights have been published, expected load_state_dict of the run before publish")
            self._version = self._loaded = self.first_version = version

    def load_into(self, module: Any) -> int:
        """Load the newest weights into the acting module; returns the version that it then has."""
        if self._unused is not None:
            with self._loading:
                with self._lock:
                    fresh, self._unused = self._unused, None
                if fresh is not None:  # which another thread may have taken
                    self._load(module, fresh)
        return self._loaded

    def _load(self, module: Any, fresh: tuple[int, dict[str, Any]]) -> None:
        try:
            module.load_state_dict(fresh[1])
        except BaseException:  # the module may have some of them: the next pass loads all again
            with self._lock:
                self._unused = self._unused or fresh
            raise
        self._loaded = fresh[0]
        if self.loads is not None:
            self.loads(*fresh)

    def newest(self, module: Any) -> tuple[int, dict[str, Any]]:
        """Newest version and a copy of its weights: those published last, or else what the acting module has."""
        with self._loading, self._lock:
            waiting = self._waiting[-1] if self._waiting else None
            version, weights = waiting or self._unused or (self._loaded, module.state_dict())
            return version, copied_weights(weights)

    def check(self, weights: Weights) -> None:
        """Raise ModuleError when names or shapes are not those of the acting module."""
        check_shapes(shapes_of(weights), self._shapes, self._owner)


def copied_weights(weights: Weights) -> dict[str, Any]:
    """A `state_dict()` with every tensor copied."""
    copied = {name: value.detach().clone() for name, value in weights.items() if torch.is_tensor(value)}
    return {**weights, **copied}


def shapes_of(weights: Weights) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor in a `state_dict()`. Raises ModuleError for anything else."""
    if not isinstance(weights, Mapping):
        raise ModuleError(f"weights are {type(weights).__name__}, expected a state_dict(): name -> tensor")
    if weights and all(isinstance(value, np.ndarray) for value in weights.values()):
        raise ModuleError(f"weights {list(weights)[:4]} are numpy arrays, expected tensors, as a state_dict() has them")
    if weights and not any(torch.is_tensor(value) for value in weights.values()):
        name, value = next(iter(weights.items()))
        raise ModuleError(f"weights: {name!r} is {shown(value)}, expected tensors, as a state_dict() has them")
    return {name: tuple(tensor.shape) for name, tensor in weights.items() if torch.is_tensor(tensor)}


def check_shapes(shapes: Shapes, expected: Shapes, owner: str) -> None:
    """Raise ModuleError unless names and shapes are those that the module called `owner` expects."""
    if shapes == expected:
        return
    missing, unknown = sorted(expected.keys() - shapes.keys()), sorted(shapes.keys() - expected.keys())
    differ = [
        f"'{name}' is {list(shape)}, expected {list(expected[name])}"
        for name, shape in shapes.items()
        if name in expected and shape != expected[name]
    ]
    raise ModuleError(
        f"weights do not fit module '{owner}': missing {missing}, unknown {unknown}, shapes: {differ}"
    ).see("weights")


class Arrays(NamedTuple):
    """A `state_dict()` without torch.

    tensors    name -> any[...]
    dtypes     name -> torch's name of a dtype that numpy lacks: the array has the tensor's bits
    others     name -> entry that is no tensor
    """

    tensors: dict[str, NDArray[Any]]
    dtypes: dict[str, str]
    others: dict[str, Any]


def to_arrays(weights: Mapping[str, Any], *, copies: bool = True) -> Arrays:
    """A `state_dict()` as contiguous arrays.

    copies    False: arrays share the memory of tensors that are contiguous and on the CPU
    """
    arrays = Arrays({}, {}, {})
    for name, value in weights.items():
        if not torch.is_tensor(value):
            arrays.others[name] = value
            continue
        on_cpu = value.detach().cpu()
        tensor = on_cpu.clone(memory_format=torch.contiguous_format) if copies else on_cpu.contiguous()
        try:
            arrays.tensors[name] = tensor.numpy()
        except TypeError:
            arrays.dtypes[name] = str(value.dtype).removeprefix("torch.")
            bits = torch.uint8 if value.element_size() == 1 else torch.int16
            arrays.tensors[name] = tensor.view(bits).numpy().view(f"<u{value.element_size()}")
    return arrays


def from_arrays(arrays: Any) -> dict[str, Any]:
    """The `state_dict()` of `Arrays`, or of a message that has them: tensors on the CPU, over the arrays' memory.

    Raises ModuleError for a bad dtype.
    """
    weights: dict[str, Any] = dict(arrays.others)
    for name, array in arrays.tensors.items():
        dtype_name = arrays.dtypes.get(name)
        if dtype_name is None:
            weights[name] = torch.from_numpy(array)
            continue
        dtype = getattr(torch, dtype_name, None)
        if not isinstance(dtype, torch.dtype) or dtype.itemsize != array.itemsize:
            raise ModuleError(
                f"weights '{name}': dtype {dtype_name!r} of {array.itemsize} bytes, expected one of torch's"
            )
        bits = torch.from_numpy(array.view(np.uint8 if array.itemsize == 1 else np.int16))
        weights[name] = bits.view(dtype)
    return weights


def pack_weights(version: int, weights: Mapping[str, Any], module_id: Any = None) -> bytes:
    """Bytes of a `state_dict()`, its policy version, and the id of its module if there are several.

    Raises ColumnError for an entry that is no tensor and has no packed form.
    """
    return pack({"module_id": module_id, "version": version, **to_arrays(weights, copies=False)._asdict()}, "weights")


def unpack_weights(data: bytes) -> tuple[int, dict[str, Any], Any]:
    """Policy version, `state_dict()` and module id from `pack_weights`: new tensors, on the CPU."""
    fields = unpack(data)
    tensors = {name: np.array(array) for name, array in fields["tensors"].items()}
    weights = from_arrays(Arrays(tensors, fields["dtypes"], fields["others"]))
    return fields["version"], weights, fields["module_id"]
