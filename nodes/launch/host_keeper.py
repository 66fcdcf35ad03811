"""Keeper of the hosts that a rollout has started: it starts again what ends, and says why hosts are not there."""

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from time import monotonic

from rollflow.nodes.launch.launcher import Handle, Launcher
from rollflow.stream.data.errors import SEE, EnvError
from rollflow.stream.net.backoff import Reminder, pause_s

logger = logging.getLogger(__name__)

LOOK_S = 0.25
_LONGEST_PAUSE_S = 30.0
_FORGIVEN_S = 60.0  # a host that has run for so long may fail as often as one that never did
_MOST_FAILURES = 5  # in a row, as a lane may be lost
_MOST_AT_FIRST = 1  # while no rollout has begun: all hosts run the same program, so that a second one is no accident


@dataclass(slots=True)
class _Record:
    """Record of one host's failures.

    since       when it was started last, on the clock `monotonic`
    failures    in a row
    due         when it is to be started again; None: it runs
    reason      how it failed last, in one line; "": it never did
    """

    since: float
    failures: int = 0
    due: float | None = None
    reason: str = ""


class HostKeeper:
    """Keeps the hosts of a rollout alive, in a thread of its own, until it is closed.

        launcher    that has started them
        handles     of the hosts

    A host that ends with an error, or is killed, is started again, after a pause that doubles with each failure in a
    row; one that has failed too often is given up. While hosts wait for something, the log says so.
    """

    def __init__(self, launcher: Launcher, handles: Sequence[Handle]) -> None:
        now = monotonic()
        self._launcher = launcher
        self._records = {handle: _Record(now) for handle in handles}
        self._waiting: Reminder | None = None  # while any host waits for something
        self._broken: Exception | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="rollflow hosts", daemon=True)
        self._thread.start()

    @property
    def problems(self) -> list[str]:
        """Why hosts are not there, a line each. From any thread."""
        reasons = [handle.waits or record.reason for handle, record in self._records.items()]
        return [reason for reason in dict.fromkeys(reasons) if reason]

    def check(self, *, is_first: bool) -> None:
        """Raise EnvError where hosts can't be kept alive. From any thread.

        is_first    whether no rollout has begun: then one host that fails again says that all will
        """
        if self._broken is not None:
            raise EnvError(f"hosts can't be looked after: {self._broken}") from self._broken
        most = _MOST_AT_FIRST if is_first else _MOST_FAILURES
        failed = [record for record in self._records.values() if record.failures > most]
        if failed and (is_first or len(failed) == len(self._records)):
            raise EnvError(f"hosts fail again and again: {'; '.join(self.problems)}").see("started hosts")

    def close(self) -> None:
        """Have the launcher end all hosts."""
        self._closing.set()
        self._thread.join()
        self._launcher.stop()

    def _keep(self) -> None:
        while not self._closing.wait(LOOK_S):
            try:
                self._look()
            except Exception as error:  # of an engine, which may have gone: the rollout's thread raises it
                self._broken = error
                logger.warning("hosts can't be looked after any more: %s", error)
                return

    def _look(self) -> None:
        """Take note of every host, and start those again whose pause is over."""
        alive = set(self._launcher.alive())
        for handle, record in self._records.items():
            if handle in alive or not handle.end:  # without a failure it has been told goodbye
                continue
            if record.due is None:
                self._note_end(handle, record)
            elif record.due <= monotonic() and record.failures <= _MOST_FAILURES:
                self._launcher.restart(handle)
                record.since, record.due = monotonic(), None
        self._remind()

    def _remind(self) -> None:
        """Log what hosts wait for, where that takes long."""
        waits = list(dict.fromkeys(handle.waits for handle in self._records if handle.waits))
        if not waits:
            self._waiting = None
            return
        self._waiting = self._waiting or Reminder(monotonic())
        if self._waiting.is_due(monotonic()):
            logger.warning("hosts are not there: %s", "; ".join(waits))

    def _note_end(self, handle: Handle, record: _Record) -> None:
        now, log = monotonic(), self._launcher.logs(handle).strip()
        record.failures = 1 if now - record.since >= _FORGIVEN_S else record.failures + 1
        record.due = now + pause_s(record.failures, _LONGEST_PAUSE_S)
        lines = [line for line in log.splitlines() if not line.startswith(SEE)]
        record.reason = f"host {handle.name} {handle.end}" + (f": {lines[-1]}" if lines else "")
        given_up = ", and is given up" if record.failures > _MOST_FAILURES else ""
        logger.warning("host %s %s%s; it wrote:\n%s", handle.name, handle.end, given_up, log)
