"""Name and version of this software, for people at the other end of a wire."""

from functools import cache
from importlib.metadata import PackageNotFoundError, version


@cache
def software() -> str:
    """This package and its version."""
    try:
        return f"rollflow {version('rollflow')}"
    except PackageNotFoundError:
        return "rollflow"
