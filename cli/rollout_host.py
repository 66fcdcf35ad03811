"""`rollflow rollout-host`: whole rollouts on this host, for a trainer on another."""

import argparse
from typing import Any

from rollflow.cli import acting, hosting
from rollflow.nodes import RolloutHost


def add_to(commands: Any) -> None:
    """Add the command to those of `rollflow`."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "rollout-host",
        help="run whole rollouts here, environments and policy, for a trainer on another host",
        description="Run whole rollouts here, environments, connectors and a copy of the module, for a Rollout over "
        "RemoteRollouts on another host, until it says goodbye. Module and connectors must be those of the rollout.",
    )
    hosting.add_to(parser, lanes=1, why_lanes="each has a thread, for environments that wait or let the interpreter go")
    acting.add_to(parser, otherwise="the default module, as the rollout has it")
    parser.set_defaults(run=run)


def run(told: argparse.Namespace) -> int:
    """Do it; the exit status."""
    with RolloutHost(**hosting.options_of(told), **acting.options_of(told)) as host:
        return hosting.serve(host, told)
