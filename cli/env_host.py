"""Step environments, of one agent each or of several, here for a rollout on another host, until it says goodbye."""

import argparse
import math
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

from rollflow import EnvHost
from rollflow.cli import arguments
from rollflow.nodes.env.remote.host import Host


def add_arguments(
    parser: argparse.ArgumentParser,
    *,
    lanes: int = 2,
    lanes_help: str = "some step while others wait for their actions",
) -> None:
    """Add the arguments that say what environments there are, and whom they are for.

    lanes, lanes_help    how many there are by default, if there are as many environments; what they are for
    """
    parser.add_argument("--env", required=True, help=arguments.ENV_HELP)
    parser.add_argument("--num-envs", type=int, default=None, help="how many (1, or as a vector environment has)")
    parser.add_argument("--lanes", type=int, default=None, help=f"groups that step apart: {lanes_help} ({lanes})")
    parser.set_defaults(most_lanes=lanes)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--connect", metavar="ADDRESS", help="dial this gateway: tcp://host:port or unix:/path")
    where.add_argument("--listen", metavar="ADDRESS", help="wait here for a gateway: tcp://host:port or unix:/path")
    arguments.add_link(parser)
    parser.add_argument(
        "--name",
        help="what this host is called in messages (the machine's name and this process' number)",
    )
    parser.add_argument(
        "--retry", type=float, default=60.0, metavar="SECONDS", help="how long to dial a gateway that is away (60)"
    )
    parser.add_argument(
        "--grace",
        type=float,
        default=20.0,
        metavar="SECONDS",
        help="how long to hand over what there is, once told to end by SIGTERM; a second one ends it at once (20)",
    )


def run(args: argparse.Namespace) -> int:
    """Serve the rollout that dials, or is dialled, until it ends or SIGTERM comes; the exit status."""
    return serve(args, EnvHost, lambda _: {})


def serve(args: argparse.Namespace, kind: Callable[..., Host], more_of: Callable[..., dict[str, Any]]) -> int:
    """Serve by a host of some kind.

    more_of    gives its other keywords for the arguments

    Raises ValueError and OSError if the arguments don't go together.
    """
    link = arguments.link_of(args, listens=args.listen is not None)
    lanes = args.lanes
    if lanes is None and args.num_envs is not None:
        lanes = min(args.most_lanes, args.num_envs)
    env = arguments.environment_of(args.env)  # after the secret, which is no environment's to see
    with kind(env=env, num_envs=args.num_envs, lanes=lanes, name=args.name, **more_of(args)) as host:
        if not 0 <= args.grace < math.inf:
            raise ValueError(f"--grace is {args.grace:g}, expected seconds from 0 on")
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, lambda *_: host.drain(0.0 if host.is_draining else args.grace))
        if args.connect is not None:
            reason = host.connect(args.connect, retry_s=args.retry, **link)
            if not host.is_draining:
                print(f"the rollout said goodbye: {reason}", file=sys.stderr)
        else:
            with host.listening(args.listen, **link) as address:
                print(f"listening on {address}", file=sys.stderr, flush=True)
                host.serve()
        return 128 + signal.SIGTERM if host.is_draining else 0
