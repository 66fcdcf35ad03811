"""Hold a replay in this process.

Rollouts feed it as they feed a trainer: rollflow rollout --trainer ADDRESS. Trainers sample from it by a ReplayClient.
SIGTERM, or Ctrl-C, writes a last checkpoint, if there is one, and ends it.
"""

import argparse
import sys
from pathlib import Path

from rollflow import Replay
from rollflow.cli import arguments
from rollflow.sinks import ReplayHost, SamplesPerInsert

_OPTIONS = ("capacity", "batch_size", "ratio", "min_size")  # of the replay


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add = parser.add_argument
    add(
        "--rollouts",
        required=True,
        metavar="ADDRESS",
        help="where to listen for rollouts: tcp://host:port, or on this machine unix:/path or shm:/path",
    )
    add(
        "--trainers", required=True, metavar="ADDRESS", help="where to listen for trainers: as --rollouts, but for shm:"
    )
    add("--capacity", type=int, metavar="ROWS", help="rows that are kept (100000)")
    add("--batch-size", type=int, metavar="B", help="rows of a batch (256)")
    add("--ratio", type=float, help="steps sampled for each one inserted (any number)")
    add("--min-size", type=int, metavar="M", help="steps before the first sample (1)")
    add(
        "--replay",
        metavar="PACKAGE.MODULE:CALLABLE",
        help="makes the Replay, with a sampler and a rate of its own, in place of the options for it",
    )
    add("--checkpoint", type=Path, metavar="FOLDER", help="where the state is written; read at the start")
    add("--every", type=float, default=30.0, metavar="S", help="seconds between two checkpoints (30)")
    arguments.add_link(parser)


def run(args: argparse.Namespace) -> None:
    """Run the command."""
    host = ReplayHost(
        _replay_of(args),
        rollouts=args.rollouts,
        trainers=args.trainers,
        checkpoint=args.checkpoint,
        every=args.every,
        **arguments.link_of(args, listens=True),
    )
    with host:
        print(f"rollouts feed {host.rollouts}, trainers sample at {host.trainers}", file=sys.stderr, flush=True)
        host.wait()


def _replay_of(args: argparse.Namespace) -> Replay:
    """The replay for the arguments."""
    given = {name: value for name in _OPTIONS if (value := getattr(args, name)) is not None}
    if args.replay is not None and given:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise ValueError(f"--replay makes the replay by itself, expected it without {names}")
    if (make := arguments.object_of(args.replay, "--replay")) is not None:
        made = make()
        if not isinstance(made, Replay):
            raise ValueError(f"--replay {args.replay} has made a {type(made).__name__}, expected a Replay")
        return made
    of_rate = {name: given.pop(name) for name in ("ratio", "min_size") if name in given}
    if of_rate and "ratio" not in of_rate:
        raise ValueError("--min-size is of the rate, expected --ratio as well")
    return Replay(**{"capacity": 100_000, **given}, rate=SamplesPerInsert(**of_rate) if of_rate else None)
