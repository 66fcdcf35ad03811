"""Stack dumps: at a signal a process writes the stacks of its threads, whatever they hang in, for another one to read.

The signal is answered by `faulthandler`, below Python: also where the interpreter never gets its turn.
"""

import faulthandler
import fcntl
import os
import re
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from time import monotonic, sleep
from typing import IO

DUMP_SIGNAL = signal.SIGRTMIN + 6 if hasattr(signal, "SIGRTMIN") else signal.SIGUSR2  # which hardly anybody uses
_ANSWER_S, _LOOK_S = 0.5, 0.01
_OWN, _WORKERS = "rollflow stacks", "rollflow stacks of a worker"
_PROC = Path("/proc/self")
_lock = threading.RLock()  # a run that nobody has any more may end within it
_runs = 0  # that want this process to answer
_file: IO[bytes] | None = None  # that it answers into; None: it does not


def worker_dump_file() -> IO[bytes]:
    """A file for the dumps of a process that is about to be started."""
    return _dump_file(_WORKERS)


@contextmanager
def answering_dumps() -> Iterator[None]:
    """Have this process answer the signal within the block, unless somebody else has a use for it. From any thread."""
    global _runs, _file
    here = os.getpid()
    with _lock:
        _runs += 1
        if _file is None and _PROC.exists() and not _catches_signal(here):
            _file = _dump_file(_OWN)
            faulthandler.register(DUMP_SIGNAL, file=_file)
    try:
        yield
    finally:
        if os.getpid() == here:
            with _lock:
                _runs -= 1
                if not _runs:
                    _stop_answering()


def asked_dump(send: Callable[[], object], fd: int, patience_s: float = _ANSWER_S, *, is_emptied: bool = False) -> str:
    """What a process writes to a file, by its descriptor, once the signal is sent; "": it did not answer in time.

    is_emptied    whether the dumps before are removed, so that the file does not grow
    """
    if is_emptied:
        os.ftruncate(fd, 0)
    before = os.fstat(fd).st_size
    send()
    until, size = monotonic() + patience_s, before
    while monotonic() < until:
        sleep(_LOOK_S)
        last, size = size, os.fstat(fd).st_size
        if size == last > before:
            break
    return os.pread(fd, size - before, before).decode(errors="replace")


def dump_of(pid: int, patience_s: float) -> str | None:
    """The dump of another process of this user; "": it did not answer in time, None: it does not answer the signal.

    Raises PermissionError where the process is another user's.
    """
    path = _file_in(pid)
    if path is None:
        return None
    with path.open("rb") as file:
        return asked_dump(lambda: os.kill(pid, DUMP_SIGNAL), file.fileno(), patience_s)


def _stop_answering() -> None:
    global _file
    if _file is not None:
        faulthandler.unregister(DUMP_SIGNAL)
        _file.close()
        _file = None


def _forget_runs() -> None:
    """A forked process has none of its parent's runs, and none of the threads, of which one may hold the lock."""
    global _lock, _runs
    _lock, _runs = threading.RLock(), 0
    _stop_answering()


os.register_at_fork(after_in_child=_forget_runs)


def is_stopped(pid: int) -> bool:
    """True while a signal such as SIGSTOP, or a debugger, has stopped a process; False where that can't be seen."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in ("T", "t")
    except (OSError, IndexError):
        return False


def _dump_file(name: str) -> IO[bytes]:
    if hasattr(os, "memfd_create"):  # found by its name in /proc, and gone with the last process that has it
        file: IO[bytes] = os.fdopen(os.memfd_create(name), "r+b", buffering=0)
    else:
        file = tempfile.TemporaryFile(buffering=0)
    fcntl.fcntl(file, fcntl.F_SETFL, os.O_APPEND)  # a dump begins where the file ends, also after it was emptied
    return file


def _file_in(pid: int) -> Path | None:
    """The file that a process answers into; a worker's, where it has no run of its own."""
    if not _catches_signal(pid):
        return None  # the signal would end it
    found: dict[str, Path] = {}
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            found[os.readlink(path)] = path
    names = (f"/memfd:{name} (deleted)" for name in (_OWN, _WORKERS))
    return next((found[name] for name in names if name in found), None)


def _catches_signal(pid: int) -> bool:
    """True if a process has a handler for the signal; False also where that can't be seen."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:  # it has ended, or this is no Linux
        return False
    caught = re.search(r"^SigCgt:\s*([0-9a-f]+)", status, re.MULTILINE)
    return caught is not None and bool(int(caught[1], 16) >> (DUMP_SIGNAL - 1) & 1)
