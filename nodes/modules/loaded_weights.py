"""Digests of the weights that an acting module has loaded: evidence of what it acts with."""

import threading
from typing import Any, NamedTuple

import torch

from rollflow.nodes.modules.weights_codec import digest_of, to_arrays

_AT_ONCE = 1 << 20  # bytes digested in the loading thread: it takes about as long as loading them
_Tensors = dict[str, torch.Tensor]


class Loaded(NamedTuple):
    """Weights that a forward node has loaded: their policy version, and the digest of the module's weights then."""

    version: int
    digest: bytes


class LoadedWeights:
    """Digests a module's weights whenever it has loaded new ones.

    Large weights are copied into a buffer that is used again, and digested in a thread. If that is slower than weights
    come, versions are passed over.

    newest    digest that was finished last; None: none is
    """

    def __init__(self) -> None:
        self.newest: Loaded | None = None
        self._lock = threading.Lock()
        self._waiting: tuple[int, _Tensors] | None = None
        self._spare: _Tensors | None = None
        self._is_busy = False

    def look_at(self, version: int, module: Any) -> None:
        """Digest what a module has just loaded; the module may change it afterwards."""
        state = {name: value.detach() for name, value in module.state_dict().items() if torch.is_tensor(value)}
        if sum(value.nbytes for value in state.values()) <= _AT_ONCE:
            self._digest(version, state)
            return
        copied = self._copied(state)
        with self._lock:
            self._waiting = version, copied
            if self._is_busy:
                return
            self._is_busy = True
        threading.Thread(target=self._run, name="rollflow loaded weights", daemon=True).start()

    def _copied(self, state: _Tensors) -> _Tensors:
        with self._lock:
            copied = self._spare if self._waiting is None else self._waiting[1]
            self._waiting = self._spare = None
        if copied is None:
            copied = {
                name: torch.empty_like(value, device="cpu", memory_format=torch.contiguous_format)
                for name, value in state.items()
            }
        for name, value in state.items():
            copied[name].copy_(value)
        return copied

    def _run(self) -> None:
        while True:
            with self._lock:
                waiting, self._waiting = self._waiting, None
                if waiting is None:
                    self._is_busy = False
                    return
            try:
                self._digest(*waiting)
            except BaseException:
                self._is_busy = False
                raise
            self._spare = waiting[1]

    def _digest(self, version: int, state: _Tensors) -> None:
        arrays = to_arrays(state, copies=False)
        self.newest = Loaded(version, digest_of(arrays.tensors, arrays.dtypes))
