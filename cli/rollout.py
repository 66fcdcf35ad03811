"""Run a rollout here whose fragments go to a TrainerStream elsewhere, until it says goodbye.

Ctrl-C has the environments stop, and waits until the trainer has what was under way. At its end it says which stage has
held the others back.
"""

import argparse
import sys
from typing import Any, get_args

from rollflow import Forward, MultiAgentRollout, Rollout, feed
from rollflow.cli import arguments
from rollflow.nodes.env.environments import kind_of
from rollflow.nodes.rollout.options import Where
from rollflow.stream.graph.report import Report

_SETTING = ("num_envs", "lanes", "where", "workers", "fragment_length", "seed", "num_fragments")  # of a rollout


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add = parser.add_argument
    add("--env", required=True, help=arguments.ENV_HELP)
    add("--num-envs", type=int, default=1, help="how many environments (1)")
    add("--lanes", type=int, help="groups of them that step apart (as suits --where)")
    add("--where", choices=get_args(Where), default="inline", help="where the environments step (inline)")
    add("--workers", type=int, help="processes, for where=processes and where=rollouts (one a core)")
    add("--fragment-length", type=int, default=128, metavar="T", help="steps in a fragment (128)")
    add("--seed", type=int, help="of environments and sampling (a fresh one)")
    add(
        "--trainer",
        required=True,
        metavar="ADDRESS",
        help="tcp://host:port, or on this machine unix:/path or shm:/path",
    )
    add("--num-fragments", type=int, metavar="N", help="of each lane, after which it ends (no end)")
    arguments.add_acting(parser, otherwise="a default module for the spaces")
    arguments.add_link(parser)
    add("--name", help="what the trainer calls this rollout (the machine's name)")
    add("--retry", type=float, metavar="SECONDS", help="how long to dial a trainer that is away (for ever)")
    add(
        "--log",
        action="append",
        metavar="KIND:TARGET",
        help="where figures are written, such as tensorboard:runs/1 or prometheus:9100; may be given several times",
    )
    add("--progress", action="append_const", dest="log", const="progress:", help="show how it goes, as --log progress:")


def run(args: argparse.Namespace) -> None:
    """Run the command."""
    options = {"name": args.name, "retry_s": args.retry, **arguments.link_of(args, listens=False)}
    goodbye = feed(_rollout_of(args), args.trainer, sends="fragments", on_end=_show, **options)
    print("the rollout has ended" if goodbye is None else f"the trainer said goodbye: {goodbye}", file=sys.stderr)


def _rollout_of(args: argparse.Namespace) -> Rollout | MultiAgentRollout:
    """The rollout for the arguments: of one agent or of several, as the environment has."""
    env, acting = arguments.environment_of(args.env), arguments.acting_of(args)
    of_agents = {name: acting.pop(name) for name in arguments.OF_AGENTS}
    options: dict[str, Any] = {
        **{name: getattr(args, name) for name in _SETTING},
        "log": args.log,
        "forward": Forward(compile=acting.pop("compile_forward")),
        **acting,
    }
    with kind_of(env) as (kind, _):  # the environment that it has made is closed: workers make their own
        has_several = kind.has_several
    if has_several:
        return MultiAgentRollout(env, **options, **of_agents)
    if useless := [name for name, value in of_agents.items() if value is not None]:
        raise ValueError(f"{useless[0]} is for environments with several agents; expected it to be left out")
    return Rollout(env, **options)


def _show(report: Report) -> None:
    print(report, file=sys.stderr)
