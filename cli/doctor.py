"""Say where the threads of a running process and of its workers stand, your own code first.

It is asked by a signal that a rollflow run answers whatever it hangs in, and that breaks nothing off.
"""

import argparse
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from rollflow.stream.data.errors import RunError
from rollflow.stream.observe.stacks import StackFrame, dumps_of, is_stopped, stack_in_dump, stack_lines

_ANSWER_S = 2.0
_MAIN = "main thread"
_REMEDY = "a process answers on Linux, while it runs rollflow with a stall_after; py-spy dump --pid shows any other"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("pid", type=int, metavar="PID", help="the process that runs rollflow, or one of its workers")


def run(args: argparse.Namespace) -> None:
    """Run the command."""
    print(*stack_report(args.pid), sep="\n")


def stack_report(pid: int) -> list[str]:
    """Lines on where the threads of a process and of its workers stand.

    Raises ValueError for a process that is not there, and RunError where nothing can be seen of it.
    """
    _check_process(pid)
    if is_stopped(pid):
        return [
            f"process {pid} is stopped, as by SIGSTOP or a debugger",
            f"do: kill -CONT {pid}, or find out who stopped it",
        ]
    threads = _by_signal(pid)
    _check_process(pid)  # it may have ended meanwhile
    if not threads:
        raise RunError(f"nothing can be seen of process {pid}: {_REMEDY}").see("stall")
    report = [f"process {pid}, {_command_of(pid)}", *_lines_of_all(threads)]
    for child in _descendants_of(pid):
        with suppress(OSError):  # it has ended meanwhile
            if of_child := _by_signal(child):
                report += [f"process {child}, which it has started", *_lines_of_all(of_child)]
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


def _lines_of_all(threads: Sequence[tuple[str, Sequence[StackFrame]]]) -> list[str]:
    return [line for name, stack in threads for line in _lines_of(name, stack)]


def _by_signal(pid: int) -> list[tuple[str, Sequence[StackFrame]]]:
    """(thread, its stack, innermost call first) of a process that answers the signal; the main one comes first.

    Empty where it does not answer.
    """
    dumps = dumps_of(pid, _ANSWER_S) or {}
    return [(_MAIN if thread == pid else f"thread {thread}", stack_in_dump(text)) for thread, text in dumps.items()]


def _lines_of(name: str, stack: Sequence[StackFrame]) -> list[str]:
    if not stack:
        return [f"{name}: is not in Python"]
    if not any(frame.is_own for frame in stack):
        return [f"{name}: in no code of yours, at {stack[0]}"]
    return [f"{name}:", *stack_lines(stack)]


def _descendants_of(pid: int) -> list[int]:
    """Processes that a process has started, itself or by a fork server; none where that can't be seen."""
    children: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # its thread has ended meanwhile
            children += map(int, path.read_text().split())
    return [each for child in sorted(children) for each in (child, *_descendants_of(child))]


def _command_of(pid: int) -> str:
    """The command line of a process, shortened; "?" where it can't be seen."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return "?"
    return " ".join(" ".join(words).split())[:100]
