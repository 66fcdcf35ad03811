"""`rollflow rollout`: a rollout on this host that feeds a trainer in another process or on another host."""

import argparse
import sys
from typing import Any

from rollflow.cli import acting, connection, hosting
from rollflow.nodes import Rollout
from rollflow.sinks import feed
from rollflow.stream.report import Report

_WHERE = ("inline", "threads", "processes", "rollouts", "auto")


def add_to(commands: Any) -> None:
    """Add the command to those of `rollflow`."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "rollout",
        help="run a rollout here that feeds a trainer in another process or on another host",
        description="Run a rollout here whose fragments go to a TrainerStream in another process or on another host, "
        "until it says goodbye. Ctrl-C has the environments stop, and waits until the trainer has what was under way. "
        "At its end it says which stage has held the others back.",
    )
    parser.add_argument("--env", required=True, help=hosting.ENV_HELP)
    parser.add_argument(
        "--trainer",
        required=True,
        metavar="ADDRESS",
        help="tcp://host:port, or on this machine unix:/path or shm:/path",
    )
    parser.add_argument("--num-envs", type=int, default=1, help="how many environments (1)")
    parser.add_argument("--lanes", type=int, help="groups of them that step apart (as suits --where)")
    parser.add_argument("--where", choices=_WHERE, default="inline", help="where the environments step (inline)")
    parser.add_argument("--workers", type=int, help="processes, for where=processes and where=rollouts (one a core)")
    parser.add_argument("--fragment-length", type=int, default=128, metavar="T", help="steps in a fragment (128)")
    parser.add_argument("--num-fragments", type=int, metavar="N", help="of each lane, after which it ends (no end)")
    parser.add_argument("--seed", type=int, help="of environments and sampling (a fresh one)")
    acting.add_to(parser, otherwise="a default module for the spaces")
    connection.add_protection_to(parser)
    parser.add_argument("--name", help="what the trainer calls this rollout (the machine's name)")
    parser.add_argument(
        "--linger", type=float, default=60.0, metavar="S", help="how long the trainer may take for the last ones (60)"
    )
    parser.add_argument(
        "--max-frame", type=int, default=1024, metavar="MIB", help="the largest message that is taken, in MiB (1024)"
    )
    parser.set_defaults(run=run, listen=None)


def run(told: argparse.Namespace) -> int:
    """Do it; the exit status."""
    options = {
        "secret": connection.secret_of(told),
        "tls": connection.tls_of(told),
        "name": told.name,
        "linger": told.linger,
        "limits": hosting.limits_of(told.max_frame),
    }
    rollout = Rollout(
        hosting.environment_of(told.env),
        num_envs=told.num_envs,
        lanes=told.lanes,
        where=told.where,
        workers=told.workers,
        fragment_length=told.fragment_length,
        num_fragments=told.num_fragments,
        seed=told.seed,
        **acting.options_of(told),
    )
    goodbye = feed(rollout, told.trainer, on_end=_show, **options)
    print("the rollout has ended" if goodbye is None else f"the trainer said goodbye: {goodbye}", file=sys.stderr)
    return 0


def _show(report: Report) -> None:
    print(report, file=sys.stderr)
