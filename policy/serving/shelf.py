"""The policies that a server has, by name, their sessions and batches, and those saved anew."""

import hashlib
import logging
import math
import os
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Hashable, Sequence
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple

import numpy as np

from rollflow.nodes.policies.artifact_files import MANIFEST
from rollflow.nodes.policies.policy import Policy, has_memory
from rollflow.policy.serving.request import (
    Acted,
    ActRequest,
    ClosedError,
    Outcome,
    OverloadedError,
    RequestError,
    ServingError,
    SessionLostError,
    UnknownPolicyError,
)
from rollflow.stream.data.errors import PolicyError
from rollflow.stream.data.system import require_packages
from rollflow.stream.data.tree import stack_trees, tree_at

try:
    from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
except ImportError:
    require_packages("serving", "serve", "prometheus_client", error=ImportError)
    raise

_Stamp = tuple[int, int, int]
_log = logging.getLogger(__name__)
_CLOSE_SECONDS = 30.0
_LABELS = ("policy", "version")
_BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
_METERS: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "actions": (Counter, "actions chosen", {}),
    "failed": (Counter, "requests whose forward pass failed", {}),
    "refused": (Counter, "requests refused since too many wait", {}),
    "waiting": (Gauge, "requests that wait for a batch", {}),
    "sessions": (Gauge, "sessions with a memory", {}),
    "batch_size": (Histogram, "requests in a forward pass", {"buckets": _BATCH_SIZES}),
    "batch_seconds": (Histogram, "time of a forward pass", {"buckets": _SECONDS}),
}


class Meters:
    """What the policies of a shelf have done, by policy and version, for Prometheus."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._all = {
            name: kind(f"rollflow_serve_{name}", text, labelnames=_LABELS, registry=self.registry, **options)
            for name, (kind, text, options) in _METERS.items()
        }

    def of(self, *labels: str) -> dict[str, Any]:
        """The meters of one version of a policy, by name."""
        return {name: meter.labels(*labels) for name, meter in self._all.items()}

    def remove(self, *labels: str) -> None:
        """Show the meters of a version no more."""
        for meter in self._all.values():
            meter.remove(*labels)


class SessionBook:
    """Keeps account of a policy's sessions. The thread that acts uses it; `leave`, `expire` and questions are for any.

        policy         whose sessions they are
        max_sessions   at most as many have a memory
        idle_after     seconds after which an idle session is forgotten

    A policy without memory, of a stateless module and pieces that look at one observation, has no sessions to lose:
    each of its requests stands by itself.
    """

    def __init__(self, policy: Any, max_sessions: int, idle_after: float) -> None:
        self._policy = policy
        self._max_sessions, self._idle_after = max_sessions, idle_after
        self._records: OrderedDict[Hashable, float] = (
            OrderedDict()
        )  # when each was used; the one idle for longest first
        self._leaving: list[Hashable] = []  # whose memory the policy still has
        self._lock = threading.Lock()
        self.has_memory = has_memory(policy.module, policy.env_to_module, policy.module_to_env)

    def __len__(self) -> int:
        """Sessions that have a memory to go on with."""
        return len(self._records) if self.has_memory else 0

    def leave(self, session: Hashable) -> bool:
        """Forget a session; False if it has no memory. The policy releases it before the next batch."""
        with self._lock:
            return self._drop(session)

    def leave_all_of(self, client: str) -> None:
        """Forget all sessions of a client that is gone."""
        with self._lock:
            for session in [each for each in self._records if getattr(each, "client", None) == client]:
                self._drop(session)

    def expire(self, now: float) -> None:
        """Forget the sessions that have been idle for too long at a time of `monotonic`."""
        idle_since = now - self._idle_after
        with self._lock:
            while self._records and next(iter(self._records.values())) < idle_since:
                self._drop(next(iter(self._records)))

    def refusal_of(self, request: ActRequest) -> ServingError | None:
        """Why a request can't be acted on; None: it can be."""
        if request.session is None or request.begins:
            return None
        if request.session not in self._records:
            if not self.has_memory:
                return None
            return SessionLostError(
                f"session {request.session!r} has no memory here: it never began, it was forgotten, or a new version "
                "of the policy acts; expected 'begins': true with its next observation, as after reset() of a "
                "PolicyClient"
            )
        if self._policy.needs_rewards and math.isnan(request.reward):
            return RequestError(
                f"reward is missing, but '{self._policy.needs_rewards}' looks back to rewards; expected that of the "
                f"action before, of session {request.session!r}"
            )
        return None

    def enter(self, batch: Sequence[ActRequest]) -> list[Hashable]:
        """The policy's own sessions for the requests of a batch, reset if an episode begins."""
        now = monotonic()
        with self._lock:
            for request in batch:
                if request.session is not None:
                    self._records[request.session] = now
                    self._records.move_to_end(request.session)
            while len(self._records) > max(self._max_sessions, len(batch)):
                self._drop(next(iter(self._records)))
            leaving, self._leaving = self._leaving, []
        for session in leaving:
            self._policy.forget(session)
        names = [(row,) if request.session is None else request.session for row, request in enumerate(batch)]
        for name, request in zip(names, batch, strict=True):
            if request.begins or request.session is None:
                self._policy.reset(name)
        return names

    def lose(self, batch: Sequence[ActRequest]) -> None:
        """Give up the sessions of a batch that failed: what they remembered is gone."""
        with self._lock:
            for request in batch:
                self._drop(request.session)

    def _drop(self, session: Hashable) -> bool:
        if self._records.pop(session, None) is None:
            return False
        self._leaving.append(session)
        return True


