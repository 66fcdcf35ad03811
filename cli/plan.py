"""`rollflow plan`: what other numbers of lanes, workers and slots, or another place, would give a rollout."""

import argparse
import json
import time
from typing import Any

from rollflow.cli import arguments
from rollflow.cli.rollout import add_setting, setting_of
from rollflow.nodes import Rollout


def add_to(commands: Any) -> None:
    """Add the command to those of `rollflow`."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "plan",
        help="predict what other numbers of lanes, workers and slots, or another place, would give a rollout",
        description="Run a rollout here for some seconds, measure its environments and its module, and predict by a "
        "simulation how many steps per second other settings would give, what would hold them back, how old batches "
        "would be, and the memory. The last line says what to change first.",
    )
    add_setting(parser)
    parser.add_argument("--prefetch", type=int, default=0, help="batches that it may run ahead of its reader (0)")
    arguments.add_acting(parser, otherwise="a default module for the spaces")
    parser.add_argument("--seconds", type=float, default=3.0, metavar="S", help="how long it runs to be measured (3)")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the command; the exit status."""
    if not args.seconds > 0:
        raise ValueError(f"--seconds is {args.seconds:g}, expected more than 0")
    options: dict[str, Any] = {**setting_of(args), **arguments.acting_of(args), "prefetch": args.prefetch}
    with Rollout(arguments.environment_of(args.env), **options) as rollout:
        until = time.monotonic() + args.seconds
        for _ in rollout.batches():
            if time.monotonic() >= until:
                break
        plan = rollout.what_if()
    print(json.dumps(plan.as_dict()) if args.json else plan)
    return 0
