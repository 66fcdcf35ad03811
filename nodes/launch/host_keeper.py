"""Keeper of the hosts that a rollout has started: it starts again what ends, and says why hosts are not there."""

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import monotonic

from rollflow.nodes.launch.launcher import Handle, Launcher
from rollflow.nodes.launch.scaling import HostScaler
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
    """Record of one host: its failures, and whether it has ended.

    since       when it was started last, on the clock `monotonic`
    failures    in a row
    due         when it is to be started again; None: it runs
    reason      how it failed last, in one line; "": it never did
    has_ended   whether it has ended as it should
    """

    since: float
    failures: int = 0
    due: float | None = None
    reason: str = ""
    has_ended: bool = False


class HostKeeper:
    """Keeps the hosts of a rollout alive, in a thread of its own, until it is closed.

        launcher    that has started them
        handles     of the hosts
        scaler      decides how many there are; None: as many as there were at first
        noun        what they are called in the log

        is_done     True once all have ended as they should

    A host that ends with an error, or is killed, is started again, after a pause that doubles with each failure in a
    row; one that has failed too often is given up. While hosts wait for something, the log says so.
    """

    def __init__(
        self, launcher: Launcher, handles: Sequence[Handle], scaler: HostScaler | None = None, *, noun: str = "host"
    ) -> None:
        now = monotonic()
        self._noun, self.is_done = noun, False
        self._launcher, self._scaler = launcher, scaler
        self._at_work: Callable[[], tuple[int, float | None]] | None = None  # of a rollout that has begun
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

    @property
    def states(self) -> dict[str, str]:
        """Names, and what becomes of each, in words. From any thread."""
        return {handle.name: self._state(handle, record) for handle, record in self._records.items()}

    def begin(self, at_work: Callable[[], tuple[int, float | None]]) -> None:
        """Take note that the rollout has begun: see `HostSupply`."""
        self._at_work = at_work

    def check(self, *, is_first: bool) -> None:
        """Raise EnvError where hosts can't be kept alive. From any thread.

        is_first    whether no rollout has begun: then one host that fails again says that all will
        """
        if self._broken is not None:
            raise EnvError(f"{self._noun}s can't be looked after: {self._broken}") from self._broken
        most = _MOST_AT_FIRST if is_first else _MOST_FAILURES
        failed = [record for record in self._records.values() if record.failures > most]
        if failed and (is_first or len(failed) == len(self._records)):
            raise EnvError(f"{self._noun}s fail again and again: {'; '.join(self.problems)}").see("started hosts")

    def close(self) -> None:
        """Have the launcher end all hosts."""
        self._closing.set()
        self._thread.join()
        self._launcher.stop()

    def _keep(self) -> None:
        while not self._closing.wait(LOOK_S):
            try:
                self._look()
                self._rescale()
            except Exception as error:  # of an engine, which may have gone: the rollout's thread raises it
                self._broken = error
                logger.warning("%ss can't be looked after any more: %s", self._noun, error)
                return

    def _look(self) -> None:
        """Take note of every host, and start those again whose pause is over."""
        alive = set(self._launcher.alive())
        for handle, record in self._records.items():
            record.has_ended = handle not in alive and not handle.end  # it has been told goodbye
            if handle in alive or record.has_ended:
                continue
            if record.due is None:
                self._note_end(handle, record)
            elif record.due <= monotonic() and record.failures <= _MOST_FAILURES:
                self._launcher.restart(handle)
                record.since, record.due = monotonic(), None
        self.is_done = all(record.has_ended for record in self._records.values())
        self._remind()

    def _rescale(self) -> None:
        """Have more hosts, or fewer, where their work says so."""
        if self._scaler is None or self._at_work is None:
            return
        here, busy = self._at_work()
        before = self._records
        started = sum(record.failures <= _MOST_FAILURES for record in before.values())  # the others are given up
        decision = self._scaler.look(monotonic(), busy, here, started)
        if decision is not None:
            logger.warning("%d %ss are to be %d: %s", started, self._noun, decision.num_hosts, decision.reason)
            handles = self._launcher.scale(decision.num_hosts)
            self._records = {handle: before.get(handle) or _Record(monotonic()) for handle in handles}

    def _remind(self) -> None:
        """Log what hosts wait for, where that takes long."""
        waits = list(dict.fromkeys(handle.waits for handle in self._records if handle.waits))
        if not waits:
            self._waiting = None
            return
        self._waiting = self._waiting or Reminder(monotonic())
        if self._waiting.is_due(monotonic()):
            logger.warning("%ss are not there: %s", self._noun, "; ".join(waits))

    def _note_end(self, handle: Handle, record: _Record) -> None:
        now, log = monotonic(), self._launcher.logs(handle).strip()
        record.failures = 1 if now - record.since >= _FORGIVEN_S else record.failures + 1
        record.due = now + pause_s(record.failures, _LONGEST_PAUSE_S)
        lines = [line for line in log.splitlines() if not line.startswith(SEE)]
        record.reason = f"{self._noun} {handle.name} {handle.end}" + (f": {lines[-1]}" if lines else "")
        given_up = ", and is given up" if record.failures > _MOST_FAILURES else ""
        logger.warning("%s %s %s%s; it wrote:\n%s", self._noun, handle.name, handle.end, given_up, log)

    def _state(self, handle: Handle, record: _Record) -> str:
        if handle.waits or record.due is not None:
            return handle.waits or f"failed {record.failures} times in a row, the last one {handle.end}"
        return "has ended" if record.has_ended else f"runs for {monotonic() - record.since:.0f} s"
