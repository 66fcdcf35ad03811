"""Entry point of the command `rollflow`."""

import argparse
import logging
import signal
import sys
import threading
from collections.abc import Sequence
from importlib.metadata import version

from rollflow.cli import (
    check_host,
    dataset,
    doctor,
    hosts,
    plan,
    policy,
    record,
    replay_host,
    rollout,
    serve,
    top,
    trace,
    up,
    view,
)
from rollflow.stream.data.errors import RollflowError

LOG_FORMAT = "%(asctime)s %(message)s"  # lines tell when something was lost, and for how long it is awaited


class Terminated(BaseException):
    """Raised where the program is told to end."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that the arguments name; the exit status."""
    parser = argparse.ArgumentParser(
        prog="rollflow", description="Rollouts as streams: programs for other processes and hosts."
    )
    parser.add_argument("--version", action="version", version=f"rollflow {version('rollflow')}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for add_to in (
        rollout.add_to,
        plan.add_to,
        hosts.add_env_host,
        hosts.add_rollout_host,
        replay_host.add_to,
        check_host.add_to,
        policy.add_to,
        serve.add_to,
        dataset.add_to,
        record.add_to,
        up.add_to,
        doctor.add_to,
        top.add_to,
        trace.add_to,
        view.add_to,
    ):
        add_to(commands)
    args = parser.parse_args(arguments)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _terminate)  # so that it says goodbye
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT, stream=sys.stderr)
    try:
        status: int = args.run(args)
    except Terminated:
        return 128 + signal.SIGTERM
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except (RollflowError, OSError, ValueError) as error:
        pages = error.pages if isinstance(error, RollflowError) else ()
        print(f"rollflow: {error}", *pages, sep="\n", file=sys.stderr)
        return 1
    return status


def _terminate(*_: object) -> None:
    raise Terminated


if __name__ == "__main__":
    sys.exit(main())
