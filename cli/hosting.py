"""What the commands have in common that do something on this host for a rollout on another."""

import argparse
import importlib
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium as gym

from rollflow.cli import connection
from rollflow.nodes.remote.host import Host
from rollflow.stream.wire import Limits

ENV_HELP = "an environment's id, or package.module:callable that makes one"


def add_to(parser: argparse.ArgumentParser, *, lanes: int, why_lanes: str) -> None:
    """Add the arguments that say what environments there are, and whom they are for.

    lanes, why_lanes    how many there are where nothing is said, if there are as many environments; what they are for
    """
    parser.add_argument("--env", required=True, help=ENV_HELP)
    parser.add_argument("--num-envs", type=int, default=None, help="how many (1, or as a vector environment has)")
    parser.add_argument("--lanes", type=int, default=None, help=f"groups that step apart: {why_lanes} ({lanes})")
    parser.set_defaults(most_lanes=lanes)
    connection.add_to(parser, connect="dial this gateway", listen="wait here for a gateway")
    parser.add_argument("--name", help="what this host is called in messages (the machine's name)")
    parser.add_argument(
        "--max-frame", type=int, default=1024, metavar="MIB", help="the largest message that is taken, in MiB (1024)"
    )
    parser.add_argument(
        "--retry", type=float, default=60.0, metavar="SECONDS", help="how long to dial a gateway that is away (60)"
    )


def options_of(told: argparse.Namespace) -> dict[str, Any]:
    """What the arguments say, as a host takes it. Raises ValueError and OSError where they don't go together."""
    lanes = told.lanes
    if lanes is None and told.num_envs is not None:
        lanes = min(told.most_lanes, told.num_envs)
    return {
        "env": environment_of(told.env),
        "num_envs": told.num_envs,
        "lanes": lanes,
        "secret": connection.secret_of(told),
        "tls": connection.tls_of(told),
        "name": told.name,
        "limits": limits_of(told.max_frame),
    }


def limits_of(max_frame: int) -> Limits:
    """Limits for messages of so many MiB. Raises ValueError where there are none such."""
    if not 1 <= max_frame < 4096:
        raise ValueError(f"--max-frame is {max_frame}, expected 1 to 4095")
    limits = Limits(max_frame=max_frame << 20)
    return replace(limits, undelivered=max(limits.undelivered, 2 * limits.max_frame))


def serve(host: Host, told: argparse.Namespace) -> int:
    """Serve the rollout that dials, or is dialled; the exit status."""
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
    made = getattr(_imported(module, f"--env {name}"), attribute, None)
    if callable(made):
        return made
    if attribute not in gym.registry:
        raise ValueError(f"--env {name}: {module} has no callable {attribute}, and there is no environment of that id")
    return name


def callable_of(name: str | None, option: str) -> Any:
    """The callable that an option names as package.module:callable. Raises ValueError where there is none."""
    if name is None:
        return None
    module, _, attribute = name.partition(":")
    made = getattr(_imported(module, f"{option} {name}"), attribute, None) if attribute else None
    if not callable(made):
        raise ValueError(f"{option} {name}: no such callable, expected package.module:callable")
    return made


def _imported(module: str, what: str) -> Any:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ValueError(f"{what}: {error}") from error
