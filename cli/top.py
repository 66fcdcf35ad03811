"""`rollflow top`: the runs of this user on this machine, or of a process elsewhere, in the terminal."""

import argparse
import importlib
import importlib.util
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from rollflow.cli import arguments
from rollflow.nodes.env.remote.remote_envs import secret_bytes
from rollflow.nodes.env.remote.software import software
from rollflow.stream.net.lookers import look_at
from rollflow.stream.snapshots.rates import with_rates
from rollflow.stream.snapshots.run_folder import run_folder, snapshot_at, snapshots

Look = Callable[[], list[dict[str, Any]]]


def add_to(commands: Any) -> None:
    """Add the command to those of `rollflow`."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "top",
        help="look at the runs of this user on this machine, or elsewhere",
        description="Look at the runs of this user on this machine, or of a process elsewhere, until q or Ctrl-C: "
        "their stages and edges, who waits for whom, returns, policy versions, losses, and what holds each of them "
        "back. Keys scroll, choose a run, and show where its threads stand and how long its calls take.",
    )
    add_run(parser)
    parser.add_argument("--once", action="store_true", help="show them once, with shares since they began")
    parser.add_argument("--json", action="store_true", help="print a JSON array of their snapshots a line")
    parser.add_argument("--every", type=float, default=1.0, metavar="S", help="seconds between two looks (1)")
    arguments.add_protection(parser)
    parser.set_defaults(run=_run)


def add_run(parser: argparse.ArgumentParser) -> None:
    """Add the argument that `looked_at` reads."""
    parser.add_argument(
        "address",
        nargs="?",
        metavar="ADDRESS",
        help="one run: its process id, or unix:/path of its socket; "
        "or tcp://host:port, on which a rollout waits for hosts, or a trainer for rollouts (all runs here)",
    )


def _run(args: argparse.Namespace) -> int:
    if not args.every > 0:
        raise ValueError(f"--every is {args.every:g}, expected a number of seconds above 0")
    elsewhere = _elsewhere(args)
    once = args.once or not (args.json or sys.stdout.isatty())
    if not args.json and importlib.util.find_spec("rich") is None:
        raise ValueError("rollflow top takes the package rich, expected --json, or pip install 'rollflow[view]'")
    looks = RunLooks(args.address, elsewhere)
    try:
        if args.json:
            _print_json(looks, args.every, once=once)
        elif once:
            importlib.import_module("rollflow.cli.run_picture").show(looks.next(), str(run_folder()))
        else:
            viewer = importlib.import_module("rollflow.cli.run_viewer")
            view = viewer.View(str(run_folder()), viewer.ASKS if elsewhere is None else {})
            viewer.show_live(looks.next, args.every, view)
    except KeyboardInterrupt:
        pass
    return 0


def _print_json(looks: "RunLooks", every: float, *, once: bool) -> None:
    while True:
        print(json.dumps(looks.next()), flush=True)
        if once:
            return
        time.sleep(every)


class RunLooks:
    """Looks at runs, one after the other.

    address      of the run that is looked at; None: all
    elsewhere    looks at a process elsewhere; None: that is not asked for
    """

    def __init__(self, address: str | None, elsewhere: Look | None = None) -> None:
        self._look = elsewhere or partial(looked_at, address)
        self._before: dict[str, dict[str, Any]] = {}

    def next(self) -> list[dict[str, Any]]:
        """Snapshots of the runs now, with rates since the look before. Raises ValueError as `looked_at` does."""
        found, before = self._look(), self._before
        self._before = {each["path"]: each for each in found}
        return [with_rates(each, before.get(each["path"])) for each in found]


def _elsewhere(args: argparse.Namespace) -> Look | None:
    """A look at the process elsewhere that the arguments name; None: they name none. Raises ValueError for others."""
    secret, tls = arguments.secret_of(args), arguments.tls_of(args, listens=False)
    address = args.address or ""
    if not address.startswith("tcp://"):
        if secret is not None or tls is not None:
            raise ValueError("--secret-… and --tls are for tcp://host:port, expected such an address")
        return None
    return partial(look_at, address, secret=secret_bytes(secret), tls=tls, software=software())


def looked_at(address: str | None) -> list[dict[str, Any]]:
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
        raise ValueError(
            f"{address}: {error}, expected a process id, unix:/path of a run's socket, or for `rollflow top` "
            "tcp://host:port"
        ) from error
