"""What the commands have in common that act: with which module, behind which connectors, and where."""

import argparse
from typing import Any

from rollflow.cli import hosting


def add_to(parser: argparse.ArgumentParser, *, otherwise: str) -> None:
    """Add the arguments that say how actions are found.

    otherwise    what the module is where nothing is said
    """
    parser.add_argument(
        "--module",
        metavar="PACKAGE.MODULE:CALLABLE",
        help=f"makes the module of (observation space, action space) ({otherwise})",
    )
    for name in ("env-to-module", "module-to-env"):
        parser.add_argument(
            f"--{name}",
            metavar="PACKAGE.MODULE:CALLABLE",
            help=f"what the rollout is given as {name.replace('-', '_')}_connector",
        )
    parser.add_argument("--compile", action="store_true", help="forward passes by torch.compile")
    parser.add_argument("--device", help="where forward passes are done (where the module is)")


def options_of(told: argparse.Namespace) -> dict[str, Any]:
    """What the arguments say, as a rollout takes it. Raises ValueError where they name what is not there."""
    return {
        "module": hosting.callable_of(told.module, "--module"),
        "env_to_module_connector": hosting.callable_of(told.env_to_module, "--env-to-module"),
        "module_to_env_connector": hosting.callable_of(told.module_to_env, "--module-to-env"),
        "compile_forward": told.compile,
        "device": told.device,
    }