class BatchOptions(NamedTuple):
    """How requests are put together, and how much may wait.

    max_batch       requests in one forward pass, at most
    max_wait        seconds that the first of them waits for others; 0.0: it waits for none
    max_waiting     requests that may wait for each policy; more are refused with OverloadedError
    max_sessions    sessions with a memory, for each policy; a new one takes the place of the one idle for longest
    idle_after      seconds after which an idle session is forgotten
    """

    max_batch: int = 64
    max_wait: float = 0.0
    max_waiting: int = 1024
    max_sessions: int = 65_536
    idle_after: float = 3600.0


class Batcher:
    """Acts for one version of a policy on requests from any thread.

        policy     has `act_batch(observations, rewards, sessions)`, `reset`, `forget` and `publish`
        name       by which clients ask for the policy
        version    name of the artifact's version, for answers
        options    of the batches
        meters     of the shelf

    Two requests of one session never stand in one batch: the later one waits, so that a session's requests are acted on
    in their order.
    """

    def __init__(self, policy: Any, name: str, version: str, options: BatchOptions, meters: Meters) -> None:
        self.policy, self.version = policy, version
        self._options = options
        self.book = SessionBook(policy, options.max_sessions, options.idle_after)
        self._waiting: deque[ActRequest] = deque()
        self._changed = threading.Condition()
        self._acting = threading.Lock()
        self._is_closing = False
        self._weights = 0
        self._meters = meters.of(name, version)
        self._meters["waiting"].set_function(lambda: len(self._waiting))
        self._meters["sessions"].set_function(lambda: len(self.book))
        self._thread = threading.Thread(target=self._run, name=f"rollflow batches of {version}", daemon=True)
        self._thread.start()

    def submit(self, request: ActRequest) -> None:
        """Have a request answered, through its front.

        Raises OverloadedError while too many requests wait, and ClosedError once `close` was called.
        """
        with self._changed:
            if self._is_closing:
                raise ClosedError(f"version '{self.version}' is being closed; ask again")
            if len(self._waiting) >= self._options.max_waiting:
                self._meters["refused"].inc()
                raise OverloadedError(f"{self._options.max_waiting} requests wait already; ask again later")
            self._waiting.append(request)
            if len(self._waiting) == 1 or len(self._waiting) >= self._options.max_batch:
                self._changed.notify()

    def publish(self, weights: Any, version: int | None = None) -> int:
        """Have the next batch use these weights, a `state_dict()`; the policy version that answers have for them.

            version    None: the next one of the policy's own

        Raises ModuleError for weights that are not the module's.
        """
        with self._acting:  # an answer has the version of the weights that it was chosen with
            own = int(self.policy.publish(weights))
            self._weights = own if version is None else version
            return self._weights

    def close(self) -> None:
        """Answer what waits, and end the thread."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        self._thread.join(_CLOSE_SECONDS)

    # In the thread

    def _run(self) -> None:
        while batch := self._gather():
            try:
                self._answer(batch)
            except Exception:
                _log.exception("a front could not take its answers")

    def _gather(self) -> list[ActRequest]:
        """The requests of the next batch, each of another session; empty: there are no more."""
        with self._changed:
            while not self._waiting and not self._is_closing:
                self._changed.wait()
            if self._options.max_wait and not self._is_closing:
                deadline = monotonic() + self._options.max_wait
                while len(self._waiting) < self._options.max_batch and not self._is_closing:
                    if (left := deadline - monotonic()) <= 0 or not self._changed.wait(left):
                        break
            batch: dict[Any, ActRequest] = {}
            later: list[ActRequest] = []
            while self._waiting and len(batch) < self._options.max_batch:
                request = self._waiting.popleft()
                key = object() if request.session is None else request.session
                if key in batch:
                    later.append(request)
                else:
                    batch[key] = request
            self._waiting.extendleft(reversed(later))
        return list(batch.values())

    def _answer(self, batch: list[ActRequest]) -> None:
        begun = monotonic()
        outcomes: list[Outcome] = [self.book.refusal_of(request) for request in batch]  # type: ignore[misc]
        fresh = [place for place, outcome in enumerate(outcomes) if outcome is None]
        for place, outcome in zip(fresh, self._act([batch[place] for place in fresh]), strict=True):
            outcomes[place] = outcome
        answers: dict[Callable[..., None], list[tuple[Any, Outcome]]] = {}
        for request, outcome in zip(batch, outcomes, strict=True):
            answers.setdefault(request.deliver, []).append((request.ticket, outcome))
        self._meters["actions"].inc(len(fresh))
        self._meters["batch_size"].observe(len(fresh))
        self._meters["batch_seconds"].observe(monotonic() - begun)
        for deliver, answered in answers.items():
            deliver(answered)

    def _act(self, batch: list[ActRequest]) -> list[Outcome]:
        if not batch:
            return []
        sessions = self.book.enter(batch)
        rewards = np.array([request.reward for request in batch], np.float32)
        try:
            with self._acting:
                weights = self._weights
                actions = self.policy.act_batch(
                    stack_trees([request.observation for request in batch]),
                    None if np.isnan(rewards).all() else rewards,
                    sessions,
                )
        except Exception as error:
            _log.exception("a batch of %d failed; its sessions are lost", len(batch))
            self._meters["failed"].inc(len(batch))
            self.book.lose(batch)
            return [error] * len(batch)
        return [Acted(tree_at(actions, row), self.version, weights) for row in range(len(batch))]


class Shelf:
    """Serves policies by name, one version of each.

    options    of every policy's batches

    meters     what its policies have done, for Prometheus

    All methods may be called from any thread.
    """

    def __init__(self, options: BatchOptions | None = None) -> None:
        self._options, self.meters = options or BatchOptions(), Meters()
        for name, least in (("max_batch", 1), ("max_wait", 0), ("max_waiting", 1), ("max_sessions", 1)):
            if not (value := getattr(self._options, name)) >= least:
                raise ValueError(f"{name} is {value}, expected at least {least}")
        self._lock = threading.Lock()
        self._batchers: dict[str, Batcher] = {}  # by name
        self._is_closed = False

    @property
    def names(self) -> list[str]:
        """Names of the policies that are served."""
        return list(self._batchers)

    def batcher(self, name: str) -> Batcher:
        """Batches of the policy of a name. Raises UnknownPolicyError."""
        found = self._batchers.get(name)
        if found is None:
            raise UnknownPolicyError(f"no policy '{name}' is served; served: {', '.join(self._batchers) or 'none'}")
        return found

    def put(self, name: str, policy: Any, version: str) -> None:
        """Serve a policy, in place of the one that has this name.

        That one answers what waits for it. Sessions with a memory begin anew with the new one: until then their
        requests raise SessionLostError.
        """
        with self._lock:
            if self._is_closed:
                raise ClosedError("the server is closed")
            before = self._batchers.get(name)
            if before is not None and before.version == version:
                raise ValueError(f"version '{version}' of policy '{name}' is served already")
            self._batchers[name] = Batcher(policy, name, version, self._options, self.meters)
        if before is not None:
            self.meters.remove(name, before.version)
            before.close()
        _log.info("policy '%s': version %s acts", name, version)

    def submit(self, name: str, request: ActRequest) -> None:
        """Have a request answered. Raises UnknownPolicyError, OverloadedError or ClosedError."""
        with self._lock:  # so that the policy is not replaced just then
            self.batcher(name).submit(request)

    def forget(self, name: str, session: Hashable) -> bool:
        """Release a session's memory; False if none is there. Raises UnknownPolicyError."""
        return self.batcher(name).book.leave(session)

    def forget_client(self, client: str) -> None:
        """Release the memory of every session of a client that is gone."""
        for batcher in list(self._batchers.values()):
            batcher.book.leave_all_of(client)

    def tidy(self, now: float | None = None) -> None:
        """Forget idle sessions; to be called now and then.

        now    time of `monotonic`; None: the present one
        """
        for batcher in list(self._batchers.values()):
            batcher.book.expire(monotonic() if now is None else now)

    def close(self) -> None:
        """Answer what waits, and take nothing more."""
        with self._lock:
            self._is_closed = True
        for batcher in self._batchers.values():
            batcher.close()


