"""What not every system has: Linux has all of it, macOS and Windows lack some."""

import mmap
import os
import select
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, TextIO

from rollflow.stream.data.errors import EnvError

POLLIN = getattr(select, "POLLIN", 1)


def system_module(name: str) -> Any:
    """A module of the standard library; if the system lacks it, an object whose attributes raise OSError."""
    try:
        return import_module(name)
    except ModuleNotFoundError:
        return _Missing(name)


def require(what: str, *needed: tuple[Any, str]) -> None:
    """Raise EnvError if this system lacks one of the names, pairs (module, name), that `what` needs."""
    missing = [f"{module.__name__}.{name}" for module, name in needed if not hasattr(module, name)]
    if missing:
        raise EnvError(
            f"{what} can't run on this system, {sys.platform}, which has no {', '.join(missing)}: expected Linux; "
            "where='inline' and where='threads' run everywhere"
        )


def require_packages(what: str, extra: str, *packages: str, error: Callable[[str], Exception] = ValueError) -> None:
    """Import packages. Raises an error for the first that can't be, with the extra of rollflow that has it."""
    for package in packages:
        try:
            import_module(package)
        except ImportError as cause:
            is_missing = isinstance(cause, ModuleNotFoundError) and f"{package}.".startswith(f"{cause.name}.")
            why = "" if is_missing else f", which raises {type(cause).__name__}: {cause}"
            raise error(f"{what} takes the package {package}{why}: pip install 'rollflow[{extra}]'") from cause


def at_fork(**functions: Callable[[], Any]) -> None:
    """`os.register_at_fork`, on systems that fork."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(**functions)


def make_poll() -> Any:
    """A `select.poll`, or what does the same for descriptors to be read, on systems without it."""
    return select.poll() if hasattr(select, "poll") else _ReadPoll()


class _Missing:
    """A module that this system lacks."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __getattr__(self, attribute: str) -> Any:
        raise OSError(f"this system, {sys.platform}, has no module '{self.__name__}', of which '{attribute}' is needed")


class _ReadPoll:
    """The part of `select.poll` that waits for descriptors to be read, by `select.select`."""

    def __init__(self) -> None:
        self._fds: set[int] = set()

    def register(self, fd: int, events: int) -> None:
        assert events == POLLIN
        self._fds.add(fd)

    def poll(self, timeout_ms: float | None = None) -> list[tuple[int, int]]:
        ready, _, _ = select.select(list(self._fds), [], [], None if timeout_ms is None else timeout_ms / 1e3)
        return [(fd, POLLIN) for fd in ready]


fcntl = system_module("fcntl")


def lock_file(file: int | TextIO) -> bool:
    """Lock a file for as long as it is open; False if another one has it. A disk without locks refuses nobody."""
    with suppress(OSError):  # of a disk without locks
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def unlock_file(file: int | TextIO) -> None:
    """Let others have the file, also if a process that was forked still has it open."""
    with suppress(OSError):  # of a disk without locks
        fcntl.flock(file, fcntl.LOCK_UN)


def memory_bound() -> int:
    """Bytes of memory that this machine has, or this container may use; very many if the system does not say."""
    if not hasattr(os, "sysconf"):
        return sys.maxsize
    bound = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with suppress(OSError, ValueError):  # there is no container, or it has no bound
        bound = min(bound, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return bound


def process_memory() -> tuple[int, int]:
    """Bytes that this process has asked for, and those in memory; zeros on systems that do not say it."""
    try:
        pages = Path("/proc/self/statm").read_text().split()
    except OSError:
        return 0, 0
    page = mmap.PAGESIZE
    return page * int(pages[5]), page * int(pages[1])
