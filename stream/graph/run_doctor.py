"""RunDoctor: the stall doctor of a run on an event loop."""

from typing import TYPE_CHECKING

import anyio
import anyio.abc

from rollflow.stream.data.errors import StallError
from rollflow.stream.doctor.diagnosis import Diagnosis
from rollflow.stream.doctor.rules import StallRules
from rollflow.stream.doctor.waits import Look
from rollflow.stream.doctor.watcher import Watcher
from rollflow.stream.graph.looks import look_of_run
from rollflow.stream.graph.wakeup import Wakeup

if TYPE_CHECKING:
    from rollflow.stream.graph.run import Run


class RunDoctor:
    """Watches a run from a thread, and ends it where it is stalled and the rules say so.

    run        that is watched
    rules      when and how it speaks
    watches    whether it has a thread that looks; without one it only ends the run when it is asked to
    """

    def __init__(self, run: "Run", rules: StallRules, *, watches: bool) -> None:
        self._run, self._rules, self._watches = run, rules, watches
        self._watcher = Watcher(self, rules, self.end_stalled)
        self._bell: Wakeup | None = None
        self._error: StallError | None = None

    def start(self, tasks: anyio.abc.TaskGroup) -> None:
        """Begin, with the run's tasks. In the event loop."""
        if self._rules.on_stall == "raise":
            self._bell = Wakeup()
            tasks.start_soon(self._await_stall, self._bell)
        if self._watches:
            self._watcher.start()

    def stop(self) -> None:
        """End the thread. Once the tasks have ended."""
        self._watcher.stop()
        if self._bell is not None:
            self._bell.close()

    def look(self) -> Look | None:
        """What every task does right now; None: the run has ended."""
        return None if self._run.has_ended else look_of_run(self._run)

    def diagnose(self) -> Diagnosis:
        """What the run waits for right now."""
        return self._watcher.diagnose()

    def end_stalled(self, error: StallError) -> None:
        """Have the run end with this error, as soon as its event loop comes to it. From any thread."""
        if self._bell is not None:
            self._error = error
            self._bell.ring()

    async def _await_stall(self, bell: Wakeup) -> None:
        await anyio.wait_readable(bell.fileno())
        bell.silence()
        if self._error is not None:
            self._run.fail(self._error)
            raise self._error
