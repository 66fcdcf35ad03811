"""Newest weights of a trainer, with versions and digests, on their way to its rollouts."""

import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Self

from rollflow.nodes.modules.policy_weights import Shapes, check_shapes, shapes_of
from rollflow.nodes.modules.weights_codec import digest_of, to_arrays
from rollflow.sinks.trainer.trainer_side.rollout_peer import RolloutPeer
from rollflow.stream.data.errors import ModuleError, RollflowError, WireError
from rollflow.stream.wire import Weights, WeightsPacker, encode

_MOST_DIGESTS = 1024
_AT_ONCE = 1 << 18  # bytes of weights that are digested in the publishing thread: another would take longer


class PublishedWeights:
    """Weights under a policy version; their arrays are never written to.

    message    as it is sent
    size       bytes of its frame, as `max_frame` counts them
    digest     32 bytes; None: it is not computed yet

    Raises ModuleError for weights that can't be sent.
    """

    def __init__(self, message: Weights, digest: bytes | None = None) -> None:
        self.message, self.digest = message, digest
        try:
            self.size = sum(map(len, encode(message))) - 4
        except RollflowError as error:
            raise ModuleError(f"weights can't be sent, expected tensors and plain data: {error}") from error

    @classmethod
    def of(cls, weights: Mapping[str, Any]) -> Self:
        """Copy a `state_dict()`, which has no version yet. Raises ModuleError for anything else."""
        shapes_of(weights)
        return cls(Weights(0, *to_arrays(weights)))

    @property
    def version(self) -> int:
        """Policy version."""
        return self.message.version

    def counts_for(self, source: RolloutPeer) -> bool:
        """True if a rollout takes them for newer than its own, or has these very weights."""
        is_same = self.digest is not None and (self.version, self.digest) == (source.version, source.digest)
        return is_same or self.version > source.version

    def check_fits(self, source: RolloutPeer, most: int, undelivered: int) -> None:
        """Raise ModuleError for weights that are not those of a rollout's module, or larger than it takes.

        most           bytes of a frame that the rollout takes
        undelivered    bytes that may wait to be sent
        """
        shapes = {name: array.shape for name, array in self.message.tensors.items()}
        check_shapes(shapes, source.weights, f"{source.module} of rollout {source.name}")
        if self.size > most:
            raise ModuleError(
                f"weights of {self.size} bytes, and rollout {source.name} takes at most {most}: give its sink, or "
                f"feed, limits=Limits(max_frame={self.size} or more)"
            )
        if self.size > undelivered:
            raise ModuleError(
                f"weights of {self.size} bytes, and at most {undelivered} may wait to be sent: give TrainerStream "
                f"limits=Limits(undelivered={self.size} or more)"
            )


class NewestWeights:
    """Weights that were published last. Any thread may use it, and none waits while large ones are digested and packed.

    ready        called, without the lock, when weights may be sent
    packer       packs large ones before they are; None: they are sent as they are
    own          shapes of the weights of the trainer's own module; compared with a rollout's if the names are the same

    version      policy version of the newest weights, or a newer one that a rollout came with
    published    newest weights; None: none have been published
    sendable     newest weights with a digest: `published`, or for a while after large ones those before
    digests      version -> digest of the newest published weights; b"" while there is none
    """

    def __init__(
        self, ready: Callable[[], None], own: Shapes | None = None, packer: WeightsPacker | None = None
    ) -> None:
        self.version = 0
        self.published: PublishedWeights | None = None
        self.sendable: PublishedWeights | None = None
        self.digests: dict[int, bytes] = {}
        self._ready, self._own, self._packer = ready, own or {}, packer
        self._changed = threading.Condition()
        self._resumed: tuple[int, bytes] | None = None
        self._is_closing = False
        self._thread: threading.Thread | None = None

    def publish(self, published: PublishedWeights) -> int:
        """Publish weights under the next version, or the version of those that the trainer goes on from; returns it."""
        message = published.message
        if published.size <= _AT_ONCE or self._resumed is not None:
            published.digest = digest_of(message.tensors, message.dtypes)
        with self._changed:
            is_same = self._resumed == (self.version, published.digest)
            self._resumed = None
            published.message = replace(message, version=self.version + (0 if is_same else 1))
            self._replace(published)
        self._ready()
        return published.version

    def meet(self, source: RolloutPeer, most: int, undelivered: int) -> None:
        """Raise the version above that of a rollout which comes, with weights of an earlier trainer.

        most, undelivered    as for `check_fits`

        Raises WireError where the rollout can't take the weights.
        """
        published = self.published
        try:
            if published is not None:
                published.check_fits(source, most, undelivered)
            else:
                self._check_is_like_own(source)
        except ModuleError as error:
            raise WireError(str(error), "weights") from error
        if published is not None and source.connection is None and not published.counts_for(source):
            with self._changed:
                self._replace(
                    PublishedWeights(replace(published.message, version=source.version + 1), published.digest)
                )
            self._ready()
        self.raise_to(source.version)

    def raise_to(self, version: int) -> None:
        """Raise the version to this one, unless it is higher already."""
        with self._changed:
            self.version = max(self.version, version)

    def resume(self, version: int, digest: bytes | None) -> None:
        """Go on from a version. The first weights that are published keep it if they have this digest."""
        with self._changed:
            self.version = max(self.version, version)
            self._resumed = None if digest is None else (version, digest)

    def identity(self) -> tuple[int, bytes | None]:
        """Version and digest of the newest weights; the digest is computed if need be, None where it is unknown."""
        while True:
            published = self.published
            if published is not None and published.digest is None:
                self._digest(published)
            with self._changed:
                if published is not self.published:
                    continue
                newest = self._resumed if published is None else (published.version, published.digest)
                return self.version, None if newest is None or newest[0] != self.version else newest[1]

    def close(self) -> None:
        """End the thread that digests."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()

    # Inside

    def _check_is_like_own(self, source: RolloutPeer) -> None:
        """Raise ModuleError if a rollout's weights have the names of the trainer's own, and other shapes."""
        if self._own.keys() != source.weights.keys():  # the trainer's may be a critic alone, or wrapped
            return
        try:
            check_shapes(self._own, source.weights, f"{source.module} of rollout {source.name}")
        except ModuleError as error:
            raise ModuleError(f"by the module= of the TrainerStream, {error}") from None

    def _replace(self, published: PublishedWeights) -> None:
        self.published, self.version = published, published.version
        self.digests[self.version] = published.digest or b""
        while len(self.digests) > _MOST_DIGESTS:
            del self.digests[next(iter(self.digests))]
        if published.digest is not None:
            self.sendable = published
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="rollflow weights", daemon=True)
            self._thread.start()
        self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_closing or self.published is not self.sendable)
                published = self.published
                if self._is_closing or published is None:
                    return
            self._digest(published)
            self._ready()

    def _digest(self, published: PublishedWeights) -> None:
        digest = digest_of(published.message.tensors, published.message.dtypes)
        if self._packer is not None:
            self._packer.prepare(published.message)
        with self._changed:
            published.digest = digest
            if published.version in self.digests:
                self.digests[published.version] = digest
            if self.sendable is None or self.sendable.version < published.version:
                self.sendable = published
