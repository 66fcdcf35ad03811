"""Main function of a worker process that runs a program of this installation."""

import json
import os
import signal
import socket
import sys
from importlib.metadata import entry_points

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
    os.environ.update(order["variables"])
    sys.argv[:] = order["command"]
    become_worker(next((word for word in sys.argv[1:] if not word.startswith("-")), sys.argv[0]))
    scripts = entry_points(group="console_scripts", name=sys.argv[0])
    if not scripts:
        sys.exit(f"no program {sys.argv[0]} is installed for {sys.executable}, expected pip install {sys.argv[0]}")
    status = next(iter(scripts)).load()()
    if status:
        sys.exit(status)
