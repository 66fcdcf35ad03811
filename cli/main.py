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

from rollflow.stream.data.errors import RollflowError

_OF_MODULES = "replay-host", "check-host", "policy", "serve", "dataset", "record", "doctor", "top", "trace", "view"
# Command -> the module of `rollflow.cli` whose `add_to` adds it. A command imports its own module alone: most others
# need torch, which takes seconds.
_COMMANDS = {
    "rollout": "rollout",
    **dict.fromkeys(("env-host", "rollout-host"), "hosts"),
    **{name: name.replace("-", "_") for name in _OF_MODULES},
}
LOG_FORMAT = "%(asctime)s %(message)s"  # lines tell when something was lost, and for how long it is awaited


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that the arguments name; the exit status."""
    parser = argparse.ArgumentParser(
        prog="rollflow", description="Rollouts as streams: programs for other processes and hosts."
    )
    parser.add_argument("--version", action="version", version=f"rollflow {version('rollflow')}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")
    for module in _modules(sys.argv[1:] if arguments is None else arguments):
        importlib.import_module(f"rollflow.cli.{module}").add_to(commands)
    args, unknown = parser.parse_known_args(arguments)
    if unknown:  # said with the options of the command, not with those of all
        commands.choices[args.command].error(f"unrecognized arguments: {' '.join(unknown)}")
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that it says goodbye
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT, stream=sys.stderr)
    try:
        status: int = args.run(args)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except (RollflowError, OSError, ValueError) as error:
        if isinstance(error, BrokenPipeError) and _is_unread():
            return 128 + signal.SIGPIPE
        pages = error.pages if isinstance(error, RollflowError) else ()
        print(f"rollflow: {error}", *pages, sep="\n", file=sys.stderr)
        return 1
    return status


def _is_unread() -> bool:
    """True where nobody reads the output any more, as behind `head`; what is left of it goes nowhere then."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    is_unread = any(event & select.POLLERR for _, event in poll.poll(0))
    if is_unread:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return is_unread


def _modules(arguments: Sequence[str]) -> Sequence[str]:
    """Modules that are needed: that of the command that is named, none for the version, or else all, for help."""
    first = arguments[0] if arguments else ""
    if first == "--version":
        return []
    return [_COMMANDS[first]] if first in _COMMANDS else list(dict.fromkeys(_COMMANDS.values()))


if __name__ == "__main__":
    sys.exit(main())
