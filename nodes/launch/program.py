"""Main function of a worker process that runs a program of this installation."""

import json
import os
import shutil
import signal
import socket
import sys
from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import NoReturn

from rollflow.nodes.env.workers.lane_server import end_with_parent
from rollflow.nodes.env.workers.worker_process import become_worker


def main(life: int, fds: list[int]) -> None:
    """Run the program that the first socket names, with all that it writes going to the second.

    life    pipe at whose end this process ends
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever started this process ends it
    end_with_parent(life)
    orders, output = fds
    for stream in (1, 2):
        os.dup2(output, stream)
    os.close(output)
    for written in (sys.stdout, sys.stderr):
        written.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    with socket.socket(fileno=orders) as sock, sock.makefile() as lines:
        order = json.loads(lines.readline())
    if not order["is_worker"]:
        _become(order["command"], order["environment"] | order["variables"])
    os.environ.update(order["variables"])
    sys.argv[:] = order["command"]
    become_worker(next((word for word in sys.argv[1:] if not word.startswith("-")), sys.argv[0]))
    scripts = entry_points(group="console_scripts", name=sys.argv[0])
    if not scripts:
        sys.exit(f"no program {sys.argv[0]} is installed for {sys.executable}, expected pip install {sys.argv[0]}")
    status = next(iter(scripts)).load()()
    if status:
        sys.exit(status)


def path_of_program(name: str, environment: Mapping[str, str]) -> str | None:
    """Where a program is, in PATH; those of this installation are found first. None: nowhere."""
    path = os.pathsep.join([os.path.dirname(sys.executable), environment.get("PATH", os.defpath)])
    return shutil.which(name, path=path)


def _become(command: list[str], environment: dict[str, str]) -> NoReturn:
    """Be another program from now on, which ends with the same pipe."""
    program = path_of_program(command[0], environment)
    if program is None:
        sys.exit(f"no program {command[0]} is found, expected one in PATH")
    os.execve(program, [program, *command[1:]], environment | {"PYTHONUNBUFFERED": "1"})
