"""Launcher of programs as processes of this machine."""

from collections.abc import Iterable, Mapping, Sequence
from time import monotonic

from rollflow.nodes.closing import closing_on_error
from rollflow.nodes.launch.launcher import SECRET_VARIABLE, Handle, named
from rollflow.nodes.launch.program_process import ProgramProcess

_ENDING_S = 1.0  # for programs that are ending by themselves
_LEAVING_S = 5.0  # for those that are told to end once nobody needs them
_PRELOAD = "rollflow.nodes.offloaded.rollout_host"  # imports nearly all that a host needs


class ProcessLauncher:
    """A `Launcher` of processes on this machine. They have no resources of their own."""

    def __init__(self) -> None:
        self._programs: dict[Handle, ProgramProcess] = {}
        self._command: tuple[str, ...] = ()
        self._secret = ""

    def start(self, n: int, command: Sequence[str], secret: str, resources: Mapping[str, float]) -> list[Handle]:
        """Start so many programs: see `Launcher`. Raises ValueError for any resources."""
        if resources:
            raise ValueError(f"resources are {dict(resources)}, expected none: processes share this machine")
        self._command, self._secret = tuple(command), secret
        with closing_on_error(self.stop):
            for number in range(n):
                handle = Handle(f"process-{number}")
                self._programs[handle] = self._run(handle)
        return list(self._programs)

    def alive(self) -> list[Handle]:
        """The programs that run."""
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

    def stop(self) -> None:
        """End all programs: those that are ending by themselves first, the others by SIGTERM, and then by SIGKILL."""
        programs = list(self._programs.values())
        _await(programs, _ENDING_S)
        for program in programs:
            program.terminate()
        _await(programs, _LEAVING_S)
        for program in programs:
            program.kill()
        self._programs.clear()

    def _run(self, handle: Handle) -> ProgramProcess:
        command = named(self._command, handle)
        preload = _PRELOAD if command[0] == "rollflow" else None
        return ProgramProcess(command, {SECRET_VARIABLE: self._secret}, preload)


def _await(programs: Iterable[ProgramProcess], timeout: float) -> None:
    until = monotonic() + timeout
    for program in programs:
        program.wait(max(0.0, until - monotonic()))
