"""Write a trace of a running run: its stages, lanes and fragments on one time axis. Ctrl-C ends it before its time.

Open the file in ui.perfetto.dev or chrome://tracing.
"""

import argparse
import signal
import sys
import threading
from itertools import chain
from pathlib import Path
from time import monotonic

from rollflow.cli.top import load_snapshots
from rollflow.stream.observe.run_socket import trace_at
from rollflow.stream.observe.trace import check_trace, open_trace

_SECONDS = 10.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("address", metavar="ADDRESS", help="the run: its process id, or unix:/path of its socket")
    parser.add_argument("seconds", nargs="?", type=float, default=_SECONDS, metavar="SECONDS", help="how long (10)")
    parser.add_argument("--to", metavar="FILE", help="the file, compressed if it ends in .gz (rollflow-PID.trace.gz)")


def run(args: argparse.Namespace) -> None:
    """Run the command."""
    if not args.seconds > 0:
        raise ValueError(f"SECONDS is {args.seconds:g}, expected a number above 0")
    check_trace(args.to)
    runs = load_snapshots(args.address)
    if len(runs) > 1:
        paths = ", ".join(f"unix:{each['path']}" for each in runs)
        raise ValueError(f"process {args.address} has {len(runs)} runs, expected one of {paths}")
    path = args.to or f"rollflow-{runs[0]['pid']}.trace.gz"
    until, stopped = monotonic() + args.seconds, threading.Event()
    pieces = trace_at(Path(runs[0]["path"]), lambda: stopped.is_set() or monotonic() >= until)
    first = next(pieces)  # before a file is made for nothing
    before = signal.signal(signal.SIGINT, lambda *_: stopped.set())  # so that it is written to its end
    try:
        with open_trace(path) as file:
            file.writelines(chain([first], pieces))
    finally:
        signal.signal(signal.SIGINT, before)
    print(f"{path}: open it in https://ui.perfetto.dev or chrome://tracing", file=sys.stderr)
