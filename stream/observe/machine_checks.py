"""Memory of a process that rises steadily, a silent fault."""

import mmap
import os
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

from rollflow.stream.observe.waits import Sign

_EVERY_S, _RISES = 30.0, 10  # between two looks at the memory; in a row, after which it rises steadily
_SHARE = 1e-3  # of the machine's memory, which is a rise

Usage = tuple[int, int]  # bytes that a process has asked for, and bytes of it that are in memory


class MachineChecks:
    """Finds faults of this process; `signs` is to be called at every look of the doctor.

    usage     gives what the process has: both rise where something is kept, and one alone where room fills up that was
              asked for at once, as a replay's does
    bound     bytes that it may have
    """

    def __init__(self, usage: Callable[[], Usage] | None = None, bound: int | None = None) -> None:
        self._usage, self._bound = usage or process_memory, memory_bound() if bound is None else bound
        self._samples: deque[Usage] = deque(maxlen=_RISES + 1)
        self._due = -float("inf")

    def signs(self, now: float) -> Iterator[Sign]:
        """The faults that there are at a time of the doctor's clock, in seconds."""
        if now >= self._due:
            self._due = now + _EVERY_S
            self._samples.append(self._usage())
        rise = _SHARE * self._bound
        pairs = list(pairwise(self._samples))
        if len(pairs) == _RISES and all(min(b - a for a, b in zip(*pair, strict=True)) >= rise for pair in pairs):
            (_, before), (_, there) = self._samples[0], self._samples[-1]
            yield Sign(
                "memory rises",
                f"the memory of this process has risen in each of the last {_RISES} half minutes, by "
                f"{(there - before) / 1e6:,.0f} MB to {there / 1e6:,.0f} of {self._bound / 1e6:,.0f}: something keeps "
                "more and more, such as a list of fragments or batches, or losses with their graphs",
            )


def memory_bound() -> int:
    """Bytes of memory that this machine has, or this container may use; very many if the system does not say."""
    if not hasattr(os, "sysconf"):
        return sys.maxsize
    bound = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with suppress(OSError, ValueError):  # there is no container, or it has no bound
        bound = min(bound, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return bound


def process_memory() -> Usage:
    """What this process has; zeros on systems that do not say it."""
    try:
        pages = Path("/proc/self/statm").read_text().split()
    except OSError:
        return 0, 0
    page = mmap.PAGESIZE
    return page * int(pages[5]), page * int(pages[1])
