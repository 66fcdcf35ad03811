"""Closing several things, of which one may fail to."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

Closing = tuple[str, Callable[[], Any]]
"""What is closed, for errors, and how."""


def close_all(closings: Iterable[Closing]) -> None:
    """Close each, also where one raises; then raise the first error, which tells of the others in its notes."""
    first: Exception | None = None
    for what, close in closings:
        try:
            close()
        except Exception as error:
            if first is None:
                first = error
                error.add_note(f"while closing {what}")
            else:
                first.add_note(f"closing {what} raised as well: {type(error).__name__}: {error}")
    if first is not None:
        raise first


@contextmanager
def closing_on_error(close: Callable[[], Any]) -> Iterator[None]:
    """Close where the block raises; what closing raises goes into the error's notes."""
    try:
        yield
    except BaseException as error:
        try:
            close()
        except Exception as other:
            error.add_note(f"closing what had been opened raised as well: {type(other).__name__}: {other}")
        raise
