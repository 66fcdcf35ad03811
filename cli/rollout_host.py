"""Run whole rollouts here, environments, connectors and copies of modules, until the other side says goodbye.

They are for a Rollout or a MultiAgentRollout over RemoteRollouts on another host, whose modules and connectors must be
those that are named here.
"""

import argparse

from rollflow import RolloutHost
from rollflow.cli import arguments, env_host


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    lanes_help = "each has a thread, for environments that wait or let the interpreter go"
    env_host.add_arguments(parser, lanes=1, lanes_help=lanes_help)
    arguments.add_acting(
        parser,
        otherwise="the default module, as the rollout has it",
        several=", or is a dict of those; several by id: ID= alone is a default one",
    )


def run(args: argparse.Namespace) -> int:
    """Serve the rollout that dials, or is dialled, until it ends or SIGTERM comes; the exit status."""
    return env_host.serve(args, RolloutHost, arguments.acting_of)
