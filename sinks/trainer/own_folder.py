"""Folders for sockets that other processes of this machine are to find."""

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

_PREFIX, _LOCK = "rollflow-", ".rollflow-sockets"


class OwnFolder:
    """A folder among temporary files, of this process and those that it forks; `close` removes it.

    What processes have left that were killed is removed when one is made: whoever has a folder locks a file in it, and
    the system unlocks it when the last of them has ended, in whatever way.

    path    of the folder
    """

    def __init__(self) -> None:
        _remove_left()
        self._lock: int | None = None
        while self._lock is None:
            self.path = Path(tempfile.mkdtemp(prefix=_PREFIX))
            self._lock = _locked(self.path / _LOCK)

    def close(self) -> None:
        """Remove it, with all that is in it; again does nothing."""
        if self._lock is not None:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = None


def _locked(path: Path) -> int | None:
    """A descriptor of a new file that is locked; None where another process has been quicker, and removed it."""
    fd = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    fcntl.flock(fd, fcntl.LOCK_EX)
    if path.exists():
        return fd
    os.close(fd)
    return None


def _remove_left() -> None:
    for lock in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*/{_LOCK}"):
        with suppress(OSError):  # it is somebody's, or was removed meanwhile
            fd = os.open(lock, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(lock.parent, ignore_errors=True)
            finally:
                os.close(fd)
