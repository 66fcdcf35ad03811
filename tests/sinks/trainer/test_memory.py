"""Memory of a rollout and its trainer stays under the stated bound, whichever is killed or frozen meanwhile."""

import os
import random
import signal
import threading
from pathlib import Path

import psutil
import pytest
from feeding_rollouts import HASTY
from killable_trainer import FeedChild, TrainerChild, records_of
from numbered_env import WideEnv
from remote_rollouts import await_that

from rollflow.stream.wire import Limits

MAX_BYTES = 16 << 20  # of the sink
FRAGMENT = (9 + 8) * 4 * (32 << 10)  # bytes: rows of 4 slots' observations, and of what a module repeats of them
ROLLOUT = MAX_BYTES + 2 * FRAGMENT  # what is kept or lent, what is in the making, and the one before it
TRAINER = 6 * FRAGMENT  # what the loop has and had before, and twice the window of two


class Watched:
    """Resident memory of a process, shared memory among it, looked at again and again.

    growth    bytes at most since it was first looked at
    """

    def __init__(self, pid: int | None) -> None:
        self._memory = psutil.Process(pid)
        self.growth = 0
        self._first = self._memory.memory_info().rss

    def look(self) -> None:
        """Look at it."""
        self.growth = max(self.growth, self._memory.memory_info().rss - self._first)


@pytest.mark.slow
def test_memory_stays_within_its_bound_over_all_faults(address: str, tmp_path: Path) -> None:
    drawn = random.Random(7)
    feed = FeedChild(address, [0, 1, 2, 3], env=WideEnv, sink={"max_bytes": MAX_BYTES, "limits": HASTY})
    rollout: Watched | None = None
    for life in range(6):
        child = TrainerChild(address, tmp_path, ack="manual", limits=Limits(heartbeat_s=0.3))
        begun = len(records_of(tmp_path))
        await_that(lambda begun=begun: len(records_of(tmp_path)) > begun + 2)
        rollout = rollout or Watched(feed.process.pid)
        trainer = Watched(child.process.pid)
        goal = len(records_of(tmp_path)) + drawn.randrange(10, 60)
        while len(records_of(tmp_path)) < goal:
            rollout.look()
            trainer.look()
            threading.Event().wait(2e-3)
        if life % 3 == 0:
            frozen(child, rollout)
        child.kill()
        rollout.look()
        assert trainer.growth <= TRAINER
    feed.kill()
    assert rollout is not None
    assert rollout.growth <= ROLLOUT
    assert len(records_of(tmp_path)) * FRAGMENT > 10 * (ROLLOUT + TRAINER)


def frozen(child: TrainerChild, rollout: Watched) -> None:
    """The trainer stands still for longer than it may be silent."""
    assert child.process.pid is not None
    os.kill(child.process.pid, signal.SIGSTOP)
    for _ in range(40):
        threading.Event().wait(0.05)
        rollout.look()
    os.kill(child.process.pid, signal.SIGCONT)
