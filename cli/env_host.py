"""`rollflow env-host`: environments on this host for a rollout on another."""

import argparse
import importlib
import sys
from pathlib import Path
from typing import Any

from rollflow.cli import connection
from rollflow.nodes import EnvHost


def add_to(commands: Any) -> None:
    """Add the command to those of `rollflow`."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "env-host",
        help="step environments here for a rollout on another host",
        description="Step environments here for a rollout on another host, until it says goodbye.",
    )
    parser.add_argument("--env", required=True, help="an environment's id, or package.module:callable that makes one")
    parser.add_argument("--num-envs", type=int, default=1, help="how many (1)")
    parser.add_argument(
        "--lanes",
        type=int,
        default=None,
        help="groups that step apart: some step while others wait (2, if there are 2)",
    )
    connection.add_to(parser, connect="dial this gateway", listen="wait here for a gateway")
    parser.add_argument("--name", help="what this host is called in messages (the machine's name)")
    parser.add_argument(
        "--retry", type=float, default=60.0, metavar="SECONDS", help="how long to dial a gateway that is away (60)"
    )
    parser.set_defaults(run=run)


def run(told: argparse.Namespace) -> int:
    """Do it; the exit status."""
    secret, tls = connection.secret_of(told), connection.tls_of(told)
    lanes = min(2, told.num_envs) if told.lanes is None else told.lanes
    env = environment_of(told.env)
    with EnvHost(env, num_envs=told.num_envs, lanes=lanes, secret=secret, tls=tls, name=told.name) as host:
        if told.connect is not None:
            print(f"the rollout said goodbye: {host.connect(told.connect, retry_s=told.retry)}", file=sys.stderr)
            return 0
        with host.listening(told.listen) as address:
            print(f"listening on {address}", file=sys.stderr, flush=True)
            host.serve()
    return 0


def environment_of(name: str) -> Any:
    """What `--env` names: a callable of a module, or an environment's id, which may begin with a module as well."""
    module, _, attribute = name.partition(":")
    if not attribute:
        return name
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        made = getattr(importlib.import_module(module), attribute, None)
    except ModuleNotFoundError as error:
        raise ValueError(f"--env {name}: {error}") from error
    return made if callable(made) else name
