"""A thread for each lane, which does the lane's jobs one after the other."""

import threading
from collections.abc import Callable
from queue import SimpleQueue

Job = Callable[[], object]


class LaneThreads:
    """Threads of so many lanes, each of which begins with its lane's first job. Jobs must not raise."""

    def __init__(self, count: int) -> None:
        self._jobs: list[SimpleQueue[Job | None]] = [SimpleQueue() for _ in range(count)]
        self._threads = [
            threading.Thread(target=_work, args=(jobs,), name=f"rollflow lane {place}", daemon=True)
            for place, jobs in enumerate(self._jobs)
        ]

    def put(self, place: int, job: Job) -> None:
        """Have a lane's thread do a job, once it has done those before. From one thread."""
        if self._threads[place].ident is None:
            self._threads[place].start()
        self._jobs[place].put(job)

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


def _work(jobs: "SimpleQueue[Job | None]") -> None:
    while (job := jobs.get()) is not None:
        job()
