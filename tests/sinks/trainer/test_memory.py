"""Memory of a rollout and its trainer stays under the stated bound, whichever is killed or frozen meanwhile."""

import os
import random
import signal
import socket
import threading
from contextlib import ExitStack, suppress
from pathlib import Path
from time import monotonic
from typing import Any

import psutil
import pytest
from feeding_rollouts import HASTY
from killable_trainer import FeedChild, TrainerChild, check_whole, records_of
from leftovers import named_memory
from memory_lending import shared_address
from numbered_env import WideEnv
from remote_rollouts import await_that

from rollflow.stream.wire import Limits

MAX_BYTES = 16 << 20  # of the sink
FRAGMENT = (9 + 8) * 4 * (32 << 10)  # bytes: rows of 4 slots' observations, and of what a module repeats of them
ROLLOUT = MAX_BYTES + 2 * FRAGMENT  # what is kept or lent, what is in the making, and the one before it
TRAINER = 6 * FRAGMENT  # what the loop has and had before, and twice the window of two
NUM_FRAGMENTS = 150  # of each lane
FROZEN_S = 60.0


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
    for life in range(12):
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
        if life % 4 == 0:
            frozen(child, rollout)
        child.kill()
        rollout.look()
        assert trainer.growth <= TRAINER
    feed.kill()
    assert rollout is not None
    assert rollout.growth <= ROLLOUT
    assert len(records_of(tmp_path)) * FRAGMENT > 20 * (ROLLOUT + TRAINER)


def frozen(child: TrainerChild, rollout: Watched) -> None:
    """The trainer stands still for longer than it may be silent."""
    assert child.process.pid is not None
    os.kill(child.process.pid, signal.SIGSTOP)
    for _ in range(40):
        threading.Event().wait(0.05)
        rollout.look()
    os.kill(child.process.pid, signal.SIGCONT)


class Frozen:
    """A rollout of two lanes that feeds a trainer, each in a process of its own; the trainer is frozen for a while.

    Both have the limits that they have unless they are given others, and so has the sink.
    """

    def __init__(self, address: str, folder: Path) -> None:
        folder.mkdir()
        options: dict[str, Any] = {"lanes": 2, "num_fragments": NUM_FRAGMENTS, "sink": {"limits": Limits()}}
        self._folder = folder
        self._feed = FeedChild(address, list(range(8)), env=WideEnv, **options)
        self._trainer = TrainerChild(address, folder, ack="auto")

    def freeze(self) -> None:
        """Stop it, once both are well on their way."""
        await_that(lambda: len(records_of(self._folder)) >= 20)
        self._watched = Watched(self._feed.process.pid), Watched(self._trainer.process.pid)
        assert self._trainer.process.pid is not None
        os.kill(self._trainer.process.pid, signal.SIGSTOP)

    def look(self) -> None:
        """Look at the memory of both, if they are there."""
        for watched in self._watched:
            with suppress(psutil.NoSuchProcess):
                watched.look()

    def thaw(self) -> None:
        """Have it go on."""
        assert self._feed.process.is_alive()
        pids = [process.pid for process in (self._feed.process, self._trainer.process) if process.pid is not None]
        assert named_memory(pids) == set()
        assert len(records_of(self._folder)) < 2 * NUM_FRAGMENTS
        os.kill(pids[1], signal.SIGCONT)

    def kill(self) -> None:
        """End both, whatever they are at."""
        self._feed.kill()
        self._trainer.kill()

    def check(self) -> None:
        """Both have come to their end, with every fragment handed over once, and within their bounds."""
        while self._trainer.process.is_alive() or self._feed.process.is_alive():
            self.look()
            threading.Event().wait(2e-3)
        assert self._feed.process.exitcode == self._trainer.process.exitcode == 0
        records = records_of(self._folder)
        check_whole(records)
        assert sorted((record.lane, record.sequence) for record in records) == [
            (lane, sequence) for lane in range(2) for sequence in range(NUM_FRAGMENTS)
        ]
        rollout, trainer = self._watched
        # A window of two fragments of each lane; of each lane, what is in the making and the one before it.
        assert rollout.growth <= (2 * 2 + 2 * 2) * FRAGMENT
        # What the loop has and had before, and twice the window.
        assert trainer.growth <= (2 + 2 * 2 * 2) * FRAGMENT


@pytest.mark.slow
def test_so_it_does_with_one_that_is_frozen_for_a_minute_and_nothing_is_lost(tmp_path: Path) -> None:
    with shared_address() as shared, socket.create_server(("127.0.0.1", 0)) as unused:
        tcp = f"tcp://127.0.0.1:{unused.getsockname()[1]}"
        unused.close()
        with ExitStack() as ending:
            both = [Frozen(address, tmp_path / address[:3]) for address in (shared, tcp)]
            for each in both:
                ending.callback(each.kill)
            for each in both:
                each.freeze()
            until = monotonic() + FROZEN_S
            while monotonic() < until:
                for each in both:
                    each.look()
                threading.Event().wait(0.05)
            for each in both:
                each.thaw()
            for each in both:
                each.check()
        assert not Path(shared.removeprefix("shm:")).exists()
