"""What a run might leave behind: processes, threads, descriptors, memory, and whatever has a name in a folder."""

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
    """How often shared memory of ours is mapped into this process. It has no name in any folder."""
    return Path("/proc/self/maps").read_text().count("/memfd:rollflow")


def held_here() -> dict[str, Any]:
    """What this process has that a run has to give back, its files in the folder for temporary ones among it."""
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
