"""Write a trace of a running run: its stages, lanes and fragments on one time axis. Ctrl-C ends it before its time.

Open the file in ui.perfetto.dev or chrome://tracing.
"""

import argparse
import sys
from pathlib import Path

from rollflow.cli.top import load_snapshots
from rollflow.stream.observe.run_socket import trace_at
from rollflow.stream.observe.trace import check_trace


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("address", metavar="ADDRESS", help="the run: its process id, or unix:/path of its socket")
    parser.add_argument("seconds", nargs="?", type=float, default=10.0, metavar="SECONDS", help="how long (10)")
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
    path = Path(args.to or f"rollflow-{runs[0]['pid']}.trace.gz")
    trace_at(Path(runs[0]["path"]), path, args.seconds)
    print(f"{path}: open it in https://ui.perfetto.dev or chrome://tracing", file=sys.stderr)
