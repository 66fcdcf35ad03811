"""The newest weights of a trainer, on their way to its rollouts."""

import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Self

from rollflow.nodes.policy_weights import Shapes, check_shapes, shapes_of
from rollflow.nodes.weights_codec import to_arrays
from rollflow.nodes.weights_digest import digest_of
from rollflow.sinks.trainer.source import Source
from rollflow.stream.errors import ModuleError, RollflowError, WireError
from rollflow.stream.wire import Weights, encode

_MOST_DIGESTS = 1024
_AT_ONCE = 1 << 18  # bytes of weights that are digested where they are published: a thread would take longer


class Published:
    """Weights under a policy version, whose arrays stay as they are.

    message    as it is sent
    size       bytes of its frame, as `max_frame` counts them
    digest     None: it is not known yet

    Raises ModuleError for what can't be sent.
    """

    def __init__(self, message: Weights, digest: bytes | None = None) -> None:
        self.message, self.digest = message, digest
        try:
            self.size = sum(map(len, encode(message))) - 4
        except RollflowError as error:
            raise ModuleError(f"weights can't be sent, expected tensors and plain data: {error}") from error

    @classmethod
    def of(cls, weights: Mapping[str, Any]) -> Self:
        """A copy of a `state_dict()`, which has no version yet."""
        shapes_of(weights)  # refuses what is no state_dict
        return cls(Weights(0, *to_arrays(weights)))

    @property
    def version(self) -> int:
        """The policy version."""
        return self.message.version

    def counts_for(self, source: Source) -> bool:
        """Whether a rollout takes them for newer than its own, or has these very ones."""
        has_these = self.digest is not None and (self.version, self.digest) == (source.version, source.digest)
        return has_these or self.version > source.version

    def check_fits(self, source: Source, most: int, undelivered: int) -> None:
        """Raise ModuleError where they are not those of a rollout's module, or more than it takes.

        most           bytes of a frame that it takes
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
    """What has been published last. May be used from any thread, none of which waits for a digest of large weights.

    ready        called when weights may be sent, without this one's lock
    own          shapes of the weights of the trainer's own module, whose names say whether it is a rollout's as well

    version      their policy version, or a newer one that a rollout came with
    published    None: none have been
    sendable     the newest whose digest is known: the same, but for a while after large ones were published
    digests      of what was published, by version, the newest alone; b"" where nobody was sent it
    """

    def __init__(self, ready: Callable[[], None], own: Shapes | None = None) -> None:
        self.version = 0
        self.published: Published | None = None
        self.sendable: Published | None = None
        self.digests: dict[int, bytes] = {}
        self._ready, self._own = ready, own or {}
        self._changed = threading.Condition()
        self._resumed: tuple[int, bytes] | None = None
        self._is_closing = False
        self._thread: threading.Thread | None = None

    def publish(self, published: Published) -> int:
        """Have weights under the next version, or as those that the trainer goes on from: the version."""
        message = published.message
        if published.size <= _AT_ONCE or self._resumed is not None:
            published.digest = digest_of(message.tensors, message.dtypes)
        with self._changed:
            is_same = self._resumed == (self.version, published.digest)
            self._resumed = None
            published.message = replace(message, version=self.version + (0 if is_same else 1))
            self._have(published)
        self._ready()
        return published.version

    def meet(self, source: Source, most: int, undelivered: int) -> None:
        """Be newer than what a rollout has that comes: of another trainer, before this one.

        most, undelivered    as for `check_fits`

        Raises WireError where it can't take the weights.
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
                self._have(Published(replace(published.message, version=source.version + 1), published.digest))
            self._ready()
        self.raise_to(source.version)

    def raise_to(self, version: int) -> None:
        """There is a version as new as this."""
        with self._changed:
            self.version = max(self.version, version)

    def resume(self, version: int, digest: bytes | None) -> None:
        """Go on from a version. If the first weights that are published have its digest, they are these."""
        with self._changed:
            self.version = max(self.version, version)
            self._resumed = None if digest is None else (version, digest)

    def told(self) -> tuple[int, bytes | None]:
        """The version, and the digest of its weights, which is waited for; None where nobody knows it."""
        while True:
            published = self.published
            if published is not None and published.digest is None:
                self._digest(published)
            with self._changed:
                if published is not self.published:
                    continue
                known = self._resumed if published is None else (published.version, published.digest)
                return self.version, None if known is None or known[0] != self.version else known[1]

    def close(self) -> None:
        """Digest no more."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()

    # Inside

    def _check_is_like_own(self, source: Source) -> None:
        """Raise ModuleError where a rollout's weights have the names of those here, and other shapes."""
        if self._own.keys() != source.weights.keys():  # it may be a critic alone, or one that is wrapped
            return
        try:
            check_shapes(self._own, source.weights, f"{source.module} of rollout {source.name}")
        except ModuleError as error:
            raise ModuleError(f"by the module= of the TrainerStream, {error}") from None

    def _have(self, published: Published) -> None:
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

    def _digest(self, published: Published) -> None:
        digest = digest_of(published.message.tensors, published.message.dtypes)
        with self._changed:
            published.digest = digest
            if published.version in self.digests:
                self.digests[published.version] = digest
            if self.sendable is None or self.sendable.version < published.version:
                self.sendable = published
