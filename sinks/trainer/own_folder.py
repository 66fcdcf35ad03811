"""Folders for sockets that other processes of this machine are to find."""

import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

from rollflow.stream.data.system import system_module

fcntl = system_module("fcntl")

_PREFIX, _LOCK = "rollflow-", ".rollflow-sockets"


class OwnFolder:
    """Temporary folder of this process and those that it forks; `close` removes it.

    Making one also removes folders of processes that were killed. Each owner holds a lock on a file in its folder. The
    system releases it when the last owner has ended, in whatever way.

    path    of the folder
    """

    def __init__(self) -> None:
        _remove_left()
        self._lock: int | None = None
        while self._lock is None:
            self.path = Path(tempfile.mkdtemp(prefix=_PREFIX))
            self._lock = _locked(self.path / _LOCK)

    def close(self) -> None:
        """Remove the folder with all its contents; a second call does nothing."""
        if self._lock is not None:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = None


def _locked(path: Path) -> int | None:
    """Descriptor of a new, locked file; None if another process has removed the file before it was locked."""
    fd = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    fcntl.flock(fd, fcntl.LOCK_EX)
    if path.exists():
        return fd
    os.close(fd)
    return None


def _remove_left() -> None:
    for lock in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*/{_LOCK}"):
        with suppress(OSError):  # it has an owner, or was removed meanwhile
            fd = os.open(lock, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(lock.parent, ignore_errors=True)
            finally:
                os.close(fd)
