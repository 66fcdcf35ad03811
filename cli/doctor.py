"""Say where the threads of a running process and of its workers stand, your own code first.

It is asked by a signal that a rollflow run answers whatever it hangs in, and that breaks nothing off.
"""

import argparse
import os
from contextlib import suppress
from pathlib import Path

from rollflow.stream.data.errors import RunError
from rollflow.stream.observe.stacks import dumps_of, is_stopped, stack_in_dump, stack_lines

_ANSWER_S = 2.0
_REMEDY = "a process answers on Linux, while it runs rollflow with a stall_after; py-spy dump --pid shows any other"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("pid", type=int, metavar="PID", help="the process that runs rollflow, or one of its workers")


def run(args: argparse.Namespace) -> None:
    """Run the command."""
    print(*stack_report(args.pid), sep="\n")


def stack_report(pid: int) -> list[str]:
    """Lines on where the threads of a process and of its workers stand.

    Raises ValueError for a process that is not there, and RunError if nothing can be seen of it.
    """
    _check_process(pid)
    if is_stopped(pid):
        return [
            f"process {pid} is stopped, as by SIGSTOP or a debugger",
            f"do: kill -CONT {pid}, or find out who stopped it",
        ]
    lines = _lines_at(pid)
    _check_process(pid)  # it may have ended meanwhile
    if not lines:
        raise RunError(f"nothing can be seen of process {pid}: {_REMEDY}").see("stall")
    report = [f"process {pid}, {_command_of(pid)}", *lines]
    for child in _descendants_of(pid):
        with suppress(OSError):  # it has ended meanwhile
            if lines := _lines_at(child):
                report += [f"process {child}, which it has started", *lines]
    return report


def _check_process(pid: int) -> None:
    """Raise ValueError for a number that is no process of this user's."""
    try:
        if pid <= 0:  # os.kill takes these for groups of processes
            raise ProcessLookupError
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        raise ValueError(f"no process has the id {pid}") from None
    except PermissionError:
        raise ValueError(f"process {pid} is another user's, expected one of yours") from None


def _lines_at(pid: int) -> list[str]:
    """Lines on where the threads of a process stand, the main one first; none if it does not answer the signal."""
    lines: list[str] = []
    for thread, text in (dumps_of(pid, _ANSWER_S) or {}).items():
        name, stack = "main thread" if thread == pid else f"thread {thread}", stack_in_dump(text)
        if any(frame.is_own for frame in stack):
            lines += [f"{name}:", *stack_lines(stack)]
        else:
            lines.append(f"{name}: in no code of yours, at {stack[0]}" if stack else f"{name}: is not in Python")
    return lines


def _descendants_of(pid: int) -> list[int]:
    """Processes that a process has started, itself or by a fork server; none if that can't be seen."""
    children: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # its thread has ended meanwhile
            children += map(int, path.read_text().split())
    return [each for child in sorted(children) for each in (child, *_descendants_of(child))]


def _command_of(pid: int) -> str:
    """The command line of a process, shortened; "?" if it can't be seen."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return "?"
    return " ".join(" ".join(words).split())[:100]