class WatchedPolicy:
    """A saved policy that is served, and served anew once something else was saved under its path.

        shelf     serves it
        name      by which clients ask for it
        path      of the artifact, a folder
        allow, device    as `Policy.load` takes them

    A path that can't be loaded is logged, and what was served before goes on.
    """

    def __init__(
        self, shelf: Shelf, name: str, path: str | os.PathLike[str], *, allow: Collection[str] = (), device: Any = None
    ) -> None:
        self._shelf, self._name, self._path = shelf, name, Path(path)
        if not self._path.exists():
            raise PolicyError(f"there is no policy at {self._path}, expected its folder")
        self._options: dict[str, Any] = {"allow": allow, "device": device}
        self._seen = self._stamp()
        self._put()

    def look(self) -> bool:
        """Serve what is under the path now, if it is not what was seen last. True: a new version is served."""
        stamp = self._stamp()
        if stamp is None or stamp == self._seen:
            return False
        self._seen = stamp
        try:
            self._put()
        except Exception as error:
            _log.warning("%s can't be served, what was there before goes on: %s", self._path, error)
            return False
        return True

    def _put(self) -> None:
        version = version_of(self._path)
        if self._name not in self._shelf.names or version != self._shelf.batcher(self._name).version:
            self._shelf.put(self._name, Policy.load(self._path, **self._options), version)

    def _stamp(self) -> _Stamp | None:
        try:
            found = (self._path / MANIFEST).stat()
        except OSError:
            return None  # it is being replaced
        return found.st_ino, found.st_mtime_ns, found.st_size


class Watcher:
    """Calls the `look` of watched policies, and whatever else changes, from a thread, until it is closed.

    seconds    between two calls
    """

    def __init__(self, looks: Collection[Callable[[], object]], seconds: float = 1.0) -> None:
        self._looks, self._seconds = list(looks), seconds
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rollflow watches policies", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread, once it has loaded what it is loading."""
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closed.wait(self._seconds):
            for look in self._looks:
                look()


def version_of(path: Path) -> str:
    """The version of an artifact: twelve digits of the digest of its manifest, which has the checksums of the rest."""
    return hashlib.sha256((path / MANIFEST).read_bytes()).hexdigest()[:12]
