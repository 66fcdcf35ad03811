"""Leftovers of a run: processes, threads, descriptors, memory, and whatever has a name in a folder."""

import gc
import os
import tempfile
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import psutil

SHARED_MEMORY = "/dev/shm"  # also where named semaphores lie


def shared_mappings() -> int:
    """Count the mappings of our shared memory in this process. It has no name in any folder."""
    return Path("/proc/self/maps").read_text().count("/memfd:rollflow")


def join_loop_workers() -> None:
    """Wait for the worker threads of event loops that have ended: a loop tells them to end, and waits for none."""
    for thread in threading.enumerate():
        if thread.name == "AnyIO worker thread":
            thread.join(60.0)


def held_here() -> dict[str, Any]:
    """Return what this process holds and a run has to give back, temporary files among it."""
    join_loop_workers()
    gc.collect()
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "mappings": shared_mappings(),
        "children": {child.pid for child in psutil.Process().children(recursive=True)},
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "named": named_memory([os.getpid()]),
        "temporary": sorted(os.listdir(tempfile.gettempdir())),
    }


def named_memory(pids: Iterable[int]) -> set[str]:
    """Files and semaphores in the folder of shared memory that these processes have open or mapped."""
    found: set[str] = set()
    for pid in pids:
        process = Path(f"/proc/{pid}")
        mapped = [line.split(maxsplit=5)[-1] for line in (process / "maps").read_text().splitlines()]
        opened = [os.readlink(fd) for fd in (process / "fd").iterdir() if fd.is_symlink()]
        found |= {path for path in (*mapped, *opened) if path.startswith(SHARED_MEMORY) and os.path.exists(path)}
    return found
