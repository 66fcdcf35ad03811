"""The command `rollflow`: what to do, read from the command line, and done."""

import argparse
import logging
import signal
import sys
import threading
from collections.abc import Sequence

from rollflow.cli import check_host, env_host, rollout, rollout_host
from rollflow.stream.errors import RollflowError


class Terminated(BaseException):
    """Raised where the program is told to end."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what the arguments say; the exit status."""
    parser = argparse.ArgumentParser(
        prog="rollflow", description="Rollouts as streams: programs for other processes and hosts."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in (rollout, env_host, rollout_host, check_host):
        command.add_to(commands)
    told = parser.parse_args(arguments)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _terminate)  # so that it says goodbye
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    try:
        status: int = told.run(told)
    except Terminated:
        return 128 + signal.SIGTERM
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except (RollflowError, OSError, ValueError) as error:
        print(f"rollflow: {error}", file=sys.stderr)
        return 1
    return status


def _terminate(*_: object) -> None:
    raise Terminated


if __name__ == "__main__":
    sys.exit(main())
