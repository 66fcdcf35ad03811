"""Dynamic batches: requests that wait together are acted on in one forward pass, in a thread of the batcher's own.

With them are a policy's sessions, and the counts of what it did.
"""

import logging
import math
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Sequence
from time import monotonic
from typing import Any, NamedTuple

import numpy as np

try:
    from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
except ModuleNotFoundError as error:
    raise ImportError("serving takes the package prometheus_client: pip install rollflow[serve]") from error

from rollflow.nodes.policies.policy import has_memory
from rollflow.policy.serving.request import (
    Acted,
    ActRequest,
    ClosedError,
    Outcome,
    OverloadedError,
    RequestError,
    SessionLostError,
)
from rollflow.stream.data.tree import stack_trees, tree_at

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
        self._in_use: dict[tuple[str, ...], dict[str, Any]] = {}
        self._all = {
            name: kind(f"rollflow_serve_{name}", text, labelnames=_LABELS, registry=self.registry, **options)
            for name, (kind, text, options) in _METERS.items()
        }

    def of(self, *labels: str) -> dict[str, Any]:
        """The meters of one version of a policy, by name."""
        self._in_use[labels] = {name: meter.labels(*labels) for name, meter in self._all.items()}
        return self._in_use[labels]

    def remove(self, meters: dict[str, Any], *labels: str) -> None:
        """Remove the meters of a version that is over, unless it has been put back meanwhile."""
        if self._in_use.get(labels) is meters:
            del self._in_use[labels]
            for meter in self._all.values():
                meter.remove(*labels)


class _Record:
    """A session's last request: when it was, its number, and its answer."""

    __slots__ = ("answer", "number", "used")

    def __init__(self) -> None:
        self.used = monotonic()
        self.number: int | None = None
        self.answer: Acted | None = None


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
        self._records: OrderedDict[Hashable, _Record] = OrderedDict()  # the one idle for longest first
        self._leaving: list[Hashable] = []  # whose memory the policy still has
        self._lock = threading.Lock()
        self.has_memory = has_memory(policy.module, policy.env_to_module, policy.module_to_env)

    def __len__(self) -> int:
        return len(self._records)

    def __contains__(self, session: Hashable) -> bool:
        return session in self._records

    def leave(self, session: Hashable) -> bool:
        """Forget a session; False where it has no memory. The policy releases it before the next batch."""
        with self._lock:
            return self._drop(session)

    def leave_all_of(self, client: str) -> None:
        """Forget all sessions of a client that is gone."""
        with self._lock:
            for session in [each for each in self._records if getattr(each, "client", None) == client]:
                self._drop(session)

    def expire(self) -> None:
        """Forget the sessions that have been idle for too long."""
        idle_since = monotonic() - self._idle_after
        with self._lock:
            while self._records and next(iter(self._records.values())).used < idle_since:
                self._drop(next(iter(self._records)))

    def answer_before(self, request: ActRequest) -> Outcome | None:
        """The answer to a request that was answered before, or can't be; None: it needs a pass."""
        record = None if request.session is None else self._records.get(request.session)
        if record is None:
            goes_on = not request.begins and request.session is not None
            return session_lost(request.session) if goes_on and self.has_memory else None
        if request.number is not None and record.number is not None:
            if request.number == record.number and record.answer is not None:
                return record.answer
            if request.number != record.number + 1 and not request.begins:
                return RequestError(
                    f"number is {request.number}, expected {record.number + 1}, or {record.number} to have the last "
                    f"answer of session {request.session!r} again"
                )
        if self._policy.needs_rewards and math.isnan(request.reward) and not request.begins:
            return RequestError(
                f"reward is missing, but '{self._policy.needs_rewards}' looks back to rewards; expected that of the "
                f"action before, of session {request.session!r}"
            )
        return None

    def enter(self, batch: Sequence[ActRequest]) -> list[Hashable]:
        """The policy's own sessions for the requests of a batch, reset where an episode begins."""
        with self._lock:
            for request in batch:
                if request.session is not None:
                    self._records.setdefault(request.session, _Record()).used = monotonic()
                    self._records.move_to_end(request.session)
            while len(self._records) > max(self._max_sessions, len(batch)):
                self._drop(next(iter(self._records)))
            leaving, self._leaving = self._leaving, []
        for session in leaving:
            self._policy.forget(session)
        if not self.has_memory:  # the same few sessions each time: whose they are makes no difference
            names: list[Hashable] = list(range(len(batch)))
        else:
            names = [(row,) if request.session is None else request.session for row, request in enumerate(batch)]
        for name, request in zip(names, batch, strict=True):
            if request.begins or request.session is None or not self.has_memory:
                self._policy.reset(name)
        return names

    def note(self, batch: Sequence[ActRequest], answers: Sequence[Outcome]) -> None:
        """Remember what the requests of a batch were answered, for those who ask again."""
        for request, answer in zip(batch, answers, strict=True):
            record = self._records.get(request.session)
            if record is not None and isinstance(answer, Acted):
                record.number, record.answer = request.number, answer

    def lose(self, batch: Sequence[ActRequest]) -> None:
        """Give up the sessions of a batch that failed: what they remembered is gone."""
        with self._lock:
            for request in batch:
                self._drop(request.session)

    def _drop(self, session: Hashable) -> bool:
        if self._records.pop(session, None) is None:
            return False
        if self.has_memory:
            self._leaving.append(session)
        return True


