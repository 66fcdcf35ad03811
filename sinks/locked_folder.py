"""Folder that one program at a time writes to."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

from rollflow.stream.data.errors import RollflowError
from rollflow.stream.data.system import lock_file, unlock_file

LOCK = ".lock"


class LockedFolder:
    """Folder that one program at a time writes to. Nothing is made before a method is called.

    path           of the folder

    noun, writer   what the folder is, and who else may write there, in errors
    error          kind of the errors
    """

    noun: ClassVar[str]
    writer: ClassVar[str]
    error: ClassVar[type[RollflowError]]

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._lock: int | None = None

    def lock(self) -> None:
        """Make the folder, and keep others from writing there. Raises `error` if another one does, or none can."""
        if self.path.is_file():
            raise self.error(f"{self.path} is a file, expected {self.noun}, which is a folder, or nothing")
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            fd = os.open(self.path / LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise self.error(f"{self.noun} can't be written to {self.path}: {error}") from error
        if not lock_file(fd):
            os.close(fd)
            text = f"{self.writer} writes to {self.path}, expected one at a time: close it, or use another folder"
            raise self.error(text)
        self._lock = fd

    def unlock(self) -> None:
        """Let others write."""
        if self._lock is not None:
            unlock_file(self._lock)
            os.close(self._lock)
            self._lock = None

    @contextmanager
    def held(self) -> Iterator[None]:
        """Lock the folder for a block."""
        self.lock()
        try:
            yield
        finally:
            self.unlock()

    def check_held(self) -> None:
        """Raise OSError if the folder is no longer the one that was locked: a disk may have gone, or come."""
        assert self._lock is not None
        if not os.path.samestat(os.fstat(self._lock), os.stat(self.path / LOCK)):
            raise OSError(errno.ESTALE, "it is no longer the folder that it was", os.fspath(self.path))


def sync(path: Path) -> None:
    """Write a file's contents, or a folder's names, to the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
