"""Actor of Ray that runs a program."""

from collections.abc import Mapping, Sequence

from rollflow.nodes.launch.process_launcher import ProgramProcess

_LOOK_S = 3600.0


class RayHost:
    """Actor without arguments, and without a state that a restart could lose: Ray calls `serve` again then."""

    def __init__(self) -> None:
        self._program: ProgramProcess | None = None
        self._is_to_end = False

    def serve(self, command: Sequence[str], variables: Mapping[str, str]) -> tuple[str, str]:
        """Run a program until it ends: how it ended, "" as it should, and the lines that it wrote last.

        It runs in a process of its own, which ends with the actor: what an environment does to its process, such as
        a segmentation fault, is said then.
        """
        self._program = program = ProgramProcess(command, variables)
        if self._is_to_end:  # since before it had begun
            program.terminate()
        while (end := program.wait(_LOOK_S)) is None:
            pass
        return end, program.log

    def terminate(self) -> None:
        """Tell the program to end, by SIGTERM."""
        self._is_to_end = True
        if self._program is not None:
            self._program.terminate()

    def log(self) -> str:
        """Lines that the program has written last."""
        return "" if self._program is None else self._program.log
