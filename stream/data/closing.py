"""Closing of several things, also if one fails to close, or Ctrl-C comes."""

import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Self

from rollflow.stream.data.errors import described

Closing = tuple[str, Callable[[], Any]]
"""A name, for errors, and the function that closes."""


def close_all(closings: Iterable[Closing]) -> None:
    """Close each, also if one raises; then raise the first error, with notes about the others."""
    first: Exception | None = None
    for what, close in closings:
        try:
            close()
        except Exception as error:
            if first is None:
                first = error
                error.add_note(f"while closing {what}")
            else:
                _note(first, what, error)
    if first is not None:
        raise first


@contextmanager
def noting_in(error: BaseException | None, what: str) -> Iterator[None]:
    """Put what the block raises into the notes of an error that is on its way already.

        error    None: there is none
        what     is closed in the block

    It is raised as it is where there is none, or a SystemExit, GeneratorExit or cancellation, whose notes nobody sees.
    """
    try:
        yield
    except Exception as other:
        if not isinstance(error, Exception | KeyboardInterrupt):
            raise
        if other is not error:
            _note(error, what, other)


def _note(error: BaseException, what: str, other: Exception) -> None:
    error.add_note(f"closing {what} raised as well: {described(other)}")


def closing_notes(error: BaseException) -> list[str]:
    """The notes of an error that say what closing raised as well."""
    return [note for note in getattr(error, "__notes__", ()) if note.startswith("closing ")]


class ClosedOnExit:
    """Base of what a `with` block closes; what closing raises is told as `noting_in` does."""

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        with noting_in(error, type(self).__name__):
            self.close()


@contextmanager
def holding_interrupts(error: BaseException | None) -> Iterator[None]:
    """Hold back a Ctrl-C that comes within the block, if it has Python's own handler; a second one breaks it off.

    It is raised at the end of the block, unless the error that is on its way already is one.
    """
    is_in_main_thread = threading.current_thread() is threading.main_thread()
    if not is_in_main_thread or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    held: list[int] = []

    def hold(number: int, frame: object) -> None:
        if held:
            raise KeyboardInterrupt
        held.append(number)

    signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if held and not isinstance(error, KeyboardInterrupt):
        raise KeyboardInterrupt


@contextmanager
def closing_on_error(close: Callable[[], Any]) -> Iterator[None]:
    """Close if the block raises; what closing raises is told as `noting_in` does."""
    try:
        yield
    except BaseException as error:
        with noting_in(error, "what was open"):
            close()
        raise
