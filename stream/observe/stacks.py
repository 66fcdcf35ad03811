"""Stacks of threads, coroutines and worker processes, with the user's own code first, and dumps of other processes.

A thread of another process is sent a signal, and writes its own stack into a file, whatever it hangs in: the signal is
answered by `faulthandler`, below Python, also if the interpreter never gets its turn. Each thread is sent a signal
of its own, and writes its own stack alone: one that wrote those of others, which run meanwhile, would follow frames
that are gone, and end the process.
"""

import faulthandler
import linecache
import os
import re
import signal
import sys
import sysconfig
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from time import monotonic, sleep
from types import CodeType, FrameType, TracebackType
from typing import IO, Any, NamedTuple

from rollflow.stream.data.system import at_fork, system_module

MOST_FRAMES = 4  # of the user's code in a message
_DEBUGGERS = ("bdb.py", "pdb.py", "pydevd", "debugpy", "ipdb", "pudb")
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_HERE = Path(__file__).parents[2]
_OWN = tuple(str(_HERE / layer) for layer in ("stream", "nodes", "sinks", "policy", "cli"))
_DUMPED = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+|\?\?\?) in (?P<name>.*)$')


class StackFrame(NamedTuple):
    """One call on a stack; line 0: not known."""

    file: str
    line: int
    name: str

    @property
    def is_own(self) -> bool:
        """True for the user's code: neither rollflow's, nor the standard library's, nor an installed package's."""
        if self.file.startswith("<") or "site-packages" in self.file or "dist-packages" in self.file:
            return False
        path = str(Path(self.file).resolve()) if self.file.startswith(_LIBRARIES) else self.file
        return not path.startswith((*_LIBRARIES, *_OWN)) and "/rollflow/" not in path

    @property
    def text(self) -> str:
        """Text of the line; "": not known."""
        return linecache.getline(self.file, self.line).strip() if self.line else ""

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.name}{f': {self.text}' if self.text else ''}"


def stack_of_thread(ident: int) -> tuple[StackFrame, ...]:
    """The stack of a thread of this process, innermost call first; empty: the thread has ended."""
    frame: FrameType | None = sys._current_frames().get(ident)
    found: list[StackFrame] = []
    while frame is not None:
        found.append(_frame_of(frame))
        frame = frame.f_back
    return tuple(found)


def stack_of_coroutine(coroutine: Any) -> tuple[StackFrame, ...]:
    """Where a coroutine waits, innermost call first; empty: it has ended, or is running right now."""
    found: list[StackFrame] = []
    while coroutine is not None and not getattr(coroutine, "cr_running", False):
        frame = next((getattr(coroutine, name, None) for name in ("cr_frame", "gi_frame", "ag_frame")), None)
        if frame is not None:
            found.append(_frame_of(frame))
        coroutine = next((getattr(coroutine, name, None) for name in ("cr_await", "gi_yieldfrom", "ag_await")), None)
    return tuple(reversed(found))


def stack_in_dump(text: str) -> tuple[StackFrame, ...]:
    """The stack in what `faulthandler` has written of one thread, innermost call first."""
    found = [match for line in text.splitlines() if (match := _DUMPED.match(line))]
    return tuple(
        StackFrame(each["file"], int(each["line"]) if each["line"].isdigit() else 0, each["name"]) for each in found
    )


def stack_lines(stack: Sequence[StackFrame]) -> list[str]:
    """Lines of a message: the user's innermost calls first, then the call that the thread is in, if that is another."""
    own = [frame for frame in stack if frame.is_own][:MOST_FRAMES]
    if not own:
        return [f"  at {frame}" for frame in stack[:MOST_FRAMES]]
    lines = [f"  {'by' if number else 'at'} {frame}" for number, frame in enumerate(own)]
    if not stack[0].is_own:
        lines.append(f"  which is now in {stack[0]}")
    return lines


