"""Delayed Ctrl-C: a run in the main thread holds KeyboardInterrupt back where it would lose an item.

Python raises KeyboardInterrupt between any two instructions. Within the engine that would lose the current item: a
lane, a fragment. So a run holds it back there. It lets it through in long user code and while it waits: in the calls of
`breakable` functions. A second Ctrl-C is raised at once.
"""

# `signal` looks each handler up in an enum. That takes ten times as long, and a run sets handlers for every fragment.
import _signal  # type: ignore[import-not-found]
import signal
import threading
from collections.abc import Callable
from types import CodeType, FrameType, TracebackType
from typing import Any, TypeVar

C = TypeVar("C", bound=Callable[..., Any])

_breakable: set[CodeType] = set()
_SIGINT = int(signal.SIGINT)


class _Interrupts:
    """State of delayed interrupts. Python calls signal handlers in the main thread only, and this is for it alone.

    held            number of interrupts that have come and were not raised
    is_forced       whether a second one was raised where it should have been held back
    """

    __slots__ = ("held", "is_forced")

    def __init__(self) -> None:
        self.held = 0
        self.is_forced = False


interrupts = _Interrupts()


def breakable(function: C) -> C:
    """Decorate a function in whose calls Ctrl-C is raised at once: what it does can be lost, or done again.

    The handler of the signal finds the function among those that are being called. So calls cost nothing.
    """
    _breakable.add(function.__code__)
    return function


class HoldingBack:
    """A block in which Ctrl-C is raised only in `breakable` functions, by `raise_held`, and at the block's end.

    It does nothing in other threads, or if SIGINT has another handler than Python's own. It may be entered again.
    """

    __slots__ = ("_is_handling",)

    def __enter__(self) -> None:
        is_ours = _signal.getsignal(_SIGINT) is signal.default_int_handler
        self._is_handling = is_ours and _is_in_main_thread()
        if self._is_handling:
            interrupts.held, interrupts.is_forced = 0, False
            _signal.signal(_SIGINT, _hold)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._is_handling:
            _signal.signal(_SIGINT, signal.default_int_handler)
            if not isinstance(error, KeyboardInterrupt):
                raise_held()


def can_interrupt() -> bool:
    """True if SIGINT raises KeyboardInterrupt in the main thread, at once or when it is sent a second time."""
    return signal.getsignal(signal.SIGINT) in (signal.default_int_handler, _hold)


def raise_held() -> None:
    """Raise KeyboardInterrupt if one is held back. In other threads than the main one this does nothing."""
    if interrupts.held and _is_in_main_thread():
        interrupts.held = 0
        raise KeyboardInterrupt


def was_forced() -> bool:
    """True if the KeyboardInterrupt that this thread has just had was raised where it should have been held back."""
    return interrupts.is_forced and _is_in_main_thread()


def _is_in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _hold(number: int, frame: FrameType | None) -> None:
    lets_through = _is_breakable(frame)
    if lets_through or interrupts.held:
        interrupts.is_forced = not lets_through
        interrupts.held = 0
        raise KeyboardInterrupt
    interrupts.held += 1


def _is_breakable(frame: FrameType | None) -> bool:
    """True if a `breakable` function is among those that are being called."""
    while frame is not None:
        if frame.f_code in _breakable:
            return True
        frame = frame.f_back
    return False
