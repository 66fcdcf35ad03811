"""The command `rollflow`: what to do, read from the command line, and done."""

import argparse
import logging
import sys
from collections.abc import Sequence

from rollflow.cli import check_host, env_host
from rollflow.stream.errors import RollflowError


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what the arguments say; the exit status."""
    parser = argparse.ArgumentParser(prog="rollflow", description="Rollouts as streams: programs for other hosts.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in (env_host, check_host):
        command.add_to(commands)
    told = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    try:
        status: int = told.run(told)
    except KeyboardInterrupt:
        return 130
    except (RollflowError, OSError, ValueError) as error:
        print(f"rollflow: {error}", file=sys.stderr)
        return 1
    return status


if __name__ == "__main__":
    sys.exit(main())
