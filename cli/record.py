"""Have a saved policy play whole episodes, and write them to a dataset.

The same seed gives the same steps. Ctrl-C ends it; what was played until then is in the dataset.
"""

import argparse
import copy
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rollflow import DatasetSink, Policy
from rollflow.cli import arguments
from rollflow.nodes.rollout.rollout import Rollout, rollout_of
from rollflow.stream.fragments.fragment import ChunkIndex, Fragment


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("--env", required=True, help=arguments.ENV_HELP)
    parser.add_argument("--policy", type=Path, required=True, metavar="PATH", help="a saved policy")
    parser.add_argument("--episodes", type=int, required=True, metavar="N", help="whole episodes")
    parser.add_argument("--out", type=Path, required=True, help="the dataset's folder; one that is there is added to")
    parser.add_argument("--num-envs", type=int, default=8, help="environments side by side, with equal shares (8)")
    parser.add_argument("--seed", type=int, help="of environments and sampling (a fresh one)")
    parser.add_argument(
        "--extra",
        nargs="*",
        metavar="NAME",
        help="outputs of the module to be written; none of them without a name (all)",
    )
    arguments.add_allow(parser)
    parser.add_argument("--device", help="where forward passes are done")


def run(args: argparse.Namespace) -> None:
    """Run the command."""
    if args.episodes < 1 or args.num_envs < 1:
        raise ValueError(f"--episodes {args.episodes} --num-envs {args.num_envs}, expected 1 or more of each")
    policy = Policy.load(args.policy, allow=args.allow, device=args.device)
    env, num_envs = arguments.environment_of(args.env), min(args.num_envs, args.episodes)
    rollout = rollout_of(policy, env, num_envs=num_envs, seed=args.seed)
    metadata = {"policy": str(args.policy), "trained_on": policy.trained_on}
    try:
        with rollout, DatasetSink(args.out, rollout=rollout, extra=args.extra, metadata=metadata) as sink:
            try:
                for count in record_episodes(rollout, sink, args.episodes):
                    if sys.stderr.isatty():
                        print(f"\r{count} episodes", end="", file=sys.stderr, flush=True)
            finally:
                sink.close()
                if sys.stderr.isatty():
                    print(file=sys.stderr)  # behind the number of episodes
                if sink.num_steps:
                    print(f"{args.out} has {sink.num_steps} steps more, with seed {rollout.seed}", flush=True)
    finally:
        if lost := rollout.lost.get("failed"):
            print(f"{lost} steps of the fragment that was being made are not in it", file=sys.stderr, flush=True)


def record_episodes(rollout: Rollout, sink: DatasetSink, episodes: int) -> Iterator[int]:
    """Run a rollout of one lane, and write the first episodes of its slots to a sink, in equal shares.

    episodes    number, which is reached unless the rollout ends before

    Gives the number of whole episodes so far, after each fragment.
    """
    slots, count = rollout.environments.num_envs, 0
    shares = (episodes + np.arange(slots)[::-1]) // slots  # the first slots play one more
    for fragment in rollout.fragments():
        chunks = fragment.chunks
        kept = chunks.number < shares[chunks.slot]
        if kept.any():
            sink(_with_chunks(fragment, kept))
        count += int(np.count_nonzero((chunks.terminated | chunks.truncated) & kept))
        yield count
        if count == episodes:
            break


def _with_chunks(fragment: Fragment, kept: NDArray[np.bool_]) -> Fragment:
    """A fragment with some of another's chunks, and with all of its columns and last observations.

    kept    bool[C]
    """
    if kept.all():
        return fragment
    chosen = copy.copy(fragment)
    vars(chosen).pop("row_order", None)
    chosen.chunks = ChunkIndex(**{each.name: getattr(fragment.chunks, each.name)[kept] for each in fields(ChunkIndex)})
    return chosen