def session_lost(session: Hashable) -> SessionLostError:
    """The error for a session that goes on without a memory here."""
    return SessionLostError(
        f"session {session!r} has no memory here: it never began, or it was forgotten; expected 'begins': true with "
        "its next observation, as after reset() of a PolicyClient"
    )


class BatchOptions(NamedTuple):
    """How requests are put together, and how much may wait.

    max_batch       requests in one forward pass, at most
    max_wait        seconds that the first of them waits for others; 0.0: it waits for none
    max_waiting     requests that may wait for each version; more are refused with OverloadedError
    max_sessions    sessions with a memory, for each version; a new one takes the place of the one idle for longest
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
        self.policy, self.name, self.version = policy, name, version
        self._options = options
        self._book = SessionBook(policy, options.max_sessions, options.idle_after)
        self._waiting: deque[ActRequest] = deque()
        self._changed = threading.Condition()
        self._acting = threading.Lock()
        self._is_closing = False
        self._weights = 0
        self.meters, self._meters = meters, meters.of(name, version)
        self._meters["waiting"].set_function(lambda: len(self._waiting))
        self._meters["sessions"].set_function(lambda: self.num_sessions)
        self._thread = threading.Thread(target=self._run, name=f"rollflow batches of {version}", daemon=True)
        self._thread.start()

    @property
    def num_sessions(self) -> int:
        """Sessions with a memory here."""
        return len(self._book) if self._book.has_memory else 0

    @property
    def has_memory(self) -> bool:
        """True if an action may depend on what came before in its session."""
        return self._book.has_memory

    def has_session(self, session: Hashable) -> bool:
        """True if the session has a memory here that it can go on with."""
        return self._book.has_memory and session in self._book

    def has_sessions(self) -> bool:
        """True while a session has a memory here that it can go on with, or a request waits."""
        self._book.expire()
        return bool(self._waiting) or (self._book.has_memory and len(self._book) > 0)

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

    def forget(self, session: Hashable) -> bool:
        """Release a session's memory before the next batch; False where it has none."""
        return self._book.leave(session)

    def forget_client(self, client: str) -> None:
        """Release the memory of every session of a client."""
        self._book.leave_all_of(client)

    def close(self) -> None:
        """Answer what waits, and end the thread."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        self._thread.join(_CLOSE_SECONDS)
        self.meters.remove(self._meters, self.name, self.version)

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
        outcomes: list[Outcome] = [self._book.answer_before(request) for request in batch]  # type: ignore[misc]
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
        sessions = self._book.enter(batch)
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
            self._book.lose(batch)
            return [error] * len(batch)
        made: list[Outcome] = [
            Acted(tree_at(actions, row), self.version, weights, request.number) for row, request in enumerate(batch)
        ]
        self._book.note(batch, made)
        return made
