"""The clock that lanes' deadlines are told by, which goes on only where a test says so."""

import pytest

from rollflow.nodes import MultiAgentRollout, Rollout


class LaneClock:
    """However slow the machine is, nothing is late before time goes on here. Rollouts are those over remote hosts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._now = 0.0
        monkeypatch.setattr("rollflow.nodes.workers.deadlines.monotonic", lambda: self._now)

    def is_before(self, rollout: Rollout | MultiAgentRollout, lane: int) -> bool:
        """Whether a lane has something to do, and time left for it."""
        due = rollout.environments._patience._deadlines._due  # type: ignore[attr-defined]
        return any(lanes.get(lane, self._now) > self._now for lanes in list(due.values()))

    def go_on(self, rollout: Rollout | MultiAgentRollout, seconds: float) -> None:
        """Let so much time pass, and have the rollout look at the clock."""
        self._now += seconds
        rollout.environments._gateway.wake()  # type: ignore[attr-defined]
