"""Layouts: programs that belong together, such as a trainer and its rollouts, as a TOML file names them."""

import re
import shlex
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollflow.nodes.launch.launcher import NAME

PROGRAM_NAME = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?")
_ADDRESS = re.compile(r"\{([a-z][a-z0-9-]*)\}")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutProgram:
    """A program of a layout: a table of the file, with these keys.

    name       of the table
    command    program and arguments, as a shell would part them; `{other}` in it is the address of the program `other`,
               and `{name}` as an argument is the program's own name, with its number
    count      how many run
    port       that it listens on; None: nobody dials it
    http       port on which it answers GET /health and /ready, as `rollflow serve --http` does; None: it does not
    """

    name: str
    command: Sequence[str]
    count: int = 1
    port: int | None = None
    http: int | None = None

    @property
    def listens(self) -> bool:
        """True if others dial the program, so that it has to be at a known place."""
        return self.port is not None or self.http is not None

    def addressed(self, address_of: Callable[[str], str]) -> list[str]:
        """The command, with the addresses of the programs that it names."""
        return [
            part if part == NAME else _ADDRESS.sub(lambda found: address_of(found[1]), part) for part in self.command
        ]


def read_layout(path: Path) -> list[LayoutProgram]:
    """The programs of a file, in its order. Raises ValueError for what is no layout, OSError for what can't be read."""
    try:
        tables = tomllib.loads(path.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: {error}, expected TOML") from error
    programs = [_program(f"{path}: {name}", name, table) for name, table in tables.items()]
    if not programs:
        raise ValueError(f"{path} is empty, expected a table for each program, such as [trainer]")
    listening = {program.name for program in programs if program.port is not None}
    for program in programs:
        for part in program.command:
            for named in _ADDRESS.findall(part):
                if named not in listening and part != NAME:
                    if f"{{{named}}}" == NAME:
                        raise ValueError(
                            f"{path}: {program.name}.command has {part!r}, expected {NAME} as an argument by itself"
                        )
                    expected = ", ".join(sorted(listening)) or "none, for no program has one"
                    raise ValueError(
                        f"{path}: {program.name}.command has {{{named}}}, expected a program with a port: {expected}"
                    )
    return programs


def _program(where: str, name: str, table: Any) -> LayoutProgram:
    if not isinstance(table, dict) or not PROGRAM_NAME.fullmatch(name) or name == "name":
        raise ValueError(f"{where}, expected a table whose name has small letters, digits and -, and is not 'name'")
    unknown = table.keys() - {"command", "count", "port", "http"}
    if unknown:
        raise ValueError(f"{where}.{min(unknown)}, expected command, count, port or http")
    command, count = table.get("command"), table.get("count", 1)
    if not isinstance(command, str) or not command.strip():
        raise ValueError(f"{where}.command is {command!r}, expected a string, such as 'python train.py'")
    if type(count) is not int or count < 1:
        raise ValueError(f"{where}.count is {count!r}, expected a whole number from 1 on")
    ports = {key: table[key] for key in ("port", "http") if key in table}
    for key, port in ports.items():
        if type(port) is not int or not 0 < port < 1 << 16:
            raise ValueError(f"{where}.{key} is {port!r}, expected a whole number from 1 to 65535")
    if ports and count > 1:
        raise ValueError(f"{where} has a port and count is {count}, expected 1: one program listens on a port")
    if len(set(ports.values())) < len(ports):
        raise ValueError(f"{where}.http is {ports['http']}, expected another port than {where}.port")
    try:
        parts = shlex.split(command)
    except ValueError as error:
        raise ValueError(f"{where}.command is {command!r}: {error}") from error
    return LayoutProgram(name=name, command=parts, count=count, **ports)
