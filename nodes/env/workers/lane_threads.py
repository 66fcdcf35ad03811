"""A thread for each lane, which does the lane's jobs one after the other."""

import threading
from collections.abc import Callable
from queue import SimpleQueue
from time import monotonic
from typing import NamedTuple

Job = Callable[[], object]


class LaneJob(NamedTuple):
    """Job that a lane's thread is at.

    doing     the same in words
    began     time when it began, on the clock `monotonic`
    thread    that does it
    """

    doing: str
    began: float
    thread: int


class LaneThreads:
    """Threads of so many lanes, each of which begins with its lane's first job. Jobs must not raise."""

    def __init__(self, count: int) -> None:
        self._jobs: list[SimpleQueue[tuple[str, Job] | None]] = [SimpleQueue() for _ in range(count)]
        self._at: list[LaneJob | None] = [None] * count
        self._threads = [
            threading.Thread(target=_work, args=(place, jobs, self._at), name=f"rollflow lane {place}", daemon=True)
            for place, jobs in enumerate(self._jobs)
        ]

    def put(self, place: int, job: Job, doing: str = "") -> None:
        """Have a lane's thread do a job, which `doing` has in words, once it has done those before. From one thread."""
        if self._threads[place].ident is None:
            self._threads[place].start()
        self._jobs[place].put((doing, job))

    def at_work(self, place: int) -> LaneJob | None:
        """The job that a lane's thread is at; None: it waits for one. From any thread."""
        return self._at[place]

    def end(self) -> None:
        """Have every thread end once its jobs are done."""
        for jobs in self._jobs:
            jobs.put(None)

    def has_ended(self, place: int, timeout: float) -> bool:
        """True if a lane's thread has ended within so many seconds, or never begun."""
        thread = self._threads[place]
        if thread.ident is not None:
            thread.join(timeout)
        return not thread.is_alive()


def _work(place: int, jobs: "SimpleQueue[tuple[str, Job] | None]", at: list[LaneJob | None]) -> None:
    thread = threading.get_ident()
    while (asked := jobs.get()) is not None:
        doing, job = asked
        at[place] = LaneJob(doing, monotonic(), thread)
        job()
        at[place] = None
