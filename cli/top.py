"""Look at the runs of this user on this machine, until Ctrl-C.

Shown are stages and edges, who waits for whom, returns, policy versions, losses, and what holds each run back.
"""

import argparse
import importlib
import json
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rollflow.stream.data.system import require_packages
from rollflow.stream.observe.run_socket import run_folder, snapshot_at, snapshots
from rollflow.stream.observe.snapshot import with_rates


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_run(parser)
    parser.add_argument("--once", action="store_true", help="show them once, with shares since they began")
    parser.add_argument("--json", action="store_true", help="print a JSON array of their snapshots a line")
    parser.add_argument("--every", type=float, default=1.0, metavar="S", help="seconds between two looks (1)")


def add_run(parser: argparse.ArgumentParser) -> None:
    """Add the argument that `load_snapshots` reads."""
    parser.add_argument(
        "address",
        nargs="?",
        metavar="ADDRESS",
        help="one run: its process id, or unix:/path of its socket (all of them)",
    )


def run(args: argparse.Namespace) -> None:
    """Run the command."""
    if not args.every > 0:
        raise ValueError(f"--every is {args.every:g}, expected a number of seconds above 0")
    once = args.once or not (args.json or sys.stdout.isatty())
    if not args.json:
        require_packages("rollflow top without --json", "view", "rich")
    poller = SnapshotPoller(args.address)
    try:
        if args.json:
            print(json.dumps(poller.next()), flush=True)
            while not once:
                time.sleep(args.every)
                print(json.dumps(poller.next()), flush=True)
        else:
            picture = importlib.import_module("rollflow.cli.run_picture")
            picture.show(poller.next, str(run_folder()), None if once else args.every)
    except KeyboardInterrupt:
        pass


class SnapshotPoller:
    """Takes snapshots of runs, again and again. From any thread.

    address    of the run; None: all runs
    least_s    between two looks; whoever asks earlier gets the last one
    """

    def __init__(self, address: str | None, least_s: float = 0.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._address, self._least_s, self._due, self._clock = address, least_s, 0.0, clock
        self._lock = threading.Lock()
        self._before: dict[str, dict[str, Any]] = {}
        self._runs: list[dict[str, Any]] = []

    def next(self) -> list[dict[str, Any]]:
        """Snapshots of the runs now, with rates since the last ones. Raises ValueError as `load_snapshots` does."""
        with self._lock:
            if self._clock() >= self._due:
                self._due, self._runs = self._clock() + self._least_s, []  # also if the run has ended
                found, before = load_snapshots(self._address), self._before
                self._before = {each["path"]: each for each in found}
                self._runs = [with_rates(each, before.get(each["path"])) for each in found]
            return self._runs


def load_snapshots(address: str | None) -> list[dict[str, Any]]:
    """Snapshots of the run, or of the process, that an address names; None: of all. Raises ValueError for none."""
    if address is None:
        return snapshots()
    if address.isdigit():
        found = [each for each in snapshots() if each["pid"] == int(address)]
        if not found:
            raise ValueError(f"process {address} has no run in {run_folder()}, expected the process id of one")
        return found
    try:
        return [snapshot_at(Path(address.removeprefix("unix:")))]
    except OSError as error:
        raise ValueError(f"{address}: {error}, expected a process id, or unix:/path of a run's socket") from error
