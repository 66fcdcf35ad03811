"""What this end of a wire is called, and name and version of its software, for people at the other."""

import os
import socket
from functools import cache
from importlib.metadata import PackageNotFoundError, version


@cache
def software() -> str:
    """This package and its version."""
    try:
        return f"rollflow {version('rollflow')}"
    except PackageNotFoundError:
        return "rollflow"


def process_name() -> str:
    """Name of this machine with the number of this process: two hosts of one machine are not taken for each other."""
    return f"{socket.gethostname()}-{os.getpid()}"
