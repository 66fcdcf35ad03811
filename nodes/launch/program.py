"""Main function of a worker process that makes one call, such as that of a host of whole rollouts."""

import logging
import os
import pickle
import signal
import socket
import sys
from collections.abc import Mapping
from typing import Any

from rollflow.nodes.env.workers.worker_process import become_worker
from rollflow.stream.data.blocks import SharedBlock
from rollflow.stream.data.errors import RollflowError

_MOST_BYTES = 1 << 12  # of an order: a size and a name


def main(life: int, fds: list[int]) -> None:
    """Make the call that comes in a block through the first socket, with all that it writes going to the second.

    life    pipe at whose end this process ends
    """
    become_worker("rollflow-host", life)
    orders, output = fds
    for stream in (1, 2):
        os.dup2(output, stream)
    os.close(output)
    for written in (sys.stdout, sys.stderr):
        written.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    with socket.socket(fileno=orders) as sock:
        order, [call], *_ = socket.recv_fds(sock, _MOST_BYTES, 1)
    size, name = pickle.loads(order)
    status = pickle.loads(SharedBlock(size, call).taken().data)(name)
    if status:
        sys.exit(status)


def serve_rollouts(options: Mapping[str, Any], address: str, secret: str, name: str) -> int:
    """Have a host of whole rollouts dial a rollout, until that says goodbye or SIGTERM comes: the exit status.

    options    keywords of `RolloutHost`
    """
    from rollflow.nodes.offloaded.rollout_host import RolloutHost

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    try:
        with RolloutHost(**options, name=name) as host:
            signal.signal(signal.SIGTERM, lambda *_: host.drain(0.0) if host.is_draining else host.drain())
            host.connect(address, secret=secret)
            return 128 + signal.SIGTERM if host.is_draining else 0
    except (RollflowError, OSError, ValueError) as error:
        pages = error.pages if isinstance(error, RollflowError) else ()
        print(f"rollflow: {error}", *pages, sep="\n", file=sys.stderr)  # noqa: T201  # what the rollout's error shows
        return 1
