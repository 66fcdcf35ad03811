"""Entry point of the command `rollflow`."""

import argparse
import importlib
import logging
import os
import select
import signal
import sys
import threading
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

from rollflow.stream.data.closing import closing_notes
from rollflow.stream.data.errors import RollflowError

COMMANDS = {
    "rollout": "run a rollout here that feeds a trainer in another process or on another host",
    "env-host": "step environments here for a rollout on another host",
    "rollout-host": "run whole rollouts here, environments and policy, for a trainer on another host",
    "replay-host": "hold a replay that several rollouts write into, and several trainers sample from",
    "check-host": "check whether a host of environments keeps to the protocol",
    "policy": "show, check or export saved policies",
    "serve": "have saved policies act for clients, over HTTP and WebSocket",
    "dataset": "show, check, merge, filter or convert datasets",
    "record": "have a saved policy play whole episodes, and write them to a dataset",
    "doctor": "say where the threads of a running process stand",
    "top": "look at the runs of this user on this machine",
    "view": "look at the runs of this user on this machine in a browser",
}
"""Command -> what it does. Its module has `add_arguments(parser)` and `run(args)`, and is described by its docstring.

A command imports its own module alone: most others need torch, which takes seconds.
"""
LOG_FORMAT = "%(asctime)s %(message)s"  # lines tell when something was lost, and for how long it is awaited


class Parser(argparse.ArgumentParser):
    """Takes options by their whole names alone, as the parsers of its commands do: an option more breaks no script."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that the arguments name; the exit status."""
    parser = Parser(prog="rollflow", description="Rollouts as streams: programs for other processes and hosts.")
    parser.add_argument("--version", action="version", version=f"rollflow {version('rollflow')}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")
    words = sys.argv[1:] if arguments is None else arguments
    named = next((word for word in words if word in COMMANDS), None)
    for name, summary in COMMANDS.items():
        command = commands.add_parser(name, help=summary)
        if name == named:
            module = importlib.import_module(f"rollflow.cli.{name.replace('-', '_')}")
            command.description = module.__doc__
            module.add_arguments(command)
            command.set_defaults(run=module.run)
    args, unknown = parser.parse_known_args(words)
    if unknown:  # said with the options of the command, not with those of all
        commands.choices[args.command].error(f"unrecognized arguments: {' '.join(unknown)}")
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that it says goodbye
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT, stream=sys.stderr)
    try:
        return args.run(args) or 0
    except KeyboardInterrupt as error:
        for note in closing_notes(error):
            print(f"rollflow: {note}", file=sys.stderr)
        return 128 + signal.SIGINT
    except (RollflowError, OSError, ValueError) as error:
        if isinstance(error, BrokenPipeError) and _is_unread():
            return 128 + signal.SIGPIPE
        pages = error.pages if isinstance(error, RollflowError) else ()
        print(f"rollflow: {error}", *closing_notes(error), *pages, sep="\n", file=sys.stderr)
        return 1


def _is_unread() -> bool:
    """True if nobody reads the output any more, as behind `head`; what is left of it goes nowhere then."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    is_unread = any(event & select.POLLERR for _, event in poll.poll(0))
    if is_unread:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return is_unread


if __name__ == "__main__":
    sys.exit(main())
