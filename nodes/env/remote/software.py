"""Name and version of the software at this end of a wire, for people at the other."""

from importlib.metadata import PackageNotFoundError, version


def software() -> str:
    """This package and its version."""
    try:
        return f"rollflow {version('rollflow')}"
    except PackageNotFoundError:
        return "rollflow"
