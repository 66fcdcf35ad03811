"""`rollflow env-host` and `rollflow rollout-host`: environments, or whole rollouts, here for a rollout elsewhere."""

import argparse
import math
import signal
import sys
import threading
from typing import Any

from rollflow import EnvHost, RolloutHost
from rollflow.cli import arguments
from rollflow.nodes.env.remote.host import Host


def add_to(commands: Any) -> None:
    """Add `env-host` and `rollout-host` to the commands of `rollflow`."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "env-host",
        help="step environments here for a rollout on another host",
        description="Step environments, of one agent each or of several, here for a rollout on another host, until it "
        "says goodbye.",
    )
    _add_hosting(parser, lanes=2, lanes_help="some step while others wait for their actions")
    parser.set_defaults(run=_serve, host_of=lambda args: EnvHost(**_options_of(args)))
    parser = commands.add_parser(
        "rollout-host",
        help="run whole rollouts here, environments and policy, for a trainer on another host",
        description="Run whole rollouts here, environments, connectors and copies of modules, for a Rollout or a "
        "MultiAgentRollout over RemoteRollouts on another host, until it says goodbye. Modules and connectors must be "
        "those of the rollout.",
    )
    lanes_help = "each has a thread, for environments that wait or let the interpreter go"
    _add_hosting(parser, lanes=1, lanes_help=lanes_help)
    arguments.add_acting(
        parser,
        otherwise="the default module, as the rollout has it",
        several=", or is a dict of those; several by id: ID= alone is a default one",
    )
    parser.set_defaults(run=_serve, host_of=lambda args: RolloutHost(**_options_of(args), **arguments.acting_of(args)))


def _add_hosting(parser: argparse.ArgumentParser, *, lanes: int, lanes_help: str) -> None:
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
    arguments.add_protection(parser)
    parser.add_argument(
        "--name",
        help="what this host is called in messages; it takes the place of a lost "
        "host of that name at once (the machine's name and this process' number)",
    )
    arguments.add_max_frame(parser)
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


def _options_of(args: argparse.Namespace) -> dict[str, Any]:
    """Keywords of a host for the arguments. Raises ValueError and OSError where they don't go together."""
    lanes = args.lanes
    if lanes is None and args.num_envs is not None:
        lanes = min(args.most_lanes, args.num_envs)
    return {
        "env": arguments.environment_of(args.env),
        "num_envs": args.num_envs,
        "lanes": lanes,
        "name": args.name,
    }


def _serve(args: argparse.Namespace) -> int:
    """Serve the rollout that dials, or is dialled, until it ends or SIGTERM comes; the exit status."""
    protection: dict[str, Any] = {
        "secret": arguments.secret_of(args),
        "tls": arguments.tls_of(args),
        "limits": arguments.limits_of(args.max_frame),
    }
    made: Host = args.host_of(args)  # after the secret, which is no environment's to see
    with made as host:
        if not 0 <= args.grace < math.inf:
            raise ValueError(f"--grace is {args.grace:g}, expected seconds from 0 on")
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, lambda *_: host.drain(0.0 if host.is_draining else args.grace))
        if args.connect is not None:
            reason = host.connect(args.connect, retry_s=args.retry, **protection)
            if not host.is_draining:
                print(f"the rollout said goodbye: {reason}", file=sys.stderr)
        else:
            with host.listening(args.listen, **protection) as address:
                print(f"listening on {address}", file=sys.stderr, flush=True)
                host.serve()
        return 128 + signal.SIGTERM if host.is_draining else 0
