"""Times of work in this thread: how much of it waits, and how much longer it takes beside work on other cores."""

import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

_ROUNDS, _ROUND_S = 4, 0.03  # of every part, in turn with the others
_PAIRS = 6  # of rounds alone and beside others
_MOST_BESIDE = 31  # processes that work beside a part

# Interprets, and goes through some megabytes, as vector steps do. It begins at a byte, and stops at the next one.
_WORK = """
import os, select, sys
os.sched_setaffinity(0, {int(sys.argv[1])})
cells = [[float(at)] for at in range(20_000)]
while os.read(0, 1):
    os.write(1, b"x")
    while not select.select([0], [], [], 0)[0]:
        for cell in cells:
            cell[0] += 1.0
    os.read(0, 1)
"""


class Part(Protocol):
    """A part of a vector step that takes time: so many steps a call."""

    steps: int

    def __call__(self) -> None: ...


class Took(NamedTuple):
    """Seconds that a step takes, and how they are spent."""

    seconds: float  # in the mean
    waits: float  # the share of them in which the processor was free
    least: float  # seconds, in the best round


def in_turns(parts: Sequence[Part]) -> list[Took]:
    """Times of each part. Work is the least of all rounds, for it is the same in each; waits are a mean."""
    rounds = [[_measured(part) for part in parts] for _ in range(_ROUNDS)]
    found = []
    for times in zip(*rounds, strict=True):
        worked = min(each.worked / each.steps for each in times)
        waited = sum(each.waited for each in times) / sum(each.steps for each in times)
        least = min((each.worked + each.waited) / each.steps for each in times)
        found.append(Took(worked + waited, waited / (worked + waited), least))
    return found


def slow_down(part: Part) -> float:
    """Times as long as a part's work takes while this machine's other cores work, too; 1 where there are none.

    Cores may be threads of one core, share caches and memory, slow down together, or be wanted by other programs. Who
    works where is fixed meanwhile: a scheduler takes longer than this to part those who have just begun.
    """
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if len(cores) < 2:
        return 1.0
    os.sched_setaffinity(0, cores[:1])
    try:
        with _working(cores[1 : 1 + _MOST_BESIDE]) as beside:
            alone, together = 0.0, 0.0
            for _ in range(_PAIRS):
                alone += _measured(part).busy
                with beside():
                    together += _measured(part).busy
    finally:
        os.sched_setaffinity(0, cores)
    return max(1.0, together / alone)


@contextmanager
def _working(cores: Sequence[int]) -> Iterator[Callable[[], AbstractContextManager[None]]]:
    """Processes that work, on a core each, while a block of what this gives is entered."""
    work, pipe = partial(subprocess.Popen, bufsize=0, process_group=0), subprocess.PIPE
    with ExitStack() as opened:
        processes: list[Any] = [
            opened.enter_context(work([sys.executable, "-I", "-S", "-c", _WORK, str(core)], stdin=pipe, stdout=pipe))
            for core in cores
        ]

        def tell() -> None:
            for each in processes:
                each.stdin.write(b"x")

        @contextmanager
        def beside() -> Iterator[None]:
            tell()
            for each in processes:
                each.stdout.read(1)
            yield
            tell()

        yield beside


class _Measured(NamedTuple):
    """Steps made, seconds of work, those in which the thread queued for a core, and those in which a core was free."""

    steps: int
    worked: float
    queued: float
    waited: float

    @property
    def busy(self) -> float:
        """Seconds of a step in which there was work to do."""
        return (self.worked + self.queued) / self.steps


def _measured(part: Part) -> _Measured:
    """Call a part for a moment. Time that the system gave to nobody, and nobody asked for, counts as none of it."""
    calls, began, worked, queued, slept = 0, time.perf_counter(), time.thread_time(), _queued_s(), _slept()
    while not calls or time.perf_counter() < began + _ROUND_S:
        part()
        calls += 1
    wall, worked, queued = time.perf_counter() - began, time.thread_time() - worked, _queued_s() - queued
    waited = max(0.0, wall - worked - queued) if slept is None or slept != _slept() else 0.0
    return _Measured(calls * part.steps, worked, queued, waited)


def _slept() -> int | None:
    """Times that this thread has given its processor up by itself; None where the system doesn't say.

    Time that passes without one is taken from it, maybe by the host of a virtual machine.
    """
    thread = getattr(resource, "RUSAGE_THREAD", None)
    return None if thread is None else resource.getrusage(thread).ru_nvcsw


def _queued_s() -> float:
    """Seconds for which this thread has had to queue for a processor; 0 where the system doesn't say."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) * 1e-9
    except OSError:
        return 0.0
