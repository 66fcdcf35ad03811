"""Clocks that lanes' deadlines are told by, which go on only where a test says so."""

import psutil

from rollflow import MultiAgentRollout, Rollout


class LaneClock:
    """However slow the machine is, nothing is late before time goes on here. Rollouts are those over remote hosts."""

    def __init__(self) -> None:
        self._now = 0.0

    def __call__(self) -> float:
        return self._now

    def is_before(self, rollout: Rollout | MultiAgentRollout, lane: int) -> bool:
        """Return True while a lane has work to do, and time left for it."""
        return self.left(rollout, lane) > 0.0

    def left(self, rollout: Rollout | MultiAgentRollout, lane: int) -> float:
        """Seconds that a lane has left for what it is at; 0.0 where it has nothing to do."""
        watch = rollout.environments.deadlines  # type: ignore[attr-defined]
        return float(watch._until.get(lane, self._now) - self._now)

    def has_looked(self, rollout: Rollout, lane: int) -> bool:
        """True where a lane of whole rollouts has made nothing since it was looked at, and has time left."""
        watch = rollout.environments.deadlines  # type: ignore[attr-defined]
        pulse, _ = rollout.environments.progress(lane)  # type: ignore[attr-defined]
        return bool(watch._seen[lane][0] == pulse) and self.is_before(rollout, lane)

    def go_on(self, rollout: Rollout | MultiAgentRollout, seconds: float) -> None:
        """Let so much time pass, and have the rollout look at the clock."""
        self._now += seconds
        rollout.environments.gateway.wake()  # type: ignore[attr-defined]


class StoppedClock:
    """Time that goes on only while a child of this process is stopped: however slow the machine, no other is late."""

    def __init__(self) -> None:
        self._now = 0.0

    def __call__(self) -> float:
        if any(_is_stopped(child) for child in psutil.Process().children(recursive=True)):
            self._now += 0.5
        return self._now


def _is_stopped(process: psutil.Process) -> bool:
    try:
        return bool(process.status() == psutil.STATUS_STOPPED)
    except psutil.NoSuchProcess:
        return False
