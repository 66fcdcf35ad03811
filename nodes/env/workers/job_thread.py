"""A thread that does jobs one after the other, such as those of a lane."""

import threading
from collections.abc import Callable
from queue import SimpleQueue

Job = Callable[[], object]


class JobThread:
    """Thread of this name, which begins with its first job. Jobs must not raise."""

    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._thread = threading.Thread(target=_work, args=(self._jobs,), name=name, daemon=True)

    def put(self, job: Job) -> None:
        """Have a job done, once those before are. From one thread."""
        if self._thread.ident is None:
            self._thread.start()
        self._jobs.put(job)

    def end(self) -> None:
        """Have the thread end once its jobs are done."""
        self._jobs.put(None)

    def has_ended(self, timeout: float) -> bool:
        """True if it has ended within so many seconds, or never begun."""
        if self._thread.ident is not None:
            self._thread.join(timeout)
        return not self._thread.is_alive()


def _work(jobs: "SimpleQueue[Job | None]") -> None:
    while (job := jobs.get()) is not None:
        job()
        del job  # which this frame would hold while it waits
