"""Dynamic batches: requests that wait together are acted on in one forward pass, in a thread of the batcher's own."""

import logging
import threading
from collections import deque
from collections.abc import Hashable
from time import monotonic
from typing import Any

import numpy as np

from rollflow.policy.serving.request import (
    Acted,
    ActRequest,
    ClosedError,
    Front,
    Outcome,
    OverloadedError,
)
from rollflow.policy.serving.session_book import SessionBook
from rollflow.policy.serving.tally import Tally
from rollflow.stream.data.tree import stack_trees, tree_at

_log = logging.getLogger(__name__)
_CLOSE_SECONDS = 30.0


class Batcher:
    """Acts for one version of a policy on requests from any thread.

        policy         has `act_batch(observations, rewards, sessions)`, `reset`, `forget` and `publish`
        version        name of the artifact's version, for answers
        tally          counts
        max_batch      requests in one forward pass, at most
        max_wait       seconds that the first request waits for others; 0.0: it waits for none
        max_waiting    requests that may wait; more are refused with OverloadedError
        max_sessions   sessions with a memory, at most; the one that was idle for longest is forgotten for a new one
        idle_after     seconds after which an idle session may be forgotten

    Two requests of one session never stand in one batch: the later one waits, so that a session's requests are acted on
    in their order.
    """

    def __init__(
        self,
        policy: Any,
        *,
        version: str,
        tally: Tally,
        max_batch: int = 64,
        max_wait: float = 0.0,
        max_waiting: int = 1024,
        max_sessions: int = 65_536,
        idle_after: float = 3600.0,
    ) -> None:
        self.policy, self.version, self.tally = policy, version, tally
        self._max_batch, self._max_wait, self._max_waiting = max_batch, max_wait, max_waiting
        self._book = SessionBook(policy, max_sessions, idle_after)
        self._waiting: deque[ActRequest] = deque()
        self._changed = threading.Condition()
        self._acting = threading.Lock()
        self._is_closing = False
        self._weights = 0
        self._thread = threading.Thread(target=self._run, name=f"rollflow batches of {version}", daemon=True)
        self._thread.start()

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a batch."""
        return len(self._waiting)

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
            if len(self._waiting) >= self._max_waiting:
                self.tally.refused.add()
                raise OverloadedError(f"{self._max_waiting} requests wait already; ask again later")
            self._waiting.append(request)
            if len(self._waiting) == 1 or len(self._waiting) >= self._max_batch:
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

    def forget_client(self, client: bytes) -> None:
        """Release the memory of every session of a client."""
        self._book.leave_all_of(client)

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
            if self._max_wait and not self._is_closing:
                deadline = monotonic() + self._max_wait
                while len(self._waiting) < self._max_batch and not self._is_closing:
                    if (left := deadline - monotonic()) <= 0 or not self._changed.wait(left):
                        break
            batch: dict[Any, ActRequest] = {}
            later: list[ActRequest] = []
            while self._waiting and len(batch) < self._max_batch:
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
        fronts: dict[Front, list[tuple[Any, Outcome]]] = {}
        for request, outcome in zip(batch, outcomes, strict=True):
            fronts.setdefault(request.front, []).append((request.ticket, outcome))
        self.tally.note_batch(len(fresh), monotonic() - begun)
        for front, answers in fronts.items():
            front.deliver(answers)

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
            self.tally.failed.add(len(batch))
            self._book.lose(batch)
            return [error] * len(batch)
        made: list[Outcome] = [
            Acted(tree_at(actions, row), self.version, weights, request.number) for row, request in enumerate(batch)
        ]
        self._book.note(batch, made)
        return made
