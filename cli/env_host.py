"""`rollflow env-host`: environments on this host for a rollout on another."""

import argparse
from typing import Any

from rollflow.cli import hosting
from rollflow.nodes import EnvHost


def add_to(commands: Any) -> None:
    """Add the command to those of `rollflow`."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "env-host",
        help="step environments here for a rollout on another host",
        description="Step environments, of one agent each or of several, here for a rollout on another host, until it "
        "says goodbye.",
    )
    hosting.add_to(parser, lanes=2, why_lanes="some step while others wait for their actions")
    parser.set_defaults(run=run)


def run(told: argparse.Namespace) -> int:
    """Do it; the exit status."""
    with EnvHost(**hosting.options_of(told)) as host:
        return hosting.serve(host, told)
