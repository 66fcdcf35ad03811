"""Locks on open files, which the system releases when their last owner has ended, in whatever way."""

from contextlib import suppress
from typing import TextIO

from rollflow.stream.data.system import system_module

fcntl = system_module("fcntl")


def lock_file(file: int | TextIO) -> bool:
    """Lock a file for as long as it is open; False where another one has it. A disk without locks refuses nobody."""
    with suppress(OSError):  # of a disk without locks
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def unlock_file(file: int | TextIO) -> None:
    """Let others have the file, also where a process that was forked still has it open."""
    with suppress(OSError):  # of a disk without locks
        fcntl.flock(file, fcntl.LOCK_UN)
