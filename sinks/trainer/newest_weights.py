"""Newest weights of a trainer, with their versions, on their way to its rollouts."""

import secrets
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from rollflow.nodes.modules.policy_weights import check_shapes, shapes_of, to_arrays
from rollflow.sinks.trainer.rollout_peer import RolloutPeer
from rollflow.stream.data.errors import ModuleError, RollflowError, WireError
from rollflow.stream.wire import Weights, encode
from rollflow.stream.wire.codec.messages import ID_BYTES

Identity = tuple[int, bytes]  # version and id of weights: those that share both are the same


def copied_weights(weights: Mapping[str, Any]) -> Weights:
    """Copy a `state_dict()`, which has no version yet. Raises ModuleError for anything else."""
    shapes_of(weights)
    return Weights(0, *to_arrays(weights), id=_new_id())


def frame_size(weights: Weights) -> int:
    """Bytes of a frame with weights, as `max_frame` counts them. Raises ModuleError for weights that can't be sent."""
    try:
        return sum(map(len, encode(weights))) - 4
    except RollflowError as error:
        raise ModuleError(f"weights can't be sent, expected tensors and plain data: {error}") from error


def check_fits(weights: Weights, size: int, source: RolloutPeer, most: int, undelivered: int) -> None:
    """Raise ModuleError for weights that are not those of a rollout's module, or larger than it takes.

    size           `frame_size`
    most           bytes of a frame that the rollout takes
    undelivered    bytes that may wait to be sent
    """
    shapes = {name: array.shape for name, array in weights.tensors.items()}
    check_shapes(shapes, source.rollout.weights, f"{source.rollout.module} of rollout {source.name}")
    if size > most:
        raise ModuleError(
            f"weights of {size} bytes, and rollout {source.name} takes at most {most}: give its sink, or feed, "
            f"limits=Limits(max_frame={size} or more)"
        )
    if size > undelivered:
        raise ModuleError(
            f"weights of {size} bytes, and at most {undelivered} may wait to be sent: give TrainerStream "
            f"limits=Limits(undelivered={size} or more)"
        )


class NewestWeights:
    """Weights that were published last. Any thread may use it.

    ready        called, without the lock, when weights may be sent

    version      policy version of the newest weights, or a newer one that a rollout came with
    published    newest weights, whose arrays are never written to; None: none have been published

    A trainer that goes on from a state publishes the weights that were saved with it, and a rollout may have got the
    same ones of the trainer before. An id says so: the state has the version and the id that these weights had, or got
    when they were published next.
    """

    def __init__(self, ready: Callable[[], None]) -> None:
        self.version = 0
        self.published: Weights | None = None
        self._size = 0  # of the newest weights' frame
        self._ready = ready
        self._lock = threading.Lock()
        self._next: Identity | None = None  # of what is published next, unless a batch is handed over before
        self._is_current = False  # no batch has been handed over since the newest weights were published

    def publish(self, weights: Weights, size: int) -> int:
        """Publish weights under the next version, or the version of those that the trainer goes on from; returns it.

        size    `frame_size`
        """
        with self._lock:
            version, weights_id = self.version + 1, weights.id
            if self._next is not None and self._next[0] >= self.version:
                version, weights_id = self._next
            self._next, self._is_current = None, True
            self.published, self.version = replace(weights, version=version, id=weights_id), version
            self._size = size
        self._ready()
        return version

    def note_batch(self) -> None:
        """Note that a batch is handed over: what is published from now on is not what was saved before."""
        with self._lock:
            self._next, self._is_current = None, False

    def saved(self) -> Identity:
        """Version and id of weights that are saved now: of those published last, or of those published next."""
        with self._lock:
            if self._is_current and self.published is not None:
                return self.published.version, self.published.id
            if self._next is None:
                self._next = self.version + 1, _new_id()
            return self._next

    def meet(self, source: RolloutPeer, most: int, undelivered: int) -> None:
        """Raise the version above that of a rollout which comes, with weights of an earlier trainer.

        most, undelivered    as for `check_fits`

        Raises WireError if the rollout can't take the weights.
        """
        with self._lock:
            published, size = self.published, self._size
        rollout = source.rollout
        try:
            if published is not None:
                check_fits(published, size, source, most, undelivered)
        except ModuleError as error:
            raise WireError(str(error), "weights") from error
        # It would take them for no newer than its own, unless it has these very weights.
        is_raised = (
            published is not None
            and source.connection is None
            and published.version <= rollout.version
            and (published.version, published.id) != (rollout.version, rollout.weights_id)
        )
        with self._lock:
            if published is not None and is_raised:
                self.version = rollout.version + 1
                self.published = replace(published, version=self.version)
            if self._next is not None and rollout.version >= self._next[0]:
                is_same = self._next == (rollout.version, rollout.weights_id)
                self._next = self._next if is_same else None
        if is_raised:
            self._ready()
        self.raise_to(rollout.version)

    def raise_to(self, version: int) -> None:
        """Raise the version to this one, unless it is higher already."""
        with self._lock:
            self.version = max(self.version, version)

    def resume(self, version: int, saved: Identity) -> None:
        """Go on from a state: from its version, and from the identity of the weights that were saved with it."""
        self.raise_to(version)
        self._next = saved


def checked_id(text: str) -> bytes:
    """The id of weights in a state. Raises ValueError or TypeError for anything else."""
    weights_id = bytes.fromhex(text)
    if len(weights_id) != ID_BYTES:
        raise ValueError(f"weights {text}")
    return weights_id


def _new_id() -> bytes:
    return secrets.token_bytes(ID_BYTES)
