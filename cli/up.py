"""`rollflow up`, `rollflow status` and `rollflow down`: the programs of a layout, as processes of this machine."""

import argparse
import fcntl
import hashlib
import json
import os
import re
import secrets
import signal
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from rollflow.cli import layout_scripts
from rollflow.nodes.launch.host_keeper import HostKeeper
from rollflow.nodes.launch.launcher import SECRET_VARIABLE
from rollflow.nodes.launch.layout import LayoutProgram, read_layout
from rollflow.nodes.launch.process_launcher import ProcessLauncher
from rollflow.nodes.launch.program import path_of_program

_LOOK_S = 0.25
_LONGEST_LINE = 1 << 16  # bytes
_LINE = re.compile(rb"\r*+([^\r\n]*+)(?:\n|\r++(?:\n|(?=.)))", re.DOTALL)  # a last \r may be half of \r\n
# The system's struct flock, by which it is asked who holds a lock: kind, whence, start, length and pid; macOS has the
# first two at the end.
_IS_MACOS = sys.platform == "darwin"
_FLOCK = struct.Struct("qqihh" if _IS_MACOS else "hhqqi0q")
_READING = (0, 0, 0, fcntl.F_RDLCK, os.SEEK_SET) if _IS_MACOS else (fcntl.F_RDLCK, os.SEEK_SET, 0, 0, 0)


def add_to(commands: Any) -> None:
    """Add the three commands to those of `rollflow`."""
    for name, run, text in (
        ("up", _up, "start the programs of a layout here, and look after them until the first of them has ended"),
        ("status", _status, "say what becomes of the programs that `rollflow up` has started"),
        ("down", _down, "end the programs that `rollflow up` has started"),
    ):
        parser: argparse.ArgumentParser = commands.add_parser(
            name, help=text, description=f"{text[0].upper()}{text[1:]}."
        )
        parser.add_argument("layout", type=Path, metavar="LAYOUT", help="a TOML file: see docs/reference/layouts.md")
        if run is _up:
            parser.add_argument(
                "--print",
                choices=("slurm", "kubernetes", "ssh"),
                help="start nothing, and print a script, or manifests, that start it elsewhere",
            )
            parser.add_argument("--image", help="of the containers, for --print kubernetes")
        parser.set_defaults(run=run)


def _up(args: argparse.Namespace) -> int:
    programs = read_layout(args.layout)
    if args.print is not None:
        print(_script(args, programs), end="")
        return 0
    with _taken(args.layout) as folder, ExitStack() as stack:
        os.chdir(args.layout.resolve().parent)
        for program in programs:
            if path_of_program(name := program.command[0], os.environ) is None:
                raise ValueError(
                    f"{args.layout}: {program.name}.command: no program {name!r} is found, expected one in PATH"
                )
        secret = os.environ.get(SECRET_VARIABLE) or secrets.token_hex(32)
        output = _Output()
        keepers = [stack.enter_context(closing(_kept(program, programs, secret, output))) for program in programs]
        while not keepers[0].is_done:
            for keeper in keepers:
                keeper.check(is_first=False)
            _write(folder, {name: text for keeper in keepers for name, text in keeper.states.items()})
            time.sleep(_LOOK_S)
    return 0


def _status(args: argparse.Namespace) -> int:
    folder = _folder_of(args.layout)
    if (owner := _said_owner_of(folder, args.layout)) is None:
        return 1
    states = _states_of(folder, owner)
    width = max(map(len, states), default=0)
    print(*(f"{name:<{width}}  {text}" for name, text in states.items()), sep="\n")
    return 0


def _down(args: argparse.Namespace) -> int:
    folder = _folder_of(args.layout)
    if (owner := _said_owner_of(folder, args.layout)) is None:
        return 1
    with suppress(ProcessLookupError):  # it has ended just now
        os.kill(owner, signal.SIGTERM)
    with (folder / "lock").open("a+") as lock:
        fcntl.lockf(lock, fcntl.LOCK_SH)  # once it has ended; `_owner_of` does not see who reads
    return 0


