"""Stacks of threads, coroutines and worker processes, with the user's own code first."""

import linecache
import re
import sys
import sysconfig
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

MOST_FRAMES = 4  # of the user's code in a message
_DEBUGGERS = ("bdb.py", "pdb.py", "pydevd", "debugpy", "ipdb", "pudb")
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_HERE = Path(__file__).parents[2]
_OWN = tuple(str(_HERE / layer) for layer in ("stream", "nodes", "sinks", "policy", "cli"))
_DUMPED = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+|\?\?\?) in (?P<name>.*)$')


class Frame(NamedTuple):
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


def stack_of_thread(ident: int) -> tuple[Frame, ...]:
    """The stack of a thread of this process, innermost call first; empty: the thread has ended."""
    frame: FrameType | None = sys._current_frames().get(ident)
    found: list[Frame] = []
    while frame is not None:
        found.append(_frame_of(frame))
        frame = frame.f_back
    return tuple(found)


def stack_of_coroutine(coroutine: Any) -> tuple[Frame, ...]:
    """Where a coroutine waits, innermost call first; empty: it has ended, or is running right now."""
    found: list[Frame] = []
    while coroutine is not None and not getattr(coroutine, "cr_running", False):
        frame = next((getattr(coroutine, name, None) for name in ("cr_frame", "gi_frame", "ag_frame")), None)
        if frame is not None:
            found.append(_frame_of(frame))
        coroutine = next((getattr(coroutine, name, None) for name in ("cr_await", "gi_yieldfrom", "ag_await")), None)
    return tuple(reversed(found))


def stack_in_dump(text: str) -> tuple[Frame, ...]:
    """The stack in what `faulthandler` has written of one thread, innermost call first."""
    found = [match for line in text.splitlines() if (match := _DUMPED.match(line))]
    return tuple(
        Frame(each["file"], int(each["line"]) if each["line"].isdigit() else 0, each["name"]) for each in found
    )


def stack_lines(stack: Sequence[Frame]) -> list[str]:
    """Lines of a message: the user's innermost calls first, then the call that the thread is in, if that is another."""
    own = [frame for frame in stack if frame.is_own][:MOST_FRAMES]
    if not own:
        return [f"  at {frame}" for frame in stack[:MOST_FRAMES]]
    lines = [f"  {'by' if number else 'at'} {frame}" for number, frame in enumerate(own)]
    if not stack[0].is_own:
        lines.append(f"  which is now in {stack[0]}")
    return lines


def debugged(stacks: Iterable[Sequence[Frame]]) -> bool:
    """True if a debugger holds one of these stacks."""
    return any(name in frame.file for stack in stacks for frame in stack for name in _DEBUGGERS)


def is_debugged_now() -> bool:
    """True if a debugger holds a thread of this process, or traces the process from outside."""
    for frame in sys._current_frames().values():
        at: FrameType | None = frame
        while at is not None:
            if any(name in at.f_code.co_filename for name in _DEBUGGERS):
                return True
            at = at.f_back
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return False
    found = re.search(r"^TracerPid:\s*(\d+)", status, re.MULTILINE)
    return found is not None and found[1] != "0"


def _frame_of(frame: FrameType) -> Frame:
    code: CodeType = frame.f_code
    return Frame(code.co_filename, frame.f_lineno or 0, code.co_qualname)
