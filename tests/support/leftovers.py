"""Leftovers of a run: processes, threads, descriptors, memory, and whatever has a name in a folder."""

import gc
import os
import tempfile
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any

import psutil

from rollflow.nodes.env.workers import worker_process

LONGEST_S = 60.0

SHARED_MEMORY = "/dev/shm"  # also where named semaphores lie


def shared_mappings() -> int:
    """Count the mappings of our shared memory in this process. It has no name in any folder."""
    return Path("/proc/self/maps").read_text().count("/memfd:rollflow")


def processes_of(pid: int | None = None) -> set[psutil.Process]:
    """Return the processes that one has started, and those have, without fork servers and trackers of resources."""
    started = psutil.Process(pid).children(recursive=True)
    return {each for each in started if _is_our_own(each, pid or os.getpid())}


def _is_our_own(process: psutil.Process, parent: int) -> bool:
    try:
        return process.ppid() != parent or "from multiprocessing." not in " ".join(process.cmdline())
    except psutil.ZombieProcess:  # it has ended, and nobody has waited for it
        return True
    except psutil.NoSuchProcess:
        return False


def join_loop_workers() -> None:
    """Wait for the worker threads of event loops that have ended: a loop tells them to end, and waits for none."""
    for thread in threading.enumerate():
        if thread.name == "AnyIO worker thread":
            thread.join(LONGEST_S)


def descriptors_here() -> set[tuple[int, str]]:
    """Return the descriptors that this process has open, each with what it stands for."""
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the one that lists them
            found.add((int(fd), os.readlink(f"/proc/self/fd/{fd}")))
    return {each for each in found if each[0] not in _of_servers()}


def _of_servers() -> set[int | None]:
    """Descriptors by which fork servers and the tracker of resources know that this process has not ended."""
    servers: list[Any] = [*worker_process._servers.values(), forkserver._forkserver]
    tracker: Any = resource_tracker._resource_tracker
    return {tracker._fd, *(server._forkserver_alive_fd for server in servers if server is not None)}


@contextmanager
def nothing_left() -> Iterator[None]:
    """Check that no thread and no descriptor is there behind the block that was not there before it.

    A thread that ends by itself is waited for. What other tests have left may go meanwhile.
    """
    gc.collect()
    threads, descriptors = set(threading.enumerate()), descriptors_here()
    yield
    gc.collect()
    left = [thread.name for thread in set(threading.enumerate()) - threads if not ends(thread)]
    gc.collect()  # of what they held
    found = left, sorted(descriptors_here() - descriptors)
    assert found == ([], []), f"threads and descriptors that are left: {found}"


def ends(thread: threading.Thread) -> bool:
    """Wait for a thread, and return whether it has ended."""
    thread.join(LONGEST_S)
    return not thread.is_alive()


def held_here() -> dict[str, Any]:
    """Return what this process holds and a run has to give back, temporary files among it.

    Trio keeps idle threads for some seconds, those of other tests as well: they are left out. One that works is named
    after its work.
    """
    join_loop_workers()
    gc.collect()
    return {
        "descriptors": len(descriptors_here()),
        "mappings": shared_mappings(),
        "children": {process.pid for process in processes_of()},
        "threads": sorted(each.name for each in threading.enumerate() if not each.name.startswith("Trio thread")),
        "named": named_memory([os.getpid()]),
        "temporary": sorted(name for name in os.listdir(tempfile.gettempdir()) if not name.startswith("pymp-")),
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
