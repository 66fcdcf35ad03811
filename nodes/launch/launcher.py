"""The interface of launchers: five verbs by which programs are started somewhere and looked after."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

SECRET_VARIABLE = "ROLLFLOW_SECRET"  # in the environment of a program that a launcher starts
NAME = "{name}"  # argument of a command


@dataclass(slots=True, eq=False)
class Handle:
    """A program that a launcher has started; `Launcher.alive` brings it up to date.

    name     stays the same when the program is started again
    waits    what it waits for before it can begin, in words; "" where it waits for nothing
    end      how it has ended, in words; "" while it runs, and where it ended as it should
    """

    name: str
    waits: str = ""
    end: str = ""


def named(command: Sequence[str], handle: Handle) -> list[str]:
    """A command with the name of its handle."""
    return [handle.name if part == NAME else part for part in command]


class Launcher(Protocol):
    """Starts programs of one command somewhere: on this machine, or by an engine that places them on others.

    A launcher starts once. It is used by one thread at a time. None of its programs outlives the process that has it,
    not even where that process is killed.
    """

    def start(self, n: int, command: Sequence[str], secret: str, resources: Mapping[str, float]) -> list[Handle]:
        """Start so many programs.

            command      name of the program and its arguments, such as ("rollflow", "rollout-host", …); `{name}` as
                         an argument stands for the name of the program's handle
            secret       handed over in the environment, as `SECRET_VARIABLE`
            resources    of each program: name -> amount

        Raises ValueError for resources that can't be given.
        """

    def alive(self) -> list[Handle]:
        """The programs that run, or wait for their place."""

    def logs(self, handle: Handle) -> str:
        """Lines that a program has written last."""

    def restart(self, handle: Handle) -> None:
        """Start a program again; one that runs is ended first."""

    def stop(self) -> None:
        """End all programs. Those that are ending by themselves are given the time for it."""
