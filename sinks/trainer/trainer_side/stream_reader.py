"""StreamReader: the code that takes batches of a trainer's stream, as rollouts that wait for it are told."""

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic

from rollflow.stream.doctor.rules import median
from rollflow.stream.doctor.stacks import stack_of_thread
from rollflow.stream.net.inspections import standing_of
from rollflow.stream.wire import Standing

_KEPT = 101  # times


class StreamReader:
    """Marks of when the reader asks for a batch and when it gets one, made in its thread, read from any."""

    def __init__(self) -> None:
        self._since = monotonic()
        self._doing = "has not asked for a batch yet"
        self._has_batch = False
        self._thread = 0
        self._times: deque[float] = deque(maxlen=_KEPT)  # seconds that it had each of its last batches for

    def asks(self) -> None:
        """Note that it asks for the next batch."""
        now, self._thread = monotonic(), threading.get_ident()
        if self._has_batch:
            self._times.append(now - self._since)
        self._since, self._doing, self._has_batch = now, "waits for a batch", False

    @contextmanager
    def making(self) -> Iterator[None]:
        """Note that a batch is being made for it, by the learner pieces in its thread, while the block lasts."""
        since, doing = self._since, self._doing
        self._since, self._doing = monotonic(), "makes its batch"
        try:
            yield
        finally:
            self._since, self._doing = since, doing

    def gets(self) -> None:
        """Note that it gets one."""
        self._since, self._doing, self._has_batch = monotonic(), "works on its batch", True

    def standing(self, lane: int) -> Standing:
        """What it is at, and the stack of its thread: the answer to a question about a lane."""
        usual = f" (the median was {median(list(self._times)):.1f} s)" if self._has_batch and self._times else ""
        elapsed_s = monotonic() - self._since
        return standing_of(lane, self._doing + usual, elapsed_s, stack_of_thread(self._thread))