def _script(args: argparse.Namespace, programs: Sequence[LayoutProgram]) -> str:
    """What `--print` asks for. Raises ValueError where an image is missing, or is not asked for."""
    if (args.print == "kubernetes") != (args.image is not None):
        raise ValueError(
            "--print kubernetes needs --image IMAGE"
            if args.image is None
            else "--image goes with --print kubernetes alone"
        )
    name = args.layout.stem
    if args.print == "slurm":
        return layout_scripts.slurm(name, programs)
    if args.print == "ssh":
        return layout_scripts.ssh(name, programs)
    return layout_scripts.kubernetes(name, programs, args.image)


class _Output:
    """Prints what programs write, line by line, behind their names. From any thread.

    A line ends with a newline, with the carriage return of a progress bar, or where it becomes too long.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._begun: dict[str, bytes] = {}  # lines whose ends have not come

    def __call__(self, name: str, data: bytes) -> None:
        """Print the lines that end with these bytes; none: the program has ended, and so has its line."""
        with self._lock:
            text, place = self._begun.pop(name, b"") + data, 0
            while line := _LINE.match(text, place):
                self._print(name, line[1])
                place = line.end()
            rest = text[place:]
            if data and len(rest) < _LONGEST_LINE:
                self._begun[name] = rest
            elif rest := rest.strip(b"\r"):
                self._print(name, rest)

    def _print(self, name: str, line: bytes) -> None:
        print(f"{name} | {line.decode(errors='replace')}", flush=True)


def _kept(program: LayoutProgram, programs: Sequence[LayoutProgram], secret: str, output: _Output) -> HostKeeper:
    """The keeper of a program's processes, which are started."""
    ports = {each.name: each.port for each in programs}
    launcher = ProcessLauncher(program.name, are_workers=False, output=output)
    command = program.addressed(lambda name: f"tcp://127.0.0.1:{ports[name]}")
    return HostKeeper(launcher, launcher.start(program.count, command, secret, {}), noun="program")


def _folder_of(layout: Path) -> Path:
    """The folder of what is known of a layout that is up: its lock, and `status.json`. Only its user may read it."""
    ours = Path(tempfile.gettempdir()) / f"rollflow-{os.getuid()}"
    ours.mkdir(mode=0o700, exist_ok=True)
    if ours.lstat().st_uid != os.getuid():
        raise PermissionError(f"{ours} is another user's, expected a folder of this one's")
    digest = hashlib.sha256(os.fsencode(layout.resolve())).hexdigest()[:16]
    folder = ours / f"{layout.stem}-{digest}"
    folder.mkdir(exist_ok=True)
    return folder


@contextmanager
def _taken(layout: Path) -> Iterator[Path]:
    """The folder of a layout, for as long as it is up here. Raises ValueError where it is up already."""
    folder = _folder_of(layout)
    with (folder / "lock").open("a") as lock:
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"{layout} is up already, expected `rollflow down {layout}` first") from None
        _write(folder, {})
        yield folder


def _said_owner_of(folder: Path, layout: Path) -> int | None:
    """The process that has a layout up; where none has, that is printed."""
    owner = _owner_of(folder)
    if owner is None:
        print(f"{layout} is not up", file=sys.stderr)
    return owner


def _owner_of(folder: Path) -> int | None:
    """The process that has a layout up; None: none has. It takes no lock, so that it is in nobody's way.

    Raises ValueError where that process has no number here.
    """
    with (folder / "lock").open("a+") as lock:
        found = _FLOCK.unpack(fcntl.fcntl(lock, fcntl.F_GETLK, _FLOCK.pack(*_READING)))
    kind, pid = (found[3], found[2]) if _IS_MACOS else (found[0], found[4])
    if kind == fcntl.F_UNLCK:
        return None
    if pid <= 0:  # os.kill takes these for groups of processes
        raise ValueError(f"{folder} is held by a process of another container, expected one that is seen from here")
    return int(pid)


def _states_of(folder: Path, owner: int) -> dict[str, str]:
    """What becomes of the programs of the process that has a layout up; none before it has said so."""
    with suppress(FileNotFoundError):
        found = json.loads((folder / "status.json").read_text())
        if found["pid"] == owner:  # else one has written it that has ended
            return dict(found["states"])
    return {}


def _write(folder: Path, states: Mapping[str, str]) -> None:
    new = folder / "status.new"
    new.write_text(json.dumps({"pid": os.getpid(), "states": dict(states)}))
    new.replace(folder / "status.json")
