"""Launcher of programs as processes of this machine."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from time import monotonic

from rollflow.nodes.closing import closing_on_error
from rollflow.nodes.launch.launcher import DRAINING_S, SECRET_VARIABLE, Handle, named
from rollflow.nodes.launch.program_process import ProgramProcess

_ENDING_S = 1.0  # for programs that are ending by themselves
_LEAVING_S = 5.0  # for those that are told to end once nobody needs them


class ProcessLauncher:
    """A `Launcher` of processes on this machine. They have no resources of their own.

    name          at the beginning of the programs' names
    are_workers   whether they are programs of this installation that start no workers of their own; else any programs
    output        called with a program's name, and bytes that it has written, with none at their end; None: its last
                  lines are kept alone
    """

    def __init__(
        self,
        name: str = "process",
        *,
        are_workers: bool = True,
        output: Callable[[str, bytes], None] | None = None,
    ) -> None:
        self._name, self._are_workers, self._output = name, are_workers, output
        self._programs: dict[Handle, ProgramProcess] = {}
        self._leaving: dict[ProgramProcess, float] = {}  # told to end -> when they are killed
        self._started = 0
        self._command: tuple[str, ...] = ()
        self._secret = ""

    def start(self, n: int, command: Sequence[str], secret: str, resources: Mapping[str, float]) -> list[Handle]:
        """Start so many programs: see `Launcher`. Raises ValueError for any resources."""
        if resources:
            raise ValueError(f"resources are {dict(resources)}, expected none: processes share this machine")
        self._command, self._secret = tuple(command), secret
        with closing_on_error(self.stop):
            return self.scale(n)

    def alive(self) -> list[Handle]:
        """The programs that run. Those that were told to end are killed where their time is over."""
        self._reap(monotonic())
        for handle, program in self._programs.items():
            handle.end = program.end or ""
        return [handle for handle, program in self._programs.items() if program.end is None]

    def logs(self, handle: Handle) -> str:
        """Lines that a program has written last."""
        return self._programs[handle].log

    def restart(self, handle: Handle) -> None:
        """Start a program again; one that runs is killed first."""
        self._programs[handle].kill()
        self._programs[handle], handle.end = self._run(handle), ""

    def scale(self, n: int) -> list[Handle]:
        """Have so many programs that run: see `Launcher`."""
        self._programs = {handle: program for handle, program in self._programs.items() if program.end is None}
        self._dismiss(list(self._programs)[n:])
        while len(self._programs) < n:
            handle = Handle(f"{self._name}-{self._started}")
            self._started += 1
            self._programs[handle] = self._run(handle)
        return list(self._programs)

    def stop(self) -> None:
        """End all programs: those that are ending by themselves first, the others by SIGTERM, and then by SIGKILL."""
        _await(self._programs.values(), _ENDING_S)
        self._dismiss(list(self._programs))
        _await(self._leaving, _LEAVING_S)
        self._reap(math.inf)

    def _dismiss(self, handles: Collection[Handle]) -> None:
        """Tell programs to end."""
        for handle in handles:
            program = self._programs.pop(handle)
            program.terminate()
            self._leaving[program] = monotonic() + DRAINING_S

    def _reap(self, now: float) -> None:
        """Kill those that were told to end and have not in time."""
        for program, until in list(self._leaving.items()):
            if program.end is None and now >= until:
                program.kill()
            if program.end is not None:
                del self._leaving[program]

    def _run(self, handle: Handle) -> ProgramProcess:
        variables = {SECRET_VARIABLE: self._secret}
        output = None if self._output is None else partial(self._output, handle.name)
        return ProgramProcess(named(self._command, handle), variables, is_worker=self._are_workers, output=output)


def _await(programs: Collection[ProgramProcess], timeout: float) -> None:
    until = monotonic() + timeout
    for program in programs:
        program.wait(max(0.0, until - monotonic()))
