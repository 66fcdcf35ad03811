"""`rollflow rollout-host`: whole rollouts on this host, for a trainer on another."""

import argparse
from typing import Any

from rollflow.cli import hosting
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
    parser.add_argument(
        "--module",
        metavar="PACKAGE.MODULE:CALLABLE",
        help="makes the module of (observation space, action space) (the default module, as the rollout has it)",
    )
    for name in ("env-to-module", "module-to-env"):
        parser.add_argument(
            f"--{name}",
            metavar="PACKAGE.MODULE:CALLABLE",
            help=f"what the rollout is given as {name.replace('-', '_')}_connector",
        )
    parser.add_argument("--device", help="where forward passes are done (where the module is)")
    parser.set_defaults(run=run)


def run(told: argparse.Namespace) -> int:
    """Do it; the exit status."""
    acting = {
        "module": hosting.callable_of(told.module, "--module"),
        "env_to_module_connector": hosting.callable_of(told.env_to_module, "--env-to-module"),
        "module_to_env_connector": hosting.callable_of(told.module_to_env, "--module-to-env"),
        "device": told.device,
    }
    with RolloutHost(**hosting.options_of(told), **acting) as host:
        return hosting.serve(host, told)