def outside_of_rollflow(traceback: TracebackType | None) -> TracebackType | None:
    """A traceback without the frames of rollflow's own code."""
    entries, kept = [], None
    while traceback is not None:
        entries.append(traceback)
        traceback = traceback.tb_next
    for each in reversed(entries):
        if not str(each.tb_frame.f_globals.get("__name__")).startswith("rollflow."):
            kept = TracebackType(kept, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return kept


def is_debugged_now() -> bool:
    """True if a debugger holds a thread of this process, or traces the process from outside."""
    frames = [frame for ident in sys._current_frames() for frame in stack_of_thread(ident)]
    if any(name in frame.file for frame in frames for name in _DEBUGGERS):
        return True
    return _status(os.getpid(), "TracerPid") not in ("", "0")


def _frame_of(frame: FrameType) -> StackFrame:
    code: CodeType = frame.f_code
    return StackFrame(code.co_filename, frame.f_lineno or 0, code.co_qualname)


fcntl = system_module("fcntl")

# Which hardly anybody uses; 0: there is none here.
DUMP_SIGNAL = signal.SIGRTMIN + 6 if hasattr(signal, "SIGRTMIN") else getattr(signal, "SIGUSR2", 0)
_ANSWER_S, _LOOK_S = 0.5, 0.01
_QUIET_LOOKS = 5  # after which a thread that has got the signal has written nothing: it has no Python
_OWN_DUMPS, _WORKER_DUMPS = "rollflow stacks", "rollflow stacks of a worker"
_PROC = Path("/proc/self")
_lock = threading.RLock()  # a run that nobody has any more may end within it
_runs = 0  # that want this process to answer
_file: IO[bytes] | None = None  # that it answers into; None: it does not


def worker_dump_file() -> IO[bytes]:
    """A file for the dumps of a process that is about to be started."""
    return _dump_file(_WORKER_DUMPS)


@contextmanager
def answering_dumps() -> Iterator[None]:
    """Have this process answer the signal within the block, unless somebody else has a use for it. From any thread."""
    global _runs, _file
    here = os.getpid()
    with _lock:
        _runs += 1
        if _file is None and DUMP_SIGNAL and _PROC.exists() and not _catches_signal(here):
            _file = _dump_file(_OWN_DUMPS)
            faulthandler.register(DUMP_SIGNAL, file=_file, all_threads=False)
    try:
        yield
    finally:
        if os.getpid() == here:
            with _lock:
                _runs -= 1
                if not _runs:
                    _stop_answering()


def thread_dump(pid: int, thread: int, fd: int, patience_s: float = _ANSWER_S, *, is_emptied: bool = False) -> str:
    """What a thread of a process, by its native id, writes to a file, by its descriptor; "": it did not in time.

    is_emptied    whether the dumps before are removed, so that the file does not grow

    Raises ProcessLookupError if there is no such thread.
    """
    if is_emptied:
        os.ftruncate(fd, 0)
    before = os.fstat(fd).st_size
    _send(pid, thread)
    until, size, quiet = monotonic() + patience_s, before, 0
    while monotonic() < until and quiet < _QUIET_LOOKS:
        sleep(_LOOK_S)
        last, size = size, os.fstat(fd).st_size
        if size == last > before:
            break
        quiet = 0 if size > before or _has_signal(pid, thread, "SigPnd") else quiet + 1
    return os.pread(fd, size - before, before).decode(errors="replace")


def dumps_of(pid: int, patience_s: float) -> dict[int, str] | None:
    """The dumps of another process of this user: native id of each thread with Python -> text, the main one's first.

    Empty if none answered in time; None if the process does not answer the signal. Raises PermissionError if
    the process is another user's.
    """
    path = _file_in(pid)
    if path is None:
        return None
    with path.open("rb") as file:
        dumps: dict[int, str] = {}
        for thread in sorted(map(int, os.listdir(f"/proc/{pid}/task")), key=lambda thread: (thread != pid, thread)):
            with suppress(ProcessLookupError):  # it has ended meanwhile
                if not _has_signal(pid, thread, "SigBlk"):
                    dumps[thread] = thread_dump(pid, thread, file.fileno(), patience_s)
    return {thread: text for thread, text in dumps.items() if text}


def _send(pid: int, thread: int) -> None:
    import ctypes  # which a run that nobody asks does without

    send = getattr(ctypes.CDLL(None, use_errno=True), "tgkill", None)
    if send is None:  # an old libc: the signal goes to the main thread
        os.kill(pid, DUMP_SIGNAL)
    elif send(pid, thread, int(DUMP_SIGNAL)):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


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


at_fork(after_in_child=_forget_runs)


def is_stopped(pid: int) -> bool:
    """True while a signal such as SIGSTOP, or a debugger, has stopped a process; False if that can't be seen."""
    return _status(pid, "State").startswith(("T", "t"))


def _dump_file(name: str) -> IO[bytes]:
    if hasattr(os, "memfd_create"):  # found by its name in /proc, and gone with the last process that has it
        file: IO[bytes] = os.fdopen(os.memfd_create(name), "r+b", buffering=0)
    else:
        file = tempfile.TemporaryFile(buffering=0)
    fcntl.fcntl(file, fcntl.F_SETFL, os.O_APPEND)  # a dump begins where the file ends, also after it was emptied
    return file


def _file_in(pid: int) -> Path | None:
    """The file that a process answers into; a worker's, if it has no run of its own."""
    if not _catches_signal(pid):
        return None  # the signal would end it
    found: dict[str, Path] = {}
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            found[os.readlink(path)] = path
    names = (f"/memfd:{name} (deleted)" for name in (_OWN_DUMPS, _WORKER_DUMPS))
    return next((found[name] for name in names if name in found), None)


def _catches_signal(pid: int) -> bool:
    """True if a process has a handler for the signal; False also if that can't be seen."""
    return _has_signal(pid, pid, "SigCgt")


def _has_signal(pid: int, thread: int, mask: str) -> bool:
    """True if the signal is in a mask that Linux has of a thread; False also if that can't be seen."""
    signals = _status(pid, mask, thread)
    return bool(signals) and bool(int(signals, 16) >> (DUMP_SIGNAL - 1) & 1)


def _status(pid: int, field: str, thread: int | None = None) -> str:
    """What Linux says of a process, or of one of its threads, under a name; "": nothing, as of one that has ended."""
    try:
        status = Path(f"/proc/{pid}/task/{thread or pid}/status").read_text()
    except OSError:
        return ""
    found = re.search(rf"^{field}:\s*(.*)$", status, re.MULTILINE)
    return "" if found is None else found[1]
