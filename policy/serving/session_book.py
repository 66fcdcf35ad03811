"""Sessions of a served policy: which have a memory, what they were answered last, and which are forgotten first."""

import math
import threading
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from time import monotonic
from typing import Any

from rollflow.nodes.policies.policy import has_memory
from rollflow.policy.serving.request import Acted, ActRequest, Outcome, RequestError, SessionLostError


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

    def leave_all_of(self, client: bytes) -> None:
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
        "its next observation"
    )
